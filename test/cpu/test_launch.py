"""Local ranks: results, failures of every kind, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headfit import launch
from headfit.launch import RankError, check_ranks, run_local_ranks

LONG = 120  # seconds that a rank would go on for, if nobody stopped it


def report(group, device, factor):
    """What a rank sees of its group; also sums over the ranks."""
    import torch
    import torch.distributed as dist

    total = group.all_reduce(torch.tensor([group.rank + 1.0])) * factor
    backend = dist.get_backend() if dist.is_initialized() else None
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return group.rank, group.size, device, total.item(), backend, interface, torch.get_num_threads(), os.getpid()


def misbehave(group, device, folder, how):
    """Leave a pid file; then rank 1 does something bad while rank 0 waits for it."""
    import torch

    Path(folder, f"{group.rank}.pid").write_text(str(os.getpid()))
    group.all_reduce(torch.ones(1))
    if group.rank == 1:
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise LookupError("first line\nsecond line")
        time.sleep(LONG)
    group.all_reduce(torch.ones(1))


class Unpickled:
    """Pickles; raises what it holds where it is unpickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return _raise, (self.error,)


def _raise(error):
    raise error


class Unshowable(Exception):
    def __str__(self):
        raise KeyError("no text")


def answer(group, device, how):
    """Tensors, a result that raises in the parent, an error without text, or a rank that will not exit."""
    import torch
    import torch.distributed as dist

    if how == "unshowable":
        raise Unshowable
    dist.barrier()
    if how == "linger":
        threading.Thread(target=time.sleep, args=(LONG,)).start()
        return time.monotonic()
    return {"tensor": torch.arange(3), "key": Unpickled(KeyError("gone")), "os": Unpickled(OSError("gone"))}[how]


def start(folder, how, timeout=None):
    return run_local_ranks(misbehave, 2, args=(str(folder), how), timeout=timeout)


def pids(folder):
    return [int(file.read_text()) for file in sorted(folder.glob("*.pid")) if file.read_text()]


def alive(pid):
    """Whether a process runs; one that ended but was not waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """An empty folder that temporary directories are made in, and that must be empty again."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert not list(folder.glob("headfit*"))


def test_one_rank_runs_in_this_process():
    rank, size, device, total, backend, _, _, pid = run_local_ranks(report, 1, args=(2,))
    assert (rank, size, device, total, backend, pid) == (0, 1, "cpu", 2.0, None, os.getpid())


def test_ranks_form_a_group_and_rank_0_answers(temporary, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    rank, size, device, total, backend, interface, threads, pid = run_local_ranks(report, 2, args=(10,))
    assert (rank, size, device, total, backend) == (0, 2, "cpu", 30.0, "gloo")
    assert interface in ("lo", "lo0")
    assert threads <= max(1, os.cpu_count() // 2)
    assert pid != os.getpid()
    assert not alive(pid)


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("die", ["rank 1 of 2 died", "SIGKILL"]),
        ("raise", ["rank 1 of 2: LookupError: first line second line"]),
    ],
)
def test_one_bad_rank_ends_the_run(temporary, tmp_path, how, parts):
    before = time.monotonic()
    with pytest.raises(RankError) as caught:
        start(tmp_path, how)
    assert time.monotonic() - before < 30
    message = str(caught.value)
    assert "\n" not in message
    assert not [part for part in parts if part not in message], message
    assert ("second line" in caught.value.rank_traceback) == (how == "raise")
    assert len(pids(tmp_path)) == 2
    assert not [pid for pid in pids(tmp_path) if alive(pid)]


def test_a_run_that_hangs_is_stopped_after_its_timeout(temporary, tmp_path):
    before = time.monotonic()
    with pytest.raises(RankError, match="no result after 1 s from rank 0, 1"):
        start(tmp_path, "hang", timeout=1)
    assert time.monotonic() - before < 15
    assert not [pid for pid in pids(tmp_path) if alive(pid)]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("key", "its result does not unpickle (KeyError: 'gone')"),
        ("os", "its result does not unpickle (OSError: gone)"),
        ("unshowable", "Unshowable: (its text cannot be shown)"),
    ],
)
def test_a_result_or_error_that_misbehaves_is_one_line(temporary, how, message):
    with pytest.raises(RankError, match=f"^rank [01] of 2: {re.escape(message)}$"):
        run_local_ranks(answer, 2, args=(how,))


def test_a_tensor_outlives_its_rank(temporary):
    assert run_local_ranks(answer, 2, args=("tensor",)).tolist() == [0, 1, 2]


def test_ranks_that_do_not_exit_share_one_grace(temporary, monkeypatch):
    monkeypatch.setattr(launch, "_EXIT_GRACE", 2.0)
    handed_over = run_local_ranks(answer, 2, args=("linger",))
    assert time.monotonic() - handed_over < 3.5


@pytest.mark.parametrize(
    ("worker", "args"), [(lambda group, device: None, ()), (report, (lambda: 1,)), (report, (threading.Lock(),))]
)
def test_what_does_not_pickle_is_refused_before_a_rank_starts(monkeypatch, worker, args):
    monkeypatch.setattr(launch, "_rank", None)
    with pytest.raises(ValueError, match=r"^worker or args: do not pickle, allowed: a module-level function"):
        run_local_ranks(worker, 2, args=args)


def test_a_worker_that_ranks_cannot_find_is_named(temporary):
    with pytest.raises(RankError, match=r"^rank [01] of 2: ValueError: worker or args: do not unpickle .*gone"):
        run_local_ranks(report, 2, args=(Unpickled(KeyError("gone")),))


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda how: how.name
)
def test_ranks_do_not_outlive_their_parent(temporary, tmp_path, default_signals, how):
    """SIGKILL goes to the parent alone; the others to the whole group of processes, as a terminal's Ctrl-C does."""
    command = [sys.executable, __file__, str(tmp_path), "hang"]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    assert all(map(alive, pids(tmp_path)))
    if how == signal.SIGKILL:
        parent.send_signal(how)
    else:
        os.killpg(parent.pid, how)
    # The end of its stderr, which the ranks share, comes when the last of them is gone.
    _, stderr = parent.communicate(timeout=15)
    assert parent.returncode == (1 if how == signal.SIGINT else -how)
    assert stderr == ("interrupted\n" if how == signal.SIGINT else "")
    wait_until(lambda: not any(map(alive, pids(tmp_path))), 5)
    wait_until(lambda: not list(temporary.glob("headfit*")), 5)


@pytest.mark.parametrize("swallow", ["raise ImportError", "time.sleep(60)"])
def test_a_signal_ends_a_run_whatever_becomes_of_its_exception(swallow):
    code = f"""
import os, signal, time
from headfit import launch

launch._UNWIND_GRACE = 1
try:
    with launch.unwinding_at_signals():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except BaseException:
            {swallow}
except launch.EndedBySignal as ended:
    print(ended.signal.name)
"""
    before = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "SIGTERM\n"
    assert time.monotonic() - before < 30


@pytest.mark.parametrize(
    ("size", "device", "message"),
    [
        (0, "cpu", "size: 0, allowed: 1 or more"),
        (2, "tpu", "device: 'tpu', allowed: cpu, cuda"),
        (99, "cuda", "device: cuda needs 99 GPUs, one a rank, found "),
    ],
)
def test_ranks_that_this_machine_cannot_run_are_refused(size, device, message):
    with pytest.raises(ValueError, match=message):
        check_ranks(size, device)


if __name__ == "__main__":
    try:
        start(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("interrupted")
