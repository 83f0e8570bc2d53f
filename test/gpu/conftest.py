"""GPU tests: run with `pytest test/gpu` on a machine with one; they skip elsewhere.

On many cores `-n 8 --dist loadgroup` is fastest: a file's tests need not stay together. `-m "not sanitizer"` leaves out
those that run under compute-sanitizer, which take minutes.
"""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU"))


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Torch on one thread: what is left for the CPU is small, and other workers want its cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def exact_float32():
    """float32 matrix products in float32, so that the float32 oracles hold."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed
