"""One request to an OpenAI-compatible server, and what can go wrong with it. Standard library only.

Everything short of a whole, well-formed answer is an error: an HTTP status other than 200, a body that ends early or is
no JSON, a dropped connection, a deadline that passed, a `finish_reason` other than "stop" or "length" (SGLang has
"abort").
"""

from __future__ import annotations

import datetime
import email.utils
import http.client
import io
import json
import re
import reprlib
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from headfit.evals.store import FINISH_REASONS

_RETRIED_STATUS = {408, 409, 425, 429}
_SHORT_TIMEOUT = 30.0  # to connect, and to list the models
_MOST_BYTES = 1 << 28
_SHORTEST_HIDDEN = 8  # characters; a shorter key is a placeholder such as EMPTY, and may be part of an answer


class RequestError(Exception):
    """A request without an answer. `retryable` says whether the same request may succeed later, `retry_after` in how
    many seconds the server wants to be asked again, where it says so."""

    def __init__(self, message: str, *, retryable: bool = True, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's answer: its text, its reasoning where the server keeps that apart, why it ended ("stop" or "length"),
    and how many tokens it has where the server says so."""

    text: str
    finish_reason: str
    reasoning: str | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and what to ask.

    Args:
        base_url: up to and with `/v1`.
        api: "chat" or "completions".
        timeout: seconds that one request may take from connecting to the last byte.
        api_key: sent as a bearer token; no message shows it.
    """

    base_url: str
    api: str
    timeout: float
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_url(self.base_url)
        if self.api not in ("chat", "completions"):
            raise ValueError(f"api: {self.api!r}, allowed: chat, completions")
        if self.api_key and (refused := re.search(r"[^!-~]", self.api_key)):
            at = f"a blank, a control character or one beyond ASCII at position {refused.start() + 1}"
            raise ValueError(f"OPENAI_API_KEY: (not shown) has {at} of {len(self.api_key)}, allowed: printable ASCII")

    def ask(self, prompt: str, options: dict[str, Any]) -> Reply:
        """Send one prompt.

        Args:
            options: the body's other fields: `model`, `temperature`, ...

        Raises:
            RequestError: there is no whole answer.
        """
        if self.api == "chat":
            path, body = "/chat/completions", options | {"messages": [{"role": "user", "content": prompt}]}
        else:
            path, body = "/completions", options | {"prompt": prompt}
        return _reply(self._call("POST", path, json.dumps(body).encode(), self.timeout), self.api)

    def models(self) -> list[dict[str, Any]]:
        """What the server says it serves.

        Raises:
            RequestError: it does not say.
        """
        answer = self._call("GET", "/models", None, min(_SHORT_TIMEOUT, self.timeout))
        listed = answer.get("data")
        if not (isinstance(listed, list) and all(map(_is_model, listed))):
            raise RequestError(
                f"GET /models: unexpected answer {_shown(answer)}, allowed: a list of models with a text as id",
                retryable=False,
            )
        return listed

    def _call(self, method: str, path: str, body: bytes | None, timeout: float) -> dict[str, Any]:
        parts = urlsplit(self.base_url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        deadline = time.monotonic() + timeout
        connection = kind(parts.hostname, parts.port)
        sock = None
        try:
            sock = _connect(parts, connection.port, deadline)
            connection.sock = _TimedSocket(sock, deadline)
            connection.request(method, parts.path.rstrip("/") + path, body, self._headers())
            response = connection.getresponse()
            content = _read(response)
        except TimeoutError as error:
            what, limit = ("connection", min(_SHORT_TIMEOUT, timeout)) if sock is None else ("answer", timeout)
            raise RequestError(f"no {what} within {limit:g} s") from error
        except http.client.IncompleteRead as error:
            raise RequestError(f"body cut off after {len(error.partial)} bytes") from error
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
            if sock is not None:
                sock.close()
        if self.api_key and len(self.api_key) >= _SHORTEST_HIDDEN:
            content = content.replace(self.api_key.encode(), b"(API key)")  # some servers repeat what they were sent
        return _body(response, content)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        return headers | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})


class _TimedSocket:
    """A connected socket, as http.client uses it, whose waits all end at one deadline.

    A socket's own time-out starts anew with every byte that comes, in the headers as in the body.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def sendall(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            self._sock.settimeout(_left(self._deadline))
            left = left[self._sock.send(left) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._sock, self._deadline))

    def close(self) -> None:
        """Nothing: a connection closes its socket before the body has been read."""


class _TimedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(_left(self._deadline))
        return self._sock.recv_into(buffer)


def _connect(parts: SplitResult, port: int, deadline: float) -> socket.socket:
    """A socket to the first of the host's addresses that answers. The name's look-up alone is not bounded."""
    failed: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(min(_SHORT_TIMEOUT, _left(deadline)))
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if parts.scheme == "https":
                sock.settimeout(_left(deadline))
                return ssl.create_default_context().wrap_socket(sock, server_hostname=parts.hostname)
            return sock
        except OSError as error:
            sock.close()
            failed = error
    raise failed or OSError("the name has no address")


def _check_url(url: str) -> None:
    allowed = "allowed: http://host:port/v1 or https://..."
    # Not shown even where nothing else is right: what follows may be a password or a key, and is never sent.
    if found := re.search("[@?#]", url):
        raise ValueError(f"base_url: (not shown) holds {found.group()!r}, {allowed}, the key in OPENAI_API_KEY")
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and (parts.hostname or "").encode("idna") and parts.port != 0
    except ValueError:  # no port, no IPv6 address, no name
        good = False
    if not (good and parts.path.isascii() and re.fullmatch(r"[^\x00-\x20\x7f]+", url)):
        raise ValueError(f"base_url: {url!r}, {allowed}")


def _is_model(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("id"), str) and row["id"] != ""


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _read(response: http.client.HTTPResponse) -> bytes:
    expected = response.length
    content = bytearray()
    while len(content) < _MOST_BYTES and (piece := response.read1(1 << 16)):
        content += piece
    if expected is not None and len(content) < expected:
        raise http.client.IncompleteRead(bytes(content), expected - len(content))
    return bytes(content)


def _body(response: http.client.HTTPResponse, content: bytes) -> dict[str, Any]:
    if response.status != 200:
        text = " ".join(content[:300].decode("utf-8", "replace").split())
        retryable = response.status >= 500 or response.status in _RETRIED_STATUS
        wait = _seconds(response.getheader("Retry-After", ""))
        raise RequestError(f"HTTP {response.status}: {text}", retryable=retryable, retry_after=wait)
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON ({len(content)} bytes)") from error
    if not isinstance(answer, dict):
        raise RequestError("the body is not an object")
    return answer


def _seconds(wait: str) -> float | None:
    """What a Retry-After header asks for, in seconds or as a date; None where it is neither."""
    if wait.isdecimal():
        return float(wait)
    try:
        date = email.utils.parsedate_to_datetime(wait)
    except (ValueError, TypeError, OverflowError):
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.timezone.utc)
    return max(0.0, (date - datetime.datetime.now(datetime.timezone.utc)).total_seconds())


def _shown(value: Any) -> str:
    """The start of any JSON value, however deep."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 100
    return short.repr(value)[:120]


def _reply(answer: dict[str, Any], api: str) -> Reply:
    try:
        (choice,) = answer["choices"]
        message = choice["message"] if api == "chat" else choice
        text = message["content" if api == "chat" else "text"]
        reason = choice["finish_reason"]
        reasoning = message.get("reasoning_content") or message.get("reasoning")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"not a {api} answer: {_shown(answer)}") from error
    if reason not in FINISH_REASONS:
        raise RequestError(f"finish_reason {_shown(reason)}")
    # A server that parses reasoning has null content where the cap fell into the reasoning.
    if not isinstance(text, str) and not (text is None and (isinstance(reasoning, str) or reason == "length")):
        raise RequestError(f"answer without text: {_shown(choice)}")
    usage = answer.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return Reply(
        text or "",
        reason,
        reasoning if isinstance(reasoning, str) else None,
        tokens if isinstance(tokens, int) else None,
    )
