"""`store_kv`: the reference against its formula; the Triton kernel, interpreted, against reference and packer."""

import math
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

import pytest
import torch
import triton

from headfit import kv_cache
from headfit.kernels import store_kv_triton as triton_module
from headfit.kernels.store_kv_ref import store_kv_ref
from headfit.kernels.store_kv_triton import store_kv_triton
from headfit.kv_cache import HEAD_DIM, ModelDtypeFormat, PackedFp8Format, PagedPool
from headfit.layers.norm import RMSNorm
from headfit.layers.rope import apply_rope
from headfit.testing.cases import KV_FORMATS, poisoned_pool
from headfit.testing.measure import FLOAT32, assert_close
from headfit.testing.store_kv_cases import (
    BF16,
    FP16,
    FP32,
    STORE_CASES,
    StoreCase,
    amax_weights,
    check_store_case,
    check_stored,
    edge_case,
    make_store_case,
    rounding_weight,
    row_bytes,
    short,
    store_float64,
)

if not isinstance(triton_module._store_kv, triton.runtime.interpreter.InterpretedFunction):
    raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set; test/cpu/conftest.py must set it")

pytestmark = [
    pytest.mark.usefixtures("nan_empty"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),  # NumPy, on Inf and NaN
]
every_dtype = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=short)
both_forms = pytest.mark.parametrize("store_kv", [store_kv_ref, store_kv_triton])


@pytest.mark.parametrize("case", STORE_CASES, ids=lambda case: case.id)
def test_cases(case, seed):
    check_store_case(case, seed, store_kv_triton, "cpu")


@every_dtype
def test_scale_at_and_beside_every_border(dtype):
    for weight in amax_weights(dtype):
        arguments = edge_case(weight, dtype)
        store_kv_triton(**arguments)
        check_stored(arguments, exact=True)


@every_dtype
def test_values_at_and_beside_every_rounding_border(dtype):
    arguments = edge_case(rounding_weight(dtype), dtype)
    store_kv_triton(**arguments)
    check_stored(arguments, exact=True)
    _, scales = row_bytes(arguments["pool"], torch.tensor([0, 3]))
    assert (scales[:, : kv_cache.NUM_GROUPS - 1] == kv_cache.SCALE_BIAS).all()  # else the borders lie elsewhere
    assert (scales[:, kv_cache.NUM_GROUPS] == 0).all()


@both_forms
def test_bytes_are_the_packers(store_kv):
    """+-1 with weight 1 and no rotation: the packed bytes of +-1."""
    arguments = edge_case(torch.ones(HEAD_DIM), BF16) | {"cos_sin": (torch.ones(2, 32), torch.zeros(2, 32))}
    store_kv(**arguments)
    got = row_bytes(arguments["pool"], arguments["slots"])
    assert all(map(torch.equal, got, kv_cache.pack(arguments["kv"])))


@every_dtype
@pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_reference_is_the_composition_of_the_layers(kv_format, dtype, seed):
    arguments = make_store_case(StoreCase(values="random", dtype=dtype), seed)
    pools = [poisoned_pool(kv_format, 8, 8) for _ in range(2)]
    arguments["slots"] = arguments["slots"].clamp(max=63)
    arguments["slots"][3:] = torch.arange(3, 9)
    store_kv_ref(**arguments | {"pool": pools[0]})
    norm = RMSNorm(HEAD_DIM, eps=arguments["eps"])
    norm.weight.copy_(arguments["norm_weight"])
    pools[1].store(arguments["slots"], apply_rope(norm(arguments["kv"]), arguments["cos_sin"]))
    assert torch.equal(*(pool.buffer.view(torch.uint8) for pool in pools))


def test_reference_equals_float64(seed):
    arguments = make_store_case(StoreCase(values="random", dtype=FP32, dropped=0), seed)
    pool = PagedPool(num_pages=1, page_size=64, kv_format=ModelDtypeFormat(FP32), device="cpu")
    slots = torch.arange(9)
    store_kv_ref(**arguments | {"pool": pool, "slots": slots})
    inputs = {name: arguments[name] for name in ("kv", "norm_weight", "eps", "cos_sin")}
    assert_close(pool.load(slots), store_float64(**inputs), FLOAT32)


def test_weight_is_applied_after_the_factor(seed):
    """Weights that bring a group's largest value to 448 exactly, one step above in the other order: a scale twice as
    large."""
    arguments = make_store_case(StoreCase(num_tokens=1, dtype=FP32, dropped=0), seed)
    x = arguments["kv"][0]
    factor = torch.rsqrt(x.square().mean() + arguments["eps"])
    weight = torch.zeros(HEAD_DIM)
    steps = (1 + torch.arange(-8, 9) * 2.0**-23)[:, None]
    candidates = steps * (kv_cache.FP8_MAX / (x * factor))
    fits = (candidates * (x * factor) == kv_cache.FP8_MAX) & ((candidates * factor) * x > kv_cache.FP8_MAX)
    groups = 0
    for start in range(0, kv_cache.NOPE_DIM, kv_cache.GROUP_SIZE):
        found = fits[:, start : start + kv_cache.GROUP_SIZE].nonzero()
        if len(found):
            step, channel = found[0].tolist()
            weight[start + channel] = candidates[step, start + channel]
            groups += 1
    assert groups > 3
    arguments["norm_weight"] = weight
    store_kv_triton(**arguments)
    check_stored(arguments, exact=True)
    _, scales = row_bytes(arguments["pool"], arguments["slots"])
    assert (scales == kv_cache.SCALE_BIAS).sum() == groups


def test_check_sees_another_rounding_order(seed):
    """Rounded once, after RoPE, the rotated channels differ in their last bit: the exact cases would show it."""
    arguments = make_store_case(StoreCase(), seed)

    def rounds_once(*, kv, pool, slots, **rest):
        store_kv_triton(kv=kv.float(), pool=pool, slots=slots, **rest)

    rounds_once(**arguments)
    with pytest.raises(AssertionError):
        check_stored(arguments, exact=True)


def test_a_pool_of_somebody_else_at_an_odd_address(seed):
    """Pages that start at odd addresses, further apart than they need to be, without a spare page."""
    arguments = make_store_case(StoreCase(page_size=2), seed)
    num_pages = arguments["pool"].num_pages
    stride = 2 * kv_cache.TOKEN_BYTES + 3
    memory = torch.full((num_pages * stride + 1,), 0xFF, dtype=torch.uint8)
    shape, strides = (num_pages, 2, 1, kv_cache.TOKEN_BYTES), (stride, kv_cache.TOKEN_BYTES, 1, 1)
    pool = PagedPool.from_packed_cache("cache", memory[1:].as_strided(shape, strides, 1))
    assert pool.buffer.data_ptr() % 2
    store_kv_triton(**arguments | {"pool": pool})
    store_kv_triton(**arguments)
    written = arguments["slots"][arguments["slots"] >= 0]
    assert all(map(torch.equal, row_bytes(pool, written), row_bytes(arguments["pool"], written)))
    outside = torch.ones(num_pages, stride, dtype=torch.bool)
    outside[:, : 2 * kv_cache.TOKEN_BYTES] = False
    assert (memory[1:].view(num_pages, stride)[outside] == 0xFF).all() and memory[0] == 0xFF


@pytest.mark.parametrize("weight_dtype", [BF16, FP32], ids=short)
def test_weights_of_a_cast_layer(weight_dtype, seed):
    arguments = make_store_case(StoreCase(), seed)
    arguments["norm_weight"] = arguments["norm_weight"].to(weight_dtype)
    store_kv_triton(**arguments)
    check_stored(arguments, exact=True)


def test_zero_tokens_launch_nothing(monkeypatch):
    monkeypatch.setattr(triton_module, "_store_kv", None)
    arguments = make_store_case(StoreCase(num_tokens=0, dropped=0), 0)
    store_kv_triton(**arguments)
    assert (arguments["pool"].buffer == 0xFF).all()
    with pytest.raises(TypeError):  # one token would have launched
        store_kv_triton(**make_store_case(StoreCase(num_tokens=1), 0))


BAD = [
    ({"kv": torch.zeros(3, HEAD_DIM, dtype=torch.float64)}, TypeError, "kv: dtype torch.float64, allowed: .*bfloat16"),
    ({"kv": torch.zeros(3, 511)}, ValueError, r"kv: shape \(3, 511\), allowed: \(num_tokens, 512\)"),
    ({"kv": torch.zeros(HEAD_DIM)}, ValueError, r"kv: shape \(512,\), allowed: \(num_tokens, 512\)"),
    ({"norm_weight": torch.ones(448)}, ValueError, r"norm_weight: shape \(448,\), allowed: \(512,\)"),
    ({"norm_weight": torch.ones(HEAD_DIM, dtype=torch.int32)}, TypeError, "norm_weight: dtype torch.int32"),
    ({"slots": torch.zeros(3)}, TypeError, "slots: dtype torch.float32, allowed: torch.int32, torch.int64"),
    ({"slots": torch.zeros(2, dtype=torch.int64)}, ValueError, r"slots: shape \(2,\), allowed: \(3,\)"),
    ({"cos_sin": (torch.ones(3, 32), torch.ones(2, 32))}, ValueError, r"sin: shape \(2, 32\), allowed: \(3, rope"),
    ({"cos_sin": (torch.ones(3, 32), torch.ones(3, 31))}, ValueError, r"sin: shape \(3, 31\), allowed: cos's"),
    ({"cos_sin": (torch.ones(3, 0), torch.ones(3, 0))}, ValueError, r"cos: shape \(3, 0\), allowed: .*of 2 to 512"),
    ({"cos_sin": (torch.ones(3, 32).half(), torch.ones(3, 32))}, TypeError, "cos: dtype torch.float16"),
]
BAD_FOR_TRITON = [
    ({"pool": poisoned_pool(ModelDtypeFormat(FP32), 1, 4)}, ValueError, "pool: kv_format 'model', allowed .*'fp8'"),
    ({"cos_sin": (torch.ones(3, 16), torch.ones(3, 16))}, ValueError, "cos: 16 wide, allowed by the Triton kernel: 32"),
    ({"kv": torch.zeros(HEAD_DIM, 3).T}, ValueError, r"kv: strides \(1, 3\), allowed: \(any, 1\)"),
    ({"slots": torch.zeros(6, dtype=torch.int64)[::2]}, ValueError, r"slots: strides \(2,\), allowed: contiguous"),
    ({"slots": torch.zeros(3, dtype=torch.int64, device="meta")}, ValueError, "slots: on meta, allowed: kv's cpu"),
    ({"pool": PagedPool(num_pages=1, page_size=1, kv_format=PackedFp8Format(), device="meta")}, ValueError, "pool: on"),
]


@pytest.mark.parametrize(
    ("store_kv", "bad"),
    [(form, bad) for form in (store_kv_ref, store_kv_triton) for bad in BAD]
    + [(store_kv_triton, bad) for bad in BAD_FOR_TRITON],
)
def test_input_that_does_not_fit_is_refused(store_kv, bad):
    changes, error, message = bad
    arguments = {
        "kv": torch.zeros(3, HEAD_DIM),
        "norm_weight": torch.ones(HEAD_DIM),
        "eps": 1e-6,
        "cos_sin": (torch.ones(3, 32), torch.zeros(3, 32)),
        "slots": torch.arange(3),
        "pool": poisoned_pool(PackedFp8Format(), 1, 4),
    }
    with pytest.raises(error, match=message):
        store_kv(**arguments | changes)
    assert (arguments["pool"].buffer == 0xFF).all()


def test_not_finite_groups_read_as_nan(seed):
    arguments = make_store_case(StoreCase(num_tokens=2, dropped=0), seed)
    arguments["norm_weight"][70], arguments["norm_weight"][460] = math.inf, math.nan
    store_kv_triton(**arguments)
    rows = arguments["pool"].load(arguments["slots"])
    broken = rows.isnan() | rows.isinf()
    assert broken[:, 64:128].all() and broken[:, 460].all()  # the group of channel 70; the pair of channel 460
    broken[:, 64:128], broken[:, 460:462] = False, False
    assert not broken.any()


def test_scale_rule_is_the_formats():
    """The kernel's constants, spelled as bits, are kv_cache's."""
    assert triton_module.FP8_MAX_EXPONENT.value == math.frexp(kv_cache.FP8_MAX)[1] - 1
    largest = torch.tensor(kv_cache.FP8_MAX).view(torch.int32).item()
    assert triton_module.FP8_MAX_MANTISSA_BITS.value == largest & triton_module.MANTISSA_BITS.value
