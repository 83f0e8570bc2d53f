"""Fixtures of all CPU tests: random numbers by the test's name alone, poison in unwritten memory, default signals."""

import os
import random
import signal
import zlib

# Triton kernels run on the CPU, interpreted. Read when triton is first imported, which transformers does.
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch


@pytest.fixture
def seed(request):
    """A number of this test's own: the same in every run, in any order and on any process."""
    path, _, name = request.node.nodeid.partition("::")
    return zlib.crc32(f"{path.rsplit('/')[-1]}::{name}".encode())


@pytest.fixture(autouse=True)
def seeded(seed):
    """The global generators start from the test's own seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.fixture
def nan_empty():
    """`torch.empty`, `empty_like` and `new_empty` give NaN (integers: the largest), so that unwritten results show."""
    fill, strict = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all() and torch.ones(3).new_empty(2).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(strict, warn_only=warn_only)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Torch on one thread: on matrices this small, threads that share a busy machine wait far longer than they work."""
    torch.set_num_threads(1)


@pytest.fixture
def default_signals():
    """What a child starts with, also where this process was told to ignore some, as `pytest &` and nohup do."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)
