r"""A run on disk: one JSONL file that a kill at any moment leaves readable.

The first line is the run: `{"kind": "run", "format": 1, "settings": {...}, "arm": {...}}`. `settings` must be equal in
two runs that are compared, `arm` is what may differ. Then come, as they happen::

    {"kind": "answer", "index": 3, "repeat": 0, "gold": "18", "text": "...", "reasoning": null,
     "finish_reason": "stop", "tokens": 112, "seconds": 4.1, "attempts": 1}
    {"kind": "error", "index": 3, "repeat": 0, "attempt": 1, "error": "HTTP 429: ..."}

An answer counts as stored once its line has been written and synchronised to the disk; only then is its question
settled. A last line without its newline is what a kill left, and is cut off when the run goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
Key = tuple[int, int]  # (question's index, repeat)


@dataclass(slots=True)
class RunRecord:
    """What a run's file holds. `answers` by (question's index, repeat); `errors` are failed requests, later answered
    or not."""

    settings: dict[str, Any]
    arm: dict[str, Any]
    answers: dict[Key, dict[str, Any]] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def keys(self) -> list[Key]:
        """Every answer that the settings call for."""
        return [(i, r) for i in range(self.settings["num_questions"]) for r in range(self.settings["repeats"])]

    @property
    def missing(self) -> list[Key]:
        """Those that are not stored yet, in order."""
        return [key for key in self.keys if key not in self.answers]


def read_run(file: str | Path) -> RunRecord:
    """Read a run, complete or not; a torn last line is left out.

    Raises:
        ValueError: not a run's file, a corrupt line, an answer stored twice or one that the settings do not call for.
        OSError: it cannot be read.
    """
    return _parse(Path(file).read_bytes(), str(file))


def _parse(content: bytes, file: str) -> RunRecord:
    lines = content.split(b"\n")[:-1]  # what follows the last newline is torn
    rows = [_row(line, f"{file} line {number}") for number, line in enumerate(lines, 1)]
    if not rows or rows[0].get("kind") != "run" or rows[0].get("format") != FORMAT:
        raise ValueError(f"{file}: does not start with a run's settings, allowed: a file that headfit eval has written")
    run = RunRecord(rows[0]["settings"], rows[0]["arm"])
    expected = set(run.keys)
    for number, row in enumerate(rows[1:], 2):
        if row.get("kind") == "error":
            run.errors.append(row)
            continue
        key = (row.get("index"), row.get("repeat"))
        if row.get("kind") != "answer" or key not in expected or key in run.answers:
            raise ValueError(f"{file} line {number}: unknown, uncalled for or there twice: {str(row)[:80]}")
        run.answers[key] = row
    return run


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not an object")
    return row


class RunStore:
    """A run's file, open for adding to. Only one process at a time may hold it."""

    def __init__(self, file: Path, run: RunRecord, descriptor: int) -> None:
        self.file = file
        self.run = run
        self._descriptor = descriptor

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append answers and errors, and return once they are on the disk."""
        append(self.file, rows)
        for row in rows:
            if row["kind"] == "answer":
                self.run.answers[row["index"], row["repeat"]] = row
            else:
                self.run.errors.append(row)

    def reload(self) -> None:
        """See what another process, such as a rank, has appended."""
        self.run = read_run(self.file)


@contextlib.contextmanager
def open_store(file: str | Path, settings: dict[str, Any], arm: dict[str, Any]) -> Iterator[RunStore]:
    """Start a run's file, or go on with it.

    Raises:
        ValueError: the file belongs to a run with other settings (named), is no run's file, or is in use.
        OSError: it cannot be written.
    """
    path = Path(file)
    created = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{file}: another run is writing it, allowed: one at a time") from error
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if content and not whole and not b'{"kind": "run"'.startswith(content[:14]):
            raise ValueError(f"{file}: not a run's file, allowed: a new name")
        if whole:
            run = _parse(whole, str(file))
            _check_same(run, settings, arm, str(file))
        else:
            run = RunRecord(settings, arm)
        os.ftruncate(descriptor, len(whole))
        if not whole:
            append(path, [{"kind": "run", "format": FORMAT, "settings": settings, "arm": arm}])
        if created:
            _synchronise_folder(path.parent)
        yield RunStore(path, run, descriptor)
    finally:
        os.close(descriptor)


def append(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write whole lines at the end of a run's file and synchronise it."""
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
    try:
        written = 0
        while written < len(data):
            written += os.write(descriptor, data[written:])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Names whose values differ, with both values."""
    names = list(a) + [name for name in b if name not in a]
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def _check_same(run: RunRecord, settings: dict[str, Any], arm: dict[str, Any], file: str) -> None:
    # What a settings object is once it has been through JSON.
    asked = json.loads(json.dumps(settings | arm))
    if changed := differences(run.settings | run.arm, asked):
        named = ", ".join(f"{name} {old!r} there, {new!r} now" for name, (old, new) in changed.items())
        raise ValueError(f"{file}: holds another run ({named}), allowed: the same settings, or another --out")


def _synchronise_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
