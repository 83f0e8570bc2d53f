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
_EXIT_GRACE = 10.0  # seconds that ranks may take to exit after they handed over their results
_UNWIND_GRACE = 5  # seconds after which an exception that a signal raised counts as lost


class RankError(RuntimeError):
    """A rank failed or died. The message is one line; `rank_traceback` is the rank's own traceback, if it had one."""

    def __init__(self, message: str, rank_traceback: str = "") -> None:
        super().__init__(message)
        self.rank_traceback = rank_traceback


class EndedBySignal(BaseException):
    """SIGTERM or SIGHUP came. No KeyboardInterrupt, after which Python may end itself by SIGINT."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signal = signal.Signals(signum)


@contextlib.contextmanager
def unwinding_at_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise EndedBySignal; one that is ignored, as nohup has it, stays so.

    The context ends with that exception whatever it turned into on its way, such as an error of a half-done import.
    """
    came: list[int] = []
    signals = (signal.SIGTERM, signal.SIGHUP)

    def unwind(signum: int, frame: object) -> None:
        came.append(signum)
        for each in signals:  # `timeout` sends its signal twice: the second must not stop the tidying
            signal.signal(each, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, unwind)  # raise again where C code swallowed the exception
        signal.alarm(_UNWIND_GRACE)
        raise EndedBySignal(came[0])

    in_main = threading.current_thread() is threading.main_thread()
    handled = [each for each in signals if in_main and signal.getsignal(each) is signal.SIG_DFL]
    for each in handled:
        signal.signal(each, unwind)
    try:
        yield
    finally:
        if came:
            signal.alarm(0)
            raise EndedBySignal(came[0])
        for each in handled:
            signal.signal(each, signal.SIG_DFL)


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
        ValueError: a size below 1, an unknown device, fewer GPUs than ranks, or a `worker` or `args` that ranks would
            be sent and that do not pickle; before anything starts.
        RankError: a rank raised, died, gave a result that does not unpickle, or the run took longer than `timeout`. No
            rank is left running.
    """
    check_ranks(size, device)
    if size == 1:
        from headfit.distributed import AttnTPGroup

        return worker(AttnTPGroup(), _rank_device(device, 0), *args)
    with _naming("worker or args: do not pickle, allowed: a module-level function and arguments that do"):
        call = pickle.dumps((worker, tuple(args)))
    # Ranks of a parent that was killed remove the folder too.
    made = tempfile.TemporaryDirectory(prefix="headfit-ranks-", ignore_cleanup_errors=True)
    with made as folder, contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(_rank(r, size, device, Path(folder), call)) for r in range(size)]
        result = _collect(ranks, timeout)
        deadline = time.monotonic() + _EXIT_GRACE
        for process, _ in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
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
def _naming(what: str) -> Iterator[None]:
    """Pickling runs code of the caller's, which may raise anything: say what it was about."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} ({describe(error)})") from error


@contextlib.contextmanager
def _rank(rank: int, size: int, device: str, folder: Path, call: bytes) -> Iterator[tuple[BaseProcess, Connection]]:
    """One started rank and the pipe its outcome comes through; it is gone when the context ends."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_rank_main, args=(rank, size, device, folder, sender, call), name=f"headfit-rank-{rank}", daemon=True
    )
    resource_tracker.ensure_running()  # not by the first start, which would end the hold on signals
    try:
        with _signals_held():
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
def _signals_held() -> Iterator[None]:
    """Hold back what a group of processes may be sent while a rank starts. It inherits that: its parent ends it."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
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
        outcome = receiver.recv_bytes()
    except (EOFError, OSError):
        return None
    try:
        return pickle.loads(outcome)
    except Exception as error:
        return None, (f"its result does not unpickle ({describe(error)})", traceback.format_exc())


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


def _rank_main(rank: int, size: int, device: str, folder: Path, sender: Connection, call: bytes) -> None:
    """The life of one rank: follow the parent, join the group, work, hand over (result, error)."""
    threading.Thread(target=_follow_parent, args=(folder,), daemon=True).start()
    try:
        _join_group(rank, size, device, folder)
        import torch.distributed as dist

        from headfit.distributed import AttnTPGroup

        with _naming("worker or args: do not unpickle in a rank"):  # not before the watch has started
            worker, args = pickle.loads(call)
        result = worker(AttnTPGroup(rank, size), _rank_device(device, rank), *args)
        # By value: multiprocessing's own pickler would send a tensor as a claim on memory that ends with the rank.
        sender.send_bytes(pickle.dumps((result if rank == 0 else None, None)))
        dist.destroy_process_group()
    except BaseException as error:
        sender.send_bytes(pickle.dumps((None, (describe(error), traceback.format_exc()))))


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


def _rank_device(device: str, rank: int) -> str:
    return f"cuda:{rank}" if device == "cuda" else device


def describe(error: BaseException) -> str:
    """An exception as one line: its type and text."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # it is the error's own __str__
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
