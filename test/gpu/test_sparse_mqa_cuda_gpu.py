"""The Hopper backend on a GPU: every backend's checks, random shapes, CUDA graphs, launch plans, the sanitizer."""

import ctypes
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headfit import backends
from headfit.kernels import sparse_mqa_cuda as kernel
from headfit.kernels.nvrtc import CudaKernel, compile_cubin
from headfit.testing import backend_checks
from headfit.testing.backend_checks import (
    BF16,
    CHECKS,
    FP8,
    PAGES_PAST_TWO_GIB,
    check_case,
    check_reference,
    rows_of,
)
from headfit.testing.cases import CASES, Case, make_case
from headfit.testing.measure import BF16_OUTPUT, relative_norm

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernel is for sm90", allow_module_level=True)


@pytest.fixture(params=["default", "invariant"])
def backend(request):
    return backends.sparse_mqa_cuda.SparseMQACudaBackend(batch_invariant=request.param == "invariant")


@pytest.fixture
def force(monkeypatch):
    """Take a head tile and a cluster size whatever the plan would be."""

    def force(tile: int, size: int) -> None:
        def plan(num_tokens, num_heads, num_keys, device, batch_invariant):
            return kernel._layout(tile, size, num_tokens, num_heads, kernel._cluster_slots(device))

        monkeypatch.setattr(kernel, "_plan", plan)

    return force


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case, backend):
    for seed in range(2):
        check_case(backend, case, seed, "cuda")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(check, backend):
    check(backend, "cuda")


def test_index_past_the_pool():
    backend_checks.check_index_past_the_pool(backends.sparse_mqa_cuda.SparseMQACudaBackend(checked=True), "cuda")


def test_out():
    backend_checks.check_out(kernel.sparse_mqa_cuda, "cuda")


def test_row_28_batch_invariant():
    invariant = backends.sparse_mqa_cuda.SparseMQACudaBackend(batch_invariant=True)
    backend_checks.check_batch_invariant(invariant, "cuda")


def test_row_28_default_mode_stays_close():
    """A row alone and in a batch, where the plan divides its keys differently: within 2 ULP of its largest element."""
    backend = backends.create("sparse_mqa_cuda", device="cuda")
    case = Case(num_tokens=32, num_keys=(128, 512), page_sizes=(256, 64))
    arguments = make_case(case, 6, kv_format=FP8, device="cuda", dtype=BF16)
    o, _ = backend.decode(**arguments)
    for row in range(4):
        alone, _ = backend.decode(**rows_of(arguments, slice(row, row + 1)))
        ulp = 2.0 ** (o[row].abs().max().float().log2().floor() - 7)
        assert (alone[0].float() - o[row].float()).abs().max() <= 2 * ulp


@pytest.mark.parametrize(("page_size", "num_pages"), PAGES_PAST_TWO_GIB)
def test_row_18_offsets_past_two_gib(page_size, num_pages, backend):
    backend_checks.check_wide_offsets(backend, "cuda", page_size, num_pages)


@pytest.mark.parametrize(("num_tokens", "num_heads"), [(1, 8), (8, 16), (8, 40), (300, 16)])
def test_captured(num_tokens, num_heads, backend):
    backend_checks.check_captured(backend, num_tokens, num_heads)


SIZES = [(8, 1), (8, 2), (8, 5), (8, 16), (16, 1), (16, 3), (16, 7), (16, 16), (32, 1), (32, 2), (32, 8), (32, 16)]


@pytest.mark.parametrize(("tile", "size"), SIZES)
def test_every_launch_agrees(tile, size, force):
    """Each head tile and cluster size, more tokens than fit at once, rows without a key in some blocks."""
    force(tile, size)
    backend = backends.create("sparse_mqa_cuda", device="cuda")
    for num_tokens, num_heads, num_keys in ((5, 37, (128, 512)), (150, 9, (70, 20)), (2, tile, (1400, 2500))):
        case = Case(num_tokens=num_tokens, num_heads=num_heads, num_keys=num_keys, lengths="ragged", sinks="mixed")
        check_case(backend, case, size, "cuda")


@pytest.mark.parametrize("tile", [8, 16, 32])
def test_rows_without_keys_between_others(tile, force):
    """Persistent blocks: a row without keys is done at once, while the row before it may still be summed up."""
    force(tile, 1)
    backend = backends.create("sparse_mqa_cuda", device="cuda")
    arguments = make_case(Case(num_tokens=600, num_heads=tile), tile, kv_format=FP8, device="cuda", dtype=BF16)
    chance = random.Random(tile)
    empty = torch.tensor([chance.random() < 0.5 for _ in range(600)], device="cuda")
    for name in ("window", "compressed"):
        arguments[name].lengths[empty] = 0
    for _ in range(20):
        check_reference(backend, arguments)


LATE_WRITER = """
struct Params { int *to; const int *from; long long n; };
extern "C" __global__ void late_copy(const __grid_constant__ Params p) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (int i = 0; i < 40; i++) __nanosleep(1000);
  for (long long i = threadIdx.x; i < p.n; i += blockDim.x) p.to[i] = p.from[i];
}
"""


@pytest.mark.parametrize("num_tokens", [1, 8, 140])
def test_indices_written_while_it_starts(num_tokens):
    """The kernel before lets this one start, and writes the indices only then, over ones far out of every pool."""

    class Params(ctypes.Structure):
        _fields_ = (("to", ctypes.c_uint64), ("source", ctypes.c_uint64), ("n", ctypes.c_int64))

    cubin = compile_cubin(LATE_WRITER, name="late_copy.cu", arch=kernel.ARCH, defines={}, entry="late_copy")
    writer = CudaKernel(cubin, entry="late_copy", max_smem=0)
    backend = backends.create("sparse_mqa_cuda", device="cuda")
    case = Case(num_tokens=num_tokens, num_keys=(128, 512), page_sizes=(256, 64))
    arguments = make_case(case, 7, kv_format=FP8, device="cuda", dtype=BF16)
    expected = check_reference(backend, arguments)
    regions = [arguments["window"], arguments["compressed"]]
    copies = [region.indices.clone() for region in regions]
    for garbage in (2**31 - 1, -(2**31), 12_345_678):
        for region in regions:
            region.indices.fill_(garbage)
        torch.cuda.synchronize()
        for region, copy in zip(regions, copies, strict=True):
            writer.launch(
                grid=(1, 1, 1),
                block=(256, 1, 1),
                smem=0,
                stream=torch.cuda.current_stream().cuda_stream,
                params=Params(region.indices.data_ptr(), copy.data_ptr(), copy.numel()),
            )
        backend_checks.assert_bit_equal(backend.decode(**arguments), expected)


def test_row_04_random_shapes():
    """500 shapes; a few with large queries, as a model without query norm has them."""
    backend, chance = backends.create("sparse_mqa_cuda", device="cuda"), random.Random(20)
    errors = []
    for seed in range(500):
        page_sizes = tuple(chance.choice((1, 2, 3, 64, 256)) for _ in range(2))
        num_keys = (chance.randint(0, 300), chance.choice((None, chance.randint(0, 300))))
        case = Case(
            num_tokens=chance.randint(1, 4),
            num_heads=chance.choice((1, 4, 7, 8, 12, 16, 24, 31, 32, 40, 64)),
            num_keys=num_keys,
            page_sizes=page_sizes,
            lengths=chance.choice(("full", "ragged")),
            absent=chance.choice((0.0, 0.3)),
            sinks=chance.choice(("random", "mixed", 5.0)),
            strided=chance.random() < 0.3,
        )
        arguments = make_case(case, seed, kv_format=FP8, device="cuda", dtype=BF16)
        o, _ = check_reference(backend, arguments, case.id)
        errors.append(relative_norm(o, backend_checks.reference_float64(**arguments)[0]) if seed % 25 == 0 else 0.0)
    assert max(errors) <= BF16_OUTPUT.relative


def test_queries_without_a_norm():
    """|q| up to 300: nothing overflows, and the error stays in bounds."""
    backend = backends.create("sparse_mqa_cuda", device="cuda")
    for magnitude in (1e-30, 1e-3, 10.0, 100.0):
        arguments = make_case(Case(num_keys=(128, 200)), 3, kv_format=FP8, device="cuda", dtype=BF16)
        arguments["q"] = arguments["q"] * magnitude
        o, _ = backend.decode(**arguments)
        expected, _ = backend_checks.reference_float64(**arguments)
        assert o.isfinite().all() and relative_norm(o, expected) <= BF16_OUTPUT.relative, magnitude


def test_nothing_is_compiled_after_prewarm(monkeypatch):
    backend = backends.create("sparse_mqa_cuda", device="cuda")
    backend.prewarm(32, "cuda")

    def refuse(*_, **__):
        raise AssertionError("compiled in a request")

    monkeypatch.setattr(kernel, "compile_cubin", refuse)
    for num_heads in (1, 8, 16, 32, 48):
        for num_tokens in (1, 33, 140):
            case = Case(num_tokens=num_tokens, num_heads=num_heads, num_keys=(20, 30))
            backend.decode(**make_case(case, 1, kv_format=FP8, device="cuda", dtype=BF16))


def test_what_is_refused():
    backend = backends.create("sparse_mqa_cuda", device="cuda")
    arguments = make_case(Case(num_heads=8), 1, kv_format=FP8, device="cuda", dtype=BF16)
    with pytest.raises(TypeError, match=r"q: dtype torch\.float16, allowed: torch\.bfloat16"):
        backend.decode(**arguments | {"q": arguments["q"].half()})
    with pytest.raises(ValueError, match=r"softmax_scale: 0\.0, allowed: a positive number"):
        backend.decode(**arguments | {"softmax_scale": 0.0})
    shifted = torch.empty(3 * 8 * 512 + 1, dtype=BF16, device="cuda")[1:].view(3, 8, 512)
    with pytest.raises(ValueError, match=r"q: strides .*multiples of 16 bytes"):
        backend.decode(**arguments | {"q": shifted})
    with pytest.raises(ValueError, match="out: torch"):
        backend.decode(**arguments, out=arguments["q"][:, :4])


def test_auto_takes_it():
    name, reason = backends.choose("auto", "cuda")
    assert name == "sparse_mqa_cuda" and reason
    assert backends.choose("auto", "cuda", kv_format="model")[0] == "reference"
    assert backends.choose("auto", "cuda", dtype=torch.float16)[0] == "unified_kv_triton"


@pytest.mark.sanitizer
@pytest.mark.timeout(420)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed")
    script = Path(__file__).with_name("sanitizer_run.py")
    command = ["compute-sanitizer", "--report-api-errors", "no", "--tool", tool, sys.executable, str(script), tool]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert "ran 3 launches" in done.stdout and done.returncode == 0, done.stdout[-3000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "(0 errors, 0 warnings)" in done.stdout, done.stdout[-3000:]
