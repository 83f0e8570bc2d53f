"""A server for a benchmark: started and ended with all its processes, and asked over HTTP."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any


class ServerError(Exception):
    """The server did not come up, or answered what it should not."""


class Signalled(KeyboardInterrupt):
    """A signal asked this process to end; `exit_code` is what a shell reports of one that it ended."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Within, the first SIGINT, SIGTERM or SIGHUP raises `Signalled` in the main thread, which must enter this.

    Those after it do nothing, so that they do not cut short the end of the servers. One that was ignored before, as
    under nohup, still is.
    """
    first = []

    def raise_once(number: int, frame: object) -> None:
        if not first:
            first.append(number)
            raise Signalled(number)

    def insist() -> None:
        # A signal that another thread takes, or that comes just before the main thread waits for an answer, does not
        # end that wait: Python runs the handler after it. One sent to the main thread while it waits does.
        while told := heard.recv(1):
            while told[0] in before and not first:
                signal.pthread_kill(main_thread, told[0])
                time.sleep(0.1)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    main_thread = threading.get_ident()
    heard, told_by_python = socket.socketpair()
    told_by_python.setblocking(False)
    previous = signal.set_wakeup_fd(told_by_python.fileno(), warn_on_full_buffer=False)
    insisting = threading.Thread(target=insist, daemon=True)
    insisting.start()
    try:
        for number in before:
            signal.signal(number, raise_once)
        yield
    finally:
        first.append(None)  # a signal from here on does nothing; and none is sent again once its handler is restored
        signal.set_wakeup_fd(previous)
        told_by_python.close()
        insisting.join()
        heard.close()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def started(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    url: str,
    log: Path,
    timeout_s: float,
    stop: threading.Event | None = None,
) -> Iterator[subprocess.Popen]:
    """Within, `command` serves at `url` and writes to `log`; after, all its processes have ended. Yields the launcher.

    stop: once it is set, the server is awaited no longer.

    Raises:
        ServerError: something else serves there, or it cannot run, or it ended, or was not healthy in time; with the
            log's last lines.
    """
    stop = stop or threading.Event()
    if healthy(url):
        raise ServerError(f"{url} is served by another process")
    with log.open("w") as stream:
        try:
            process = subprocess.Popen(
                command, env=dict(environment), stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise ServerError(f"the server command does not run: {error}") from error
        try:
            deadline = time.monotonic() + timeout_s
            while not healthy(url):
                if stop.is_set():
                    raise ServerError("the server is awaited no longer")
                if process.poll() is not None or time.monotonic() > deadline:
                    state = "is not healthy" if process.poll() is None else f"ended with {process.returncode}"
                    tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-20:])
                    raise ServerError(f"the server {state}\n{tail}")
                stop.wait(0.2)
            yield process
        finally:
            _end(process)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (OSError, HTTPException):
        return False


def get(url: str, path: str) -> dict[str, Any]:
    """The JSON object that the server answers.

    Raises:
        ServerError: it does not.
    """
    try:
        with urllib.request.urlopen(url + path, timeout=30) as answer:
            found = json.load(answer)
    except (OSError, ValueError, HTTPException) as error:
        raise ServerError(f"{url}{path}: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict):
        raise ServerError(f"{url}{path}: {str(found)[:200]}, wanted: a JSON object")
    return found


def post(url: str, path: str, body: Mapping[str, Any], *, timeout_s: float = 120.0) -> Any:
    """Send JSON and get the JSON that the server answers; None where it answers anything else.

    Raises:
        ServerError: the server does not answer with success; with what it says instead.
    """
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, data=json.dumps(body).encode(), headers=headers)
    try:
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


def flush_cache(url: str, *, attempts: int = 40, timeout_s: float = 30.0) -> None:
    """Empty the prefix cache. The server refuses while it still finishes a request; it has a while to, in all.

    Raises:
        ServerError: it still refuses, or does not answer.
    """
    deadline = time.monotonic() + timeout_s
    for attempt in range(attempts):
        try:
            post(url, "/flush_cache", {}, timeout_s=max(deadline - time.monotonic(), 0.1))
            return
        except ServerError:
            if attempt == attempts - 1 or time.monotonic() + 0.25 > deadline:
                raise
            time.sleep(0.25)


def _end(process: subprocess.Popen) -> None:
    """SIGTERM to the whole group, and SIGKILL to what is left of it after a while, or at once when interrupted."""
    try:
        _signal(process, signal.SIGTERM)
        time.sleep(0.5)
    finally:
        _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20.0)
