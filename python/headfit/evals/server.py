"""A run against an OpenAI-compatible server: many requests at a time, each retried, each answer stored as it comes."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headfit.evals.client import Endpoint, Reply, RequestError
from headfit.evals.store import Key, RunStore

_LONGEST_PAUSE = 60.0


class RunFailed(RuntimeError):
    """A question got no answer. What was answered is stored, and the same command goes on from there."""


@dataclass(frozen=True, slots=True)
class Load:
    """How the server is asked: requests at a time, attempts a question, and the first pause between them (seconds),
    which doubles each time."""

    concurrency: int = 32
    attempts: int = 6
    pause: float = 1.0


@dataclass(frozen=True, slots=True)
class _Event:
    """One outcome of one attempt: a reply, or an error that is either retried or final."""

    key: Key
    attempt: int
    seconds: float
    reply: Reply | None = None
    error: str | None = None
    final: bool = False


def ask_all(
    endpoint: Endpoint,
    store: RunStore,
    prompts: Sequence[str],
    golds: Sequence[str],
    options: Callable[[Key], dict[str, Any]],
    *,
    load: Load,
    progress: bool,
) -> None:
    """Ask every question that the store has no answer to.

    Args:
        prompts: one a question.
        golds: the right answers, stored beside the model's.
        options: the request's fields beside the prompt.

    Raises:
        RunFailed: a question's attempts are used up, or the server refuses it for good. Requests that are under way
            are awaited and stored, no further one is sent.
    """
    missing = store.run.missing
    pending, lock, stop = iter(missing), threading.Lock(), threading.Event()
    events: queue.Queue[_Event | None] = queue.Queue()

    def take() -> Key | None:
        with lock:
            return None if stop.is_set() else next(pending, None)

    def work() -> None:
        try:
            while (key := take()) is not None:
                ask = partial(endpoint.ask, prompts[key[0]], options(key))
                for event in _attempts(ask, key, load, stop):
                    if event.final:
                        stop.set()  # here, or this worker takes another question before the main thread knows
                    events.put(event)
        except BaseException as error:
            stop.set()
            events.put(_Event(key, 0, 0.0, error=f"{type(error).__name__}: {error}", final=True))
        finally:
            events.put(None)

    # Daemons: a request that may take an hour must not keep an interrupted process alive.
    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(load.concurrency, len(missing)))]
    try:
        for worker in workers:
            worker.start()
        failures = _store_events(events, len(workers), store, golds, progress)
    finally:
        stop.set()
    if failures:
        key, error = failures[0]
        left = len(store.run.missing)
        raise RunFailed(
            f"question {key[0]} repeat {key[1]}: {error}; {len(store.run.answers)} answers are stored in {store.file}, "
            f"{left} are missing: the same command goes on from there"
        )


def _attempts(ask: Callable[[], Reply], key: Key, load: Load, stop: threading.Event) -> Iterator[_Event]:
    for attempt in range(1, load.attempts + 1):
        start = time.monotonic()
        try:
            reply = ask()
        except RequestError as error:
            final = not error.retryable or attempt == load.attempts
            yield _Event(key, attempt, time.monotonic() - start, error=str(error), final=final)
            # Spread out, or all requests that a restart dropped come back at once.
            pause = load.pause * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
            pause = min(_LONGEST_PAUSE, max(pause, error.retry_after or 0.0))
            if final or stop.wait(pause):
                return
        else:
            yield _Event(key, attempt, time.monotonic() - start, reply=reply)
            return


def _store_events(
    events: queue.Queue[_Event | None],
    workers: int,
    store: RunStore,
    golds: Sequence[str],
    progress: bool,
) -> list[tuple[Key, str]]:
    """Store what the workers report until all have ended; the questions that failed for good."""
    from tqdm import tqdm

    failures = []
    run = store.run
    with tqdm(total=len(run.keys), initial=len(run.answers), unit="answer", disable=not progress) as bar:
        while workers:
            came = _drain(events)
            workers -= came.count(None)
            reported = [event for event in came if event is not None]
            if reported:
                store.add([_row(event, golds) for event in reported])
            for event in reported:
                bar.update(event.reply is not None)
                if event.final:
                    failures.append((event.key, event.error))
            if run.errors:
                bar.set_postfix(errors=len(run.errors))
    return failures


def _drain(events: queue.Queue[_Event | None]) -> list[_Event | None]:
    """Wait for an event and take all that are there: one synchronisation of the disk for them together."""
    came = [events.get()]
    with contextlib.suppress(queue.Empty):
        while True:
            came.append(events.get_nowait())
    return came


def _row(event: _Event, golds: Sequence[str]) -> dict[str, Any]:
    index, repeat = event.key
    if event.reply is None:
        return {"kind": "error", "index": index, "repeat": repeat, "attempt": event.attempt, "error": event.error}
    reply = event.reply
    return {
        "kind": "answer",
        "index": index,
        "repeat": repeat,
        "gold": golds[index],
        "text": reply.text,
        "reasoning": reply.reasoning,
        "finish_reason": reply.finish_reason,
        "tokens": reply.tokens,
        "seconds": round(event.seconds, 3),
        "attempts": event.attempt,
    }
