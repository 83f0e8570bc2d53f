"""The Hopper kernel without a GPU: its launch plans, its arithmetic on the host, what it refuses, that it compiles."""

import ctypes
import importlib.util
import itertools
import random
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from headfit import backends
from headfit.backends import sparse_mqa_cuda as cuda_backend
from headfit.backends.sparse_mqa_cuda import SparseMQACudaBackend
from headfit.kernels import sparse_mqa_cuda as kernel
from headfit.kernels.packed_regions import division_constants
from headfit.kernels.sparse_mqa_cuda import HEAD_TILES, LaunchPlan, _Params, plan_launch
from headfit.testing.backend_checks import check_wrong_arguments
from headfit.testing.cases import KV_FORMATS, Case, make_case

H200 = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, 16: 7}  # clusters that it holds at once, by size


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 64, 100, 255, 256, 257, 4095, 2**20 + 1, 2**30, 2**31 - 1])
def test_division_by_multiplication(divisor):
    magic, shift = division_constants(divisor)
    assert magic < 2**32
    borders = {k * divisor + d for k in (0, 1, 2, 3, (2**31 - 1) // divisor) for d in (-1, 0, 1)}
    for n in [*borders, 2**31 - 1, *(random.randrange(2**31) for _ in range(500))]:
        if 0 <= n < 2**31:
            assert (2 * n % 2**32 * magic >> 32) >> shift == n // divisor


@pytest.mark.parametrize("num_heads", [1, 8, 12, 16, 24, 32, 40, 64, 127, 128])
def test_a_plan_holds_every_head_and_fits_the_chip(num_heads):
    for num_tokens in (1, 2, 7, 8, 30, 32, 64, 100, 132, 133, 256, 4096):
        for num_keys in (0, 1, 15, 16, 128, 640, 1152, 8320):
            plan = plan_launch(num_tokens=num_tokens, num_heads=num_heads, num_keys=num_keys, cluster_slots=H200)
            assert plan.head_tile in HEAD_TILES and plan.head_tile * plan.head_blocks >= num_heads
            assert plan.head_tile * (plan.head_blocks - 1) < num_heads
            assert plan.num_items == num_tokens * plan.head_blocks
            if plan.cluster_size == 1:
                assert plan.num_blocks == min(plan.num_items, 132)
            else:
                assert plan.num_items <= H200[plan.cluster_size] and plan.cluster_size * 16 <= num_keys + 15
                assert plan.num_blocks == plan.num_items * plan.cluster_size
                shares = plan.cluster_size * -(-plan.head_tile // plan.cluster_size)
                assert shares <= kernel._SHARES[plan.head_tile]


def test_a_small_batch_fills_more_of_the_chip():
    one, many = (plan_launch(num_tokens=n, num_heads=16, num_keys=640, cluster_slots=H200).num_blocks for n in (1, 64))
    assert one >= 16 and many > 100


def test_batch_invariant_plans_divide_keys_alike():
    plans = {
        (plan.head_tile, plan.head_blocks, plan.cluster_size)
        for num_tokens in (1, 31, 200)
        for num_keys in (16, 640, 1152)
        for plan in [
            plan_launch(
                num_tokens=num_tokens,
                num_heads=24,
                num_keys=num_keys,
                cluster_slots=H200,
                batch_invariant=True,
            )
        ]
    }
    assert plans == {(32, 1, kernel.INVARIANT_CLUSTER_SIZE)}


def test_auto_and_explicit_choice_on_a_cpu():
    name, reason = backends.choose("auto", "cpu")
    assert name == "reference" and "sparse_mqa_cuda: needs a CUDA GPU, the device is cpu" in reason
    for backend in ("sparse_mqa_cuda", "cutlass"):
        with pytest.raises(
            ValueError, match=f"{backend}.*(needs a CUDA GPU, the device is cpu|allowed: auto, reference)"
        ):
            backends.create(backend)
    with pytest.raises(ValueError, match="unified_kv_triton: reads 'fp8' caches, the KV format is 'model'"):
        backends.create("unified_kv_triton", kv_format="model")  # the interpreter runs on a CPU


@pytest.mark.parametrize("name", ["auto", *backends.BACKEND_NAMES])
@pytest.mark.parametrize("build", [backends.choose, lambda name, device: backends.create(name, device=device)])
def test_a_device_that_torch_does_not_have_is_refused_by_name(build, name, monkeypatch):
    with pytest.raises(ValueError, match="device: 'tpu', allowed: cpu, cuda or another that torch knows"):
        build(name, "tpu")

    def absent(device):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "get_device_capability", absent)
    for count, message in ((0, "cpu, torch has no CUDA device"), (2, "cpu or cuda:0 to cuda:1")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(ValueError, match=rf"device: cuda:7, allowed here: {message} \(Torch not compiled"):
            build(name, "cuda:7")


@pytest.mark.parametrize("name", ["auto", "reference", "unified_kv_triton"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kv_format": "int4"}, "kv_format: 'int4', allowed: 'fp8', 'model'"),
        ({"dtype": torch.int8}, "dtype: torch.int8, allowed: torch.bfloat16, torch.float16, torch.float32"),
        ({"dtype": torch.float64}, "dtype: torch.float64, allowed: torch.bfloat16"),
    ],
)
def test_a_format_or_dtype_that_no_backend_has_is_refused_by_name(wrong, message, name):
    with pytest.raises(ValueError, match=message):
        backends.choose(name, "cpu", **wrong)
    with pytest.raises(ValueError, match=message):
        backends.create(name, **wrong)
    assert backends.choose("reference", "cpu", kv_format="model", dtype=torch.float16) == ("reference", "asked for")


@pytest.fixture
def on_hopper(monkeypatch):
    """A GPU of sm90, and whatever was found out about NVRTC forgotten before and after."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backends, "_installed", lambda module: True)
    cuda_backend.obstacle.cache_clear()
    yield
    cuda_backend.obstacle.cache_clear()


def test_auto_passes_over_the_kernel_where_libnvrtc_does_not_load(on_hopper, monkeypatch):
    looked = []

    def not_found():
        looked.append(1)
        raise RuntimeError('Failure finding "libnvrtc.so"')

    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", SimpleNamespace(nvrtcVersion=not_found))
    name, reason = backends.choose("auto", "cuda")
    assert name == "unified_kv_triton" and "not sparse_mqa_cuda: headfit's CUDA kernels need the wheels" in reason
    assert 'libnvrtc does not load: Failure finding "libnvrtc.so"' in reason
    assert backends.create("auto", device="cuda").name == "unified_kv_triton"
    with pytest.raises(ValueError, match="backend sparse_mqa_cuda: headfit's CUDA kernels need the wheels"):
        backends.create("sparse_mqa_cuda", device="cuda")
    assert len(looked) == 1


def test_auto_takes_the_kernel_where_nvrtc_loads(on_hopper, monkeypatch):
    monkeypatch.setattr("headfit.kernels.nvrtc.Nvrtc", lambda: None)
    assert backends.choose("auto", "cuda") == ("sparse_mqa_cuda", "the fastest that runs here")
    assert backends.create("auto", device="cuda").name == "sparse_mqa_cuda"


def test_bad_arguments_are_refused_before_anything_is_launched():
    arguments = make_case(Case(num_heads=8), 1, kv_format=KV_FORMATS["fp8"], dtype=torch.bfloat16)
    regions = (arguments.pop("window"), arguments.pop("compressed"))
    other = make_case(Case(num_heads=8), 1, kv_format=KV_FORMATS["model"])["window"]
    with pytest.raises(TypeError, match="q: dtype"):
        kernel.sparse_mqa_cuda(**arguments | {"q": arguments["q"].float()}, regions=regions)
    with pytest.raises(ValueError, match=r"compressed\.pool: kv_format 'model', allowed by the CUDA kernel: 'fp8'"):
        kernel.sparse_mqa_cuda(**arguments, regions=(regions[0], other))
    with pytest.raises(ValueError, match="softmax_scale: nan"):
        kernel.sparse_mqa_cuda(**arguments | {"softmax_scale": float("nan")}, regions=regions)
    with pytest.raises(
        ValueError, match=r"out: torch.bfloat16 \(3, 4, 512\), allowed: q's torch.bfloat16 \(3, 8, 512\)"
    ):
        kernel.sparse_mqa_cuda(**arguments, regions=regions, out=arguments["q"][:, :4])


def test_the_operator_refuses_by_itself(monkeypatch):
    monkeypatch.setattr(kernel, "_plan", None)
    check_wrong_arguments(kernel.sparse_mqa_cuda, "cpu")


@pytest.mark.parametrize("num_tokens", [3, 0])
def test_tensors_that_are_on_no_gpu_are_refused_by_name(num_tokens, monkeypatch):
    monkeypatch.setattr("headfit.kernels.nvrtc.Nvrtc", lambda: None)  # its wheels may be missing here
    arguments = make_case(Case(num_tokens=num_tokens), 1, kv_format=KV_FORMATS["fp8"], dtype=torch.bfloat16)
    regions = (arguments["window"], arguments["compressed"])
    common = {name: arguments[name] for name in ("q", "attn_sink", "softmax_scale")}
    with pytest.raises(ValueError, match="q: on cpu, allowed: a CUDA device"):
        kernel.sparse_mqa_cuda(**common, regions=regions)
    with pytest.raises(ValueError, match="q: on cpu, allowed: a CUDA device"):
        SparseMQACudaBackend().decode(**arguments)


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    """CPU tensors say that they are on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))


@pytest.fixture
def launched(as_if_on_a_gpu, monkeypatch):
    """The parameters of each launch, of which none happens."""
    launches = []
    recorder = SimpleNamespace(launch=lambda **values: launches.append(values["params"]))
    monkeypatch.setattr(kernel, "_plan", lambda *_: LaunchPlan(8, 1, 1, 1, 1))
    monkeypatch.setattr(kernel, "_kernel", lambda *_: recorder)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return launches


@pytest.mark.parametrize(
    ("shape", "strides"), [((3, 1, 512), (512, 1, 1)), ((1, 8, 512), (1, 512, 1)), ((1, 1, 512), (3, 5, 1))], ids=str
)
def test_the_stride_of_an_axis_of_1_does_not_matter(shape, strides, launched):
    num_tokens, num_heads, _ = shape
    case = Case(num_tokens=num_tokens, num_heads=num_heads)
    arguments = make_case(case, 1, kv_format=KV_FORMATS["fp8"], dtype=torch.bfloat16)
    regions = (arguments.pop("window"), arguments.pop("compressed"))
    q, out = (torch.zeros(shape, dtype=torch.bfloat16).as_strided(shape, strides) for _ in range(2))
    assert q.is_contiguous()
    kernel.sparse_mqa_cuda(**arguments | {"q": q}, regions=regions, out=out)
    (params,) = launched
    for tensor, name in ((q, "q"), (out, "o")):
        rows = [getattr(params, f"{name}_{axis}_stride") for axis in ("token", "head")]
        for token, head in itertools.product(range(num_tokens), range(num_heads)):
            place = getattr(params, name) + 2 * (token * rows[0] + head * rows[1])
            assert place == tensor[token, head].data_ptr()


@pytest.mark.parametrize("name", ["q", "out"])
@pytest.mark.parametrize(("heads", "strides"), [(1, (516, 512, 1)), (2, (1040, 516, 1))], ids=str)
def test_rows_off_the_16_byte_grid_are_refused(heads, strides, name, launched):
    arguments = make_case(Case(num_heads=heads), 1, kv_format=KV_FORMATS["fp8"], dtype=torch.bfloat16)
    regions = (arguments.pop("window"), arguments.pop("compressed"))
    rows = torch.zeros(4096, dtype=torch.bfloat16).as_strided((3, heads, 512), strides)
    with pytest.raises(ValueError, match=rf"{name}: strides {re.escape(str(strides))} at .*multiples of 16 bytes"):
        kernel.sparse_mqa_cuda(**arguments | {name: rows}, regions=regions)
    assert not launched


def test_an_empty_batch_needs_no_kernel(as_if_on_a_gpu):
    arguments = make_case(Case(num_tokens=0, num_heads=16), 1, kv_format=KV_FORMATS["fp8"], dtype=torch.bfloat16)
    regions = (arguments.pop("window"), arguments.pop("compressed"))
    o, lse = kernel.sparse_mqa_cuda(**arguments, regions=regions)
    assert o.shape == (0, 16, 512) and lse.shape == (0, 16)


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed")
@pytest.mark.parametrize("clustered", [False, True], ids=["single", "clustered"])
@pytest.mark.parametrize("tile", HEAD_TILES)
def test_the_kernel_compiles(tile, clustered, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADFIT_CACHE_DIR", str(tmp_path))
    cubin = kernel.compile_kernel(tile, clustered)
    assert cubin[:4] == b"\x7fELF" and list(tmp_path.iterdir())


def test_the_parameter_struct_is_packed_as_the_kernels():
    """A C++ struct of these fields has no hole, so both sides agree on every offset."""
    end = 0
    for name, _ in _Params._fields_:
        field = getattr(_Params, name)
        assert field.offset == end, name
        end += field.size
    assert end == ctypes.sizeof(_Params)
