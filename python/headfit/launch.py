"""A few attention-TP ranks on this machine, each in a process of its own, that live and die together.

Processes are spawned (a forked CUDA context is unusable) and find each other through a file in a temporary directory,
so no port is taken. A rank that fails or dies ends the run at once: the parent ends the others and raises one
`RankError`. A parent that dies, by SIGKILL too, ends its ranks: each watches a pipe whose other end only the parent
holds. Nothing heavy is imported before that watch has started.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_DEATH_GRACE = 2.0  # seconds that a rank's error waits for the death, elsewhere, that may have caused it
_EXIT_GRACE = 10.0  # seconds that a rank may take to exit after it handed over its result


class RankError(RuntimeError):
    """A rank failed or died. The message is one line; `rank_traceback` is the rank's own traceback, if it had one."""

    def __init__(self, message: str, rank_traceback: str = "") -> None:
        super().__init__(message)
        self.rank_traceback = rank_traceback


def run_local_ranks(
    worker: Callable[..., Any],
    size: int,
    *,
    args: Sequence[Any] = (),
    device: str = "cpu",
    timeout: float | None = None,
) -> Any:
    """Call `worker(group, device, *args)` on every rank of an attention-TP group of `size` and return rank 0's result.

    Size 1 runs in this process. Otherwise each rank has its own process and, for device "cuda", its own GPU; the
    default process group (gloo on CPU, nccl on CUDA) is ready when `worker` starts, torch's threads are divided among
    the ranks, and gloo keeps to the loopback interface unless GLOO_SOCKET_IFNAME says otherwise.

    Args:
        worker: a module-level function; it, `args` and the result are pickled.
        device: "cpu" or "cuda"; a rank gets "cpu" or "cuda:<rank>".
        timeout: seconds that the whole run may take; None for no limit. Not enforced at size 1.

    Raises:
        ValueError: a size below 1, an unknown device, or fewer GPUs than ranks; before anything starts.
        RankError: a rank raised, died, or the run took longer than `timeout`. No rank is left running.
    """
    check_ranks(size, device)
    if size == 1:
        from headfit.distributed import AttnTPGroup

        return worker(AttnTPGroup(), _rank_device(device, 0), *args)
    with _rendezvous_folder() as folder, contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(_rank(r, size, device, folder, worker, args)) for r in range(size)]
        result = _collect(ranks, timeout)
        for process, _ in ranks:
            process.join(_EXIT_GRACE)
        return result


def check_ranks(size: int, device: str) -> None:
    """Raise ValueError where this machine cannot run `size` ranks on `device`."""
    if size < 1:
        raise ValueError(f"size: {size}, allowed: 1 or more")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: {device!r}, allowed: cpu, cuda")
    if device == "cuda":
        import torch

        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found < size:
            raise ValueError(f"device: cuda needs {size} GPU{'s' * (size > 1)}, one a rank, found {found}")


@contextlib.contextmanager
def _rendezvous_folder() -> Iterator[Path]:
    """A temporary directory; ranks of a parent that was killed may have removed it."""
    folder = Path(tempfile.mkdtemp(prefix="headfit-ranks-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _rank(rank: int, size: int, device: str, folder: Path, *call: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """One started rank and the pipe its outcome comes through; it is gone when the context ends."""
    context = multiprocessing.get_context("spawn")
    packed = pickle.dumps(call)  # unpacked by the rank itself, after its watch has started
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_rank_main, args=(rank, size, device, folder, sender, packed), name=f"headfit-rank-{rank}", daemon=True
    )
    resource_tracker.ensure_running()  # not by the first start, which would end the hold on interrupts
    try:
        with _interrupts_held():
            process.start()
        sender.close()  # so that the rank's death reads as end of file
        yield process, receiver
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
            process.close()
        receiver.close()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while a rank starts. The rank inherits that for life, so only the parent is interrupted."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def _collect(ranks: Sequence[tuple[BaseProcess, Connection]], timeout: float | None) -> Any:
    """Wait until every rank has handed over its outcome; rank 0's result."""
    deadline = None if timeout is None else time.monotonic() + timeout
    waiting = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    result = None
    while waiting:
        ready = wait(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"no result after {timeout:g} s from rank {', '.join(map(str, waiting.values()))}")
        for receiver in ready:
            rank = waiting.pop(receiver)
            outcome = _receive(receiver)
            if outcome is None:
                raise _death(ranks, rank)
            value, error = outcome
            if error is not None:
                raise _first_cause(ranks, waiting, rank, *error)
            if rank == 0:
                result = value
    return result


def _receive(receiver: Connection) -> tuple[Any, tuple[str, str] | None] | None:
    """A rank's (result, error), or None where it died before handing one over."""
    try:
        return receiver.recv()
    except (EOFError, OSError):
        return None


def _death(ranks: Sequence[tuple[BaseProcess, Connection]], rank: int) -> RankError:
    process = ranks[rank][0]
    process.join(_EXIT_GRACE)
    code = process.exitcode
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = f"killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += ", which the system sends when memory runs out"
    return RankError(f"rank {rank} of {len(ranks)} died ({how}); the other ranks were stopped")


def _first_cause(
    ranks: Sequence[tuple[BaseProcess, Connection]],
    waiting: dict[Connection, int],
    rank: int,
    message: str,
    rank_traceback: str,
) -> RankError:
    """The error to report when `rank` raised: a rank that died without a word made its peers' collectives fail."""
    deadline = time.monotonic() + _DEATH_GRACE
    waiting = dict(waiting)
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for receiver in ready:
            other = waiting.pop(receiver)
            if _receive(receiver) is None:
                return _death(ranks, other)
    return RankError(f"rank {rank} of {len(ranks)}: {message}", rank_traceback)


def _rank_main(rank: int, size: int, device: str, folder: Path, sender: Connection, packed: bytes) -> None:
    """The life of one rank: follow the parent, join the group, work, hand over (result, error)."""
    threading.Thread(target=_follow_parent, args=(folder,), daemon=True).start()
    try:
        _join_group(rank, size, device, folder)
        from headfit.distributed import AttnTPGroup

        worker, args = pickle.loads(packed)
        result = worker(AttnTPGroup(rank, size), _rank_device(device, rank), *args)
        sender.send((result if rank == 0 else None, None))
        _leave_group()
    except BaseException as error:
        sender.send((None, (describe(error), traceback.format_exc())))


def _follow_parent(folder: Path) -> None:
    """Exit when the parent is gone, and tidy up for it. Nobody is left to hear a message."""
    wait([multiprocessing.parent_process().sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _join_group(rank: int, size: int, device: str, folder: Path) -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    interfaces = {name for _, name in socket.if_nameindex()}
    if loopback := next((name for name in ("lo", "lo0") if name in interfaces), None):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    import torch
    import torch.distributed as dist

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(str(folder / "store"), size),
        rank=rank,
        world_size=size,
    )


def _leave_group() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def _rank_device(device: str, rank: int) -> str:
    return f"cuda:{rank}" if device == "cuda" else device


def describe(error: BaseException) -> str:
    """An exception as one line: its type and text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
