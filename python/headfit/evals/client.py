"""One request to an OpenAI-compatible server, and what can go wrong with it. Standard library only.

Everything short of a whole, well-formed answer is an error: an HTTP status other than 200, a body that ends early or is
no JSON, a dropped connection, a deadline that passed, a `finish_reason` other than "stop" or "length" (SGLang has
"abort").
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_RETRIED_STATUS = {408, 409, 425, 429}
_SHORT_TIMEOUT = 30.0  # to connect, and to list the models
_MOST_BYTES = 1 << 28
_FINISHED = ("stop", "length")


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
    """

    base_url: str
    api: str
    timeout: float
    api_key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url: {self.base_url!r}, allowed: http://host:port/v1 or https://...")
        _ = parts.port  # raises ValueError where it is no port
        if self.api not in ("chat", "completions"):
            raise ValueError(f"api: {self.api!r}, allowed: chat, completions")

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
        if not (isinstance(listed, list) and all(isinstance(row, dict) and row.get("id") for row in listed)):
            raise RequestError(f"GET /models: unexpected answer {str(answer)[:120]}", retryable=False)
        return listed

    def _call(self, method: str, path: str, body: bytes | None, timeout: float) -> dict[str, Any]:
        parts = urlsplit(self.base_url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        deadline = time.monotonic() + timeout
        connection = kind(parts.hostname, parts.port, timeout=min(_SHORT_TIMEOUT, timeout))
        try:
            connection.connect()
            sock = connection.sock  # the connection forgets it where the server closes after the answer
            sock.settimeout(_left(deadline))
            connection.request(method, parts.path.rstrip("/") + path, body, self._headers())
            response = connection.getresponse()
            content = _read(sock, response, deadline)
        except TimeoutError as error:
            raise RequestError(f"no answer within {timeout:g} s") from error
        except http.client.IncompleteRead as error:
            raise RequestError(f"body cut off after {len(error.partial)} bytes") from error
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        return _body(response, content)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        return headers | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _read(sock: socket.socket, response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The whole body. The deadline holds for all of it: a socket's own time-out starts anew with every byte."""
    expected = response.length
    content = bytearray()
    while len(content) < _MOST_BYTES:
        if sock.fileno() >= 0:
            sock.settimeout(_left(deadline))
        piece = response.read1(1 << 16)
        if not piece:
            break
        content += piece
    if expected is not None and len(content) < expected:
        raise http.client.IncompleteRead(bytes(content), expected - len(content))
    return bytes(content)


def _body(response: http.client.HTTPResponse, content: bytes) -> dict[str, Any]:
    if response.status != 200:
        text = " ".join(content[:300].decode("utf-8", "replace").split())
        retryable = response.status >= 500 or response.status in _RETRIED_STATUS
        wait = response.getheader("Retry-After", "")
        raise RequestError(
            f"HTTP {response.status}: {text}",
            retryable=retryable,
            retry_after=float(wait) if wait.isdecimal() else None,
        )
    try:
        answer = json.loads(content)
    except ValueError as error:
        raise RequestError(f"the body is not JSON ({len(content)} bytes)") from error
    if not isinstance(answer, dict):
        raise RequestError("the body is not an object")
    return answer


def _reply(answer: dict[str, Any], api: str) -> Reply:
    try:
        (choice,) = answer["choices"]
        message = choice["message"] if api == "chat" else choice
        text = message["content" if api == "chat" else "text"]
        reason = choice["finish_reason"]
        reasoning = message.get("reasoning_content") or message.get("reasoning")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"not a {api} answer: {str(answer)[:120]}") from error
    if reason not in _FINISHED:
        raise RequestError(f"finish_reason {reason!r}")
    # A server that parses reasoning has null content where the cap fell into the reasoning.
    if not isinstance(text, str) and not (text is None and (isinstance(reasoning, str) or reason == "length")):
        raise RequestError(f"answer without text: {str(choice)[:120]}")
    usage = answer.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return Reply(text or "", reason, reasoning if isinstance(reasoning, str) else None, tokens)
