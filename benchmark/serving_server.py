"""A server for a benchmark: started and ended with all its processes, and asked over HTTP."""

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any


class ServerError(Exception):
    """The server did not come up, or answered what it should not."""


@contextlib.contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], *, url: str, log: Path, timeout_s: float
) -> Iterator[subprocess.Popen]:
    """Within, `command` serves at `url` and writes to `log`; after, all its processes have ended. Yields the launcher.

    Raises:
        ServerError: something else serves there, or it ended, or was not healthy in time; with the log's last lines.
    """
    if healthy(url):
        raise ServerError(f"{url} is served by another process")
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, env=dict(environment), stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + timeout_s
            while not healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    state = "is not healthy" if process.poll() is None else f"ended with {process.returncode}"
                    tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-20:])
                    raise ServerError(f"the server {state}\n{tail}")
                time.sleep(0.2)
            yield process
        finally:
            _end(process)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def get(url: str, path: str) -> dict[str, Any]:
    """The JSON that the server answers.

    Raises:
        ServerError: it does not.
    """
    try:
        with urllib.request.urlopen(url + path, timeout=30) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise ServerError(f"{url}{path}: {error}") from error


def post(url: str, path: str, body: Mapping[str, Any], *, timeout_s: float = 120.0) -> Any:
    """Send JSON and get the JSON that the server answers; None where it answers anything else.

    Raises:
        ServerError: the server does not answer with success; with what it says instead.
    """
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, data=json.dumps(body).encode(), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        raise ServerError(f"{url}{path}: {error}: {error.read().decode(errors='replace')[:500]}") from error
    except (OSError, HTTPException) as error:
        raise ServerError(f"{url}{path}: {error}") from error
    try:
        return json.loads(text)
    except ValueError:
        return None


def flush_cache(url: str, *, attempts: int = 40) -> None:
    """Empty the prefix cache. The server refuses while it still finishes a request; it has a while to."""
    for attempt in range(attempts):
        try:
            post(url, "/flush_cache", {})
            return
        except ServerError:
            if attempt == attempts - 1:
                raise
            time.sleep(0.25)


def _end(process: subprocess.Popen) -> None:
    """SIGTERM to the whole group, and SIGKILL to what is left of it after a while."""
    for sent, wait in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait)
            if sent == signal.SIGTERM:
                time.sleep(0.5)
