"""Local ranks: results, failures of every kind, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
def test_ranks_do_not_outlive_their_parent(temporary, tmp_path, how):
    """SIGINT goes to the whole group of processes, as a terminal's Ctrl-C does; SIGKILL to the parent alone."""
    command = [sys.executable, __file__, str(tmp_path), "hang"]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    assert all(map(alive, pids(tmp_path)))
    if how == signal.SIGINT:
        os.killpg(parent.pid, how)
    else:
        parent.send_signal(how)
    # The end of its stderr, which the ranks share, comes when the last of them is gone.
    _, stderr = parent.communicate(timeout=15)
    assert parent.returncode == (1 if how == signal.SIGINT else -how)
    assert stderr == ("interrupted\n" if how == signal.SIGINT else "")
    wait_until(lambda: not any(map(alive, pids(tmp_path))), 5)
    wait_until(lambda: not list(temporary.glob("headfit*")), 5)


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
