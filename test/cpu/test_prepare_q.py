"""`prepare_q`: the reference against its formula, the Triton kernel, interpreted, against the reference and float64."""

import math
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

import pytest
import torch
import triton

from headfit.kernels import prepare_q_triton as triton_module
from headfit.kernels.prepare_q_ref import prepare_q_ref
from headfit.kernels.prepare_q_triton import prepare_q_triton
from headfit.kv_cache import HEAD_DIM
from headfit.layers.norm import head_rms_norm
from headfit.layers.rope import apply_rope
from headfit.testing.measure import FLOAT32, assert_close
from headfit.testing.prepare_q_cases import PREPARE_CASES, PrepareCase, check_prepare_case, make_prepare_case
from headfit.testing.store_kv_cases import BF16, FP16, FP32, normed_float64, rotated_float64, short

if not isinstance(triton_module._prepare_q, triton.runtime.interpreter.InterpretedFunction):
    raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set; test/cpu/conftest.py must set it")

pytestmark = [
    pytest.mark.usefixtures("nan_empty"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),  # NumPy, on Inf and NaN
]
every_dtype = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=short)


@pytest.mark.parametrize("case", PREPARE_CASES, ids=lambda case: case.id)
def test_cases(case, seed):
    check_prepare_case(case, seed, prepare_q_triton, "cpu")


@every_dtype
def test_reference_is_the_composition_of_the_layers(dtype, seed):
    arguments = make_prepare_case(PrepareCase(values="random", dtype=dtype), seed)
    prepare_q_ref(**arguments)
    expected = apply_rope(head_rms_norm(arguments["q"], eps=arguments["eps"]), arguments["cos_sin"])
    assert torch.equal(arguments["out"][:, :16], expected) and arguments["out"][:, 16:].isnan().all()


def test_reference_equals_float64(seed):
    arguments = make_prepare_case(PrepareCase(values="random", dtype=FP32, num_kernel_heads=16), seed)
    prepare_q_ref(**arguments)
    expected = rotated_float64(normed_float64(arguments["q"], arguments["eps"]), arguments["cos_sin"])
    assert_close(arguments["out"], expected, FLOAT32)


def test_check_sees_another_rounding_order(seed):
    """With a factor that is not rounded to bfloat16 first, the exact cases would fail."""

    def rounds_once(*, q, out, **rest):
        wide = out.float()
        prepare_q_triton(q=q.float(), out=wide, **rest)
        out.copy_(wide)

    check_prepare_case(PrepareCase(dtype=FP32), seed, rounds_once, "cpu")
    with pytest.raises(AssertionError):
        check_prepare_case(PrepareCase(dtype=BF16), seed, rounds_once, "cpu")


def test_check_sees_a_write_beside_the_local_heads(seed):
    def writes_beside(*, out, **rest):
        prepare_q_triton(out=out, **rest)
        out[-1, 16, 0] = 0

    with pytest.raises(AssertionError):
        check_prepare_case(PrepareCase(), seed, writes_beside, "cpu")


def test_a_head_that_is_not_finite_stays_alone(seed):
    arguments = make_prepare_case(PrepareCase(num_heads=5, num_kernel_heads=8), seed)
    clean = torch.empty_like(arguments["out"])
    prepare_q_triton(**arguments | {"out": clean})
    arguments["q"][1, 2, 7] = math.nan
    prepare_q_triton(**arguments)
    assert arguments["out"][1, 2].isnan().all()
    arguments["out"][1, 2] = clean[1, 2]
    assert torch.equal(arguments["out"][:, :5], clean[:, :5])


def test_zero_tokens_launch_nothing(monkeypatch):
    monkeypatch.setattr(triton_module, "_prepare_q", None)
    arguments = make_prepare_case(PrepareCase(num_tokens=0), 0)
    prepare_q_triton(**arguments)
    assert arguments["out"].shape == (0, 64, HEAD_DIM)
    with pytest.raises(TypeError):  # one token would have launched
        prepare_q_triton(**make_prepare_case(PrepareCase(num_tokens=1), 0))


def q_of(*shape, dtype=FP32):
    return torch.zeros(*shape, dtype=dtype)


BAD = [
    ({"q": q_of(3, 4, HEAD_DIM, dtype=torch.float64)}, TypeError, "q: dtype torch.float64, allowed: .*bfloat16"),
    ({"q": q_of(3, HEAD_DIM)}, ValueError, r"q: shape \(3, 512\), allowed: \(num_tokens, num_local_heads, head_dim\)"),
    ({"out": q_of(3, 8, HEAD_DIM, dtype=BF16)}, TypeError, "out: dtype torch.bfloat16, allowed: q's torch.float32"),
    ({"out": q_of(3, 3, HEAD_DIM)}, ValueError, r"out: shape \(3, 3, 512\), allowed: \(3, 4 or more, 512\)"),
    ({"out": q_of(2, 8, HEAD_DIM)}, ValueError, r"out: shape \(2, 8, 512\), allowed: \(3, 4 or more, 512\)"),
    ({"out": q_of(3, 8, 448)}, ValueError, r"out: shape \(3, 8, 448\), allowed: \(3, 4 or more, 512\)"),
    ({"cos_sin": (torch.ones(4, 32), torch.ones(3, 32))}, ValueError, r"cos: shape \(4, 32\), allowed: \(3, rope"),
]
BAD_FOR_TRITON = [
    ({"q": q_of(3, 4, 128), "out": q_of(3, 8, 128)}, ValueError, "q: heads are 128 wide, allowed .*: 512"),
    ({"cos_sin": (torch.ones(3, 16), torch.ones(3, 16))}, ValueError, "cos: 16 wide, allowed by the Triton kernel: 32"),
    ({"q": q_of(3, 8, HEAD_DIM)[:, :4]}, ValueError, r"q: strides \(4096, 512, 1\), allowed: contiguous"),
    ({"out": q_of(3, HEAD_DIM, 8).transpose(1, 2)}, ValueError, r"out: strides .*, allowed: \(any, any, 1\)"),
    ({"out": q_of(3, 8, HEAD_DIM).to("meta")}, ValueError, "out: on meta, allowed: q's cpu"),
    ({"q": q_of(3, 4, HEAD_DIM).requires_grad_()}, ValueError, "q: requires a gradient, allowed: none"),
]


@pytest.mark.parametrize(
    ("prepare_q", "bad"),
    [(form, bad) for form in (prepare_q_ref, prepare_q_triton) for bad in BAD]
    + [(prepare_q_triton, bad) for bad in BAD_FOR_TRITON],
)
def test_input_that_does_not_fit_is_refused(prepare_q, bad):
    changes, error, message = bad
    arguments = {
        "q": q_of(3, 4, HEAD_DIM),
        "eps": 1e-6,
        "cos_sin": (torch.ones(3, 32), torch.zeros(3, 32)),
        "out": torch.full((3, 8, HEAD_DIM), math.nan),
    }
    with pytest.raises(error, match=message):
        prepare_q(**arguments | changes)
    assert arguments["out"].isnan().all()
