"""GPU tests: run with `pytest test/gpu` on a machine with one; they skip elsewhere."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU"))


@pytest.fixture(autouse=True)
def exact_float32():
    """float32 matrix products in float32, so that the float32 oracles hold."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed
