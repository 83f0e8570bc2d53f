"""Where the SGLang versions lie, and what their worker processes found; the same seeds as the CPU tests'."""

import json
import os
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path

# Triton kernels run on the CPU, interpreted. Read when triton is first imported.
os.environ["TRITON_INTERPRET"] = "1"

import prepare
import pytest

HERE = Path(__file__).parent


@pytest.fixture
def seed(request):
    """A number of this test's own: the same in every run, in any order and on any process."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture(scope="session")
def results():
    """results(version) -> what every scenario's checks found in that version, "ok" or a traceback."""
    return cache(_results)


def _results(version: str) -> dict[str, str]:
    folder = os.environ.get("HEADFIT_SGLANG")
    if not folder:
        pytest.fail("HEADFIT_SGLANG is not set: run `python test/sglang/prepare.py FOLDER` and set it to FOLDER")
    path = os.pathsep.join([*prepare.python_path(Path(folder).absolute(), version), str(HERE)])
    ours = ("HEADFIT_", "SGLANG_", "TRITON_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "worker.py"), version],
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    if len(lines) != 1:
        pytest.fail(f"the worker of SGLang {version} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return json.loads(lines[0].removeprefix("RESULTS "))
