"""Load on a server's streaming `/generate`: a fixed number of requests in flight, and what each of them saw.

Only the standard library, so that it runs wherever the server does. A request's tokens are counted by the server
(`meta_info.completion_tokens` of each event), for an event may carry several.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
_REASON = re.compile(rb'"finish_reason"\s*:\s*[^\sn]')  # of an event that gives one, not null
_STATUS = re.compile(r"HTTP/1\.[01] (\d{3})(?: |$)")


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the client saw it; times in seconds on one clock. `error` is empty where it went well.

    num_tokens: output tokens. finish_reason: the server's, "" where it gave none.
    """

    start: float
    first: float
    last: float
    num_tokens: int
    finish_reason: str = ""
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return 1e3 * (self.first - self.start)

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        return 1e3 * (self.last - self.first) / (self.num_tokens - 1) if self.num_tokens > 1 else None


def run_load(
    url: str, prompts: Sequence[list[int]], *, concurrency: int, max_new_tokens: int, timeout_s: float = 600.0
) -> list[Request]:
    """Send every prompt (token ids), `concurrency` of them at a time, and wait for all.

    Greedy, exactly `max_new_tokens` a request. One that ends otherwise, or whose answer cannot be read, is reported as
    failed, with what the server said of it, not raised.

    Raises:
        ValueError: concurrency or max_new_tokens below 1.
    """
    for name, value in (("concurrency", concurrency), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ValueError(f"{name}: {value}, allowed: at least 1")
    return asyncio.run(_run_all(url, prompts, concurrency, max_new_tokens, timeout_s))


async def _run_all(url, prompts, concurrency, max_new_tokens, timeout_s) -> list[Request]:
    slots = asyncio.Semaphore(concurrency)

    async def one(prompt: list[int]) -> Request:
        async with slots:
            start = time.perf_counter()
            try:
                return await asyncio.wait_for(_request(url, prompt, max_new_tokens, start), timeout_s)
            except (OSError, ValueError, EOFError, asyncio.TimeoutError, asyncio.LimitOverrunError) as error:
                now = time.perf_counter()
                return Request(start, now, now, 0, error=f"{type(error).__name__}: {error}")

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


async def _request(url: str, prompt: list[int], max_new_tokens: int, start: float) -> Request:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
        "stream": True,
    }
    first = last = start
    tokens, reason = 0, {}
    async for event in _events(url, "/generate", body):
        if b'"error"' in event and not _TOKENS.search(event):
            raise ValueError(event.decode(errors="replace")[:200])
        last = time.perf_counter()
        if match := _TOKENS.search(event):
            first = last if tokens == 0 else first
            tokens = int(match[1])
        if _REASON.search(event):
            reason = _finish_reason(event)
    if reason.get("type") != "length" or tokens != max_new_tokens:
        ended = f"by {json.dumps(reason)[:500]}" if reason else "without a reason"
        raise ValueError(f"the request ended after {tokens} of {max_new_tokens} tokens {ended}")
    return Request(start, first, last, tokens, reason["type"])


def _finish_reason(event: bytes) -> dict[str, Any]:
    """What the server says of a request's end: `type`, and `message` of an abort."""
    try:
        reason = json.loads(event)["meta_info"]["finish_reason"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"an event without meta_info: {event[:200].decode(errors='replace')}") from error
    return reason if isinstance(reason, dict) else {"type": reason}


async def _events(url: str, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """The data of each server-sent event, without the closing `[DONE]`."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=1 << 24)
    try:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        await writer.drain()
        status, chunked = await _head(reader)
        pending = b""
        async for piece in _body(reader, chunked):
            if status != 200:
                raise ValueError(f"HTTP {status}: {piece.decode(errors='replace')[:200]}")
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                    yield line[5:]
        if status != 200:
            raise ValueError(f"HTTP {status}")
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """The status code, and whether the body comes in chunks."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    chunked = any(line.lower().replace(" ", "") == "transfer-encoding:chunked" for line in lines[1:])
    if not (status := _STATUS.match(lines[0])):
        raise ValueError(f"no HTTP status line: {lines[0][:200]!r}")
    return int(status[1]), chunked


async def _body(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    while True:
        if not chunked:
            piece = await reader.read(1 << 16)
        else:
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            piece = (await reader.readexactly(size + 2))[:-2]
        if not piece:
            return
        yield piece
