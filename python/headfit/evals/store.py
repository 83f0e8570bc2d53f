r"""A run on disk: one JSONL file that a kill at any moment leaves readable.

The first line is the run: `{"kind": "run", "format": 1, "settings": {...}, "arm": {...}}`. `settings` must be equal in
two runs that are compared, but for the names and hashes of files whose questions and prompts are the same; `arm` is
what may differ. Then come, as they happen::

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

from headfit.evals.extract import gold_number

FORMAT = 1
FINISH_REASONS = ("stop", "length")
MOST_ANSWERS = 10**7  # of a run, which is held in memory
_DEEPEST = 5  # levels of a line; what is read is also shown, and neither works at any depth
# Settings that only say where the questions or prompts came from, whose hash is the setting.
_SOURCES = {"questions_sha256": ("data", "data_sha256"), "prompts_sha256": ("shots", "shots_sha256")}
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
    check_readable(file)
    return _parse(Path(file).read_bytes(), str(file))


def check_readable(file: str | Path) -> None:
    """Raise ValueError for a device, which may have no end. A pipe has one."""
    if Path(file).is_char_device() or Path(file).is_block_device():
        raise ValueError(f"{file}: a device, allowed: a file")


def _parse(content: bytes, file: str) -> RunRecord:
    lines = content.split(b"\n")[:-1]  # what follows the last newline is torn
    rows = [_row(line, f"{file} line {number}") for number, line in enumerate(lines, 1)]
    if not rows or rows[0].get("kind") != "run" or rows[0].get("format") != FORMAT:
        raise ValueError(f"{file}: does not start with a run's settings, allowed: a file that headfit eval has written")
    run = _run(rows[0], f"{file} line 1")
    expected = set(run.keys)
    for number, row in enumerate(rows[1:], 2):
        where = f"{file} line {number}"
        key, kind = (row.get("index"), row.get("repeat")), row.get("kind")
        called_for = all(type(each) is int for each in key) and key in expected  # True and 1.0 are equal to 1
        if kind not in ("answer", "error") or not called_for or (kind == "answer" and key in run.answers):
            raise ValueError(f"{where}: unknown, uncalled for or there twice: {str(row)[:80]}")
        if kind == "error":
            run.errors.append(row)
        else:
            _check_answer(row, where)
            run.answers[key] = row
    return run


def _run(row: dict[str, Any], where: str) -> RunRecord:
    for name in ("settings", "arm"):
        _check(row, name, where, isinstance(row.get(name), dict), "an object")
    _check_settings(row["settings"], f"{where}: settings")
    return RunRecord(row["settings"], row["arm"])


def _check_settings(settings: dict[str, Any], where: str) -> None:
    """What reading, scoring and reporting a run rest on."""
    _check(settings, "task", where, isinstance(settings.get("task"), str), "a text")
    for name in ("num_questions", "repeats"):
        value = settings.get(name)
        _check(settings, name, where, type(value) is int and value >= 1, "an integer of 1 or more")
    answers = settings["num_questions"] * settings["repeats"]
    if answers > MOST_ANSWERS:
        raise ValueError(f"{where}: num_questions x repeats: {answers}, allowed: 1 to {MOST_ANSWERS}")
    stop = settings.get("stop")
    texts = isinstance(stop, list) and all(isinstance(each, str) and each for each in stop)
    _check(settings, "stop", where, texts, "a list of texts")


def _check_answer(row: dict[str, Any], where: str) -> None:
    _check(row, "text", where, isinstance(row.get("text"), str), "a text")
    reason = row.get("finish_reason")
    _check(row, "finish_reason", where, reason in FINISH_REASONS, " or ".join(FINISH_REASONS))
    _check(row, "gold", where, isinstance(row.get("gold"), str), "a text that states a number")
    try:
        gold_number(row["gold"])
    except ValueError as error:
        raise ValueError(f"{where}: gold: {error}") from error


def _check(row: dict[str, Any], name: str, where: str, good: bool, allowed: str) -> None:
    if not good:
        found = repr(row[name])[:80] if name in row else "missing"
        raise ValueError(f"{where}: {name}: {found}, allowed: {allowed}")


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not an object")
    if _deeper(row, _DEEPEST):
        raise ValueError(f"{where}: nested too deep, allowed: {_DEEPEST} levels")
    return row


def _deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (levels == 0 or any(_deeper(each, levels - 1) for each in inner))


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
        ValueError: the file belongs to a run with other settings (named), is no run's file, or is in use; or the
            settings are of no possible run.
        OSError: it cannot be written.
    """
    path = Path(file)
    _check_settings(settings, str(file))
    created = not path.exists()
    if not (created or path.is_file()):
        raise ValueError(f"{file}: not a regular file, allowed: one of an earlier run, or a new name")
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
    """Names whose values differ and should not, with both values."""
    names, apart = list(a) + [name for name in b if name not in a], sources_apart(a, b)
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name) and name not in apart}


def sources_apart(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names that differ and may: of files that the same questions, or the same prompts, came from."""
    same = [names for sha256, names in _SOURCES.items() if sha256 in a and a[sha256] == b.get(sha256)]
    return [name for names in same for name in names if a.get(name) != b.get(name)]


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
