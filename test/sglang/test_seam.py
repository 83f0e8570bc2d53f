"""The seam by itself: call forms, the callee's contract, checks and counters, with SGLang's tensors and no SGLang."""

import gc
import logging
import math

import pytest
import torch
from flash_mla_stand_in import calls, flash_mla_with_kvcache
from seam_calls import Layer, make_call

from headfit import backends
from headfit.hosts.sglang import seam as seam_module
from headfit.hosts.sglang.seam import Seam
from headfit.kv_cache import HEAD_DIM, KVRegion, PackedFp8Format
from headfit.testing.cases import Case, poisoned_pool, reference_float64
from headfit.testing.measure import BF16_OUTPUT, FLOAT32, assert_close


def make_seam(name="reference", **options):
    return Seam(backends.create(name), **options)


def run(seam, call, num_heads, layer_id=0):
    with seam.running(Layer(num_heads, layer_id)):
        return seam.call(flash_mla_with_kvcache, **call)


CASES = (
    Case(num_heads=8, num_keys=(64, 64), page_sizes=(256, 64), lengths="ragged", absent=0.2),
    Case(num_heads=16, num_keys=(128, None), page_sizes=(256, 64)),
    Case(num_heads=16, num_keys=(133, 64), page_sizes=(256, 2), strided=True),
    Case(num_heads=32, num_keys=(68, None), leading_absent=64),
    Case(num_heads=64, num_keys=(64, 64), sinks="mixed"),
    Case(num_heads=16, num_keys=(64, 64), absent=1.0),
    Case(num_heads=16, lengths="zero"),
    Case(num_tokens=0, num_heads=16),
)


@pytest.mark.parametrize("backend", ["reference", "unified_kv_triton"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_answers_as_the_callee_would(case, seed, backend):
    call, arguments = make_call(case, seed)
    seam, seen = make_seam(backend), len(calls)
    out, lse = run(seam, call, case.num_heads)
    assert len(calls) == seen and seam.served == 1 and not seam.passed_on
    assert out.shape == call["q"].shape and out.dtype == torch.bfloat16
    assert lse.shape == (case.num_tokens, 64, 1) and lse.dtype == torch.float32
    expected, expected_lse = reference_float64(**arguments)
    assert_close(out[:, 0, : case.num_heads], expected, BF16_OUTPUT)
    # The callee's own convention: +inf where a row has no valid key.
    expected_lse = torch.where(expected_lse == -math.inf, math.inf, expected_lse)
    tolerance = FLOAT32 if backend == "reference" else BF16_OUTPUT
    assert_close(lse[:, : case.num_heads, 0], expected_lse, tolerance)


def test_same_as_the_callee_itself(seed):
    case = Case(num_heads=16, num_keys=(64, 64), page_sizes=(256, 64), absent=0.3)
    call, _ = make_call(case, seed)
    ours = run(make_seam(), call, 16)
    theirs = flash_mla_with_kvcache(**call)
    assert len(ours) == len(theirs) == 2
    assert_close(ours[0][:, :, :16], theirs[0][:, :, :16], BF16_OUTPUT)
    assert_close(ours[1][:, :16], theirs[1][:, :16], FLOAT32)
    assert_close(ours[-1][:, :16], theirs[1][:, :16], FLOAT32)


def test_no_valid_key_gives_zeros_and_plus_infinity(seed):
    call, _ = make_call(Case(num_heads=16, num_keys=(64, 64), absent=1.0), seed)
    out, lse = run(make_seam(), call, 16)
    assert not out[:, :, :16].any() and (lse[:, :16] == math.inf).all()


def test_only_the_layers_own_rows_are_written(seed):
    """The backend gets the padded buffers' own memory: q is read and out is written in place."""
    call, _ = make_call(Case(num_heads=8), seed)
    seam, seen = make_seam("unified_kv_triton"), {}
    decode = seam.backend.decode

    def spy(**arguments):
        seen.update(arguments, before=arguments["out"].clone())
        arguments["out"]._base.fill_(5.0)
        return decode(**arguments)

    seam.backend.decode = spy
    out, _ = run(seam, call, 8)
    assert seen["q"].data_ptr() == call["q"].data_ptr() and seen["q"].shape[1] == 8
    assert seen["out"].data_ptr() == out.data_ptr() and (out[:, :, 8:] == 5).all()
    assert seen["window"].pool.buffer.data_ptr() == call["k_cache"].data_ptr()
    assert seen["attn_sink"].data_ptr() == call["attn_sink"].data_ptr() and seen["attn_sink"].shape == (8,)


def test_head_count_is_the_layers_not_qs(seed):
    call, arguments = make_call(Case(num_heads=16), seed, padded_heads=128)
    out, _ = run(make_seam(), call, 16)
    assert out.shape[2] == 128
    assert_close(out[:, 0, :16], reference_float64(**arguments)[0], BF16_OUTPUT)


UNKNOWN = {
    "block_table": (torch.zeros(3, 1, dtype=torch.int32), "block_table: tensor"),
    "head_dim_v": (256, "head_dim_v: 256, allowed: 512"),
    "is_fp8_kvcache": (False, "is_fp8_kvcache: False"),
    "causal": (True, "causal: True"),
    "use_legacy": (False, "use_legacy: False"),
    "kv_format": ("V41_NEW", "kv_format: 'V41_NEW'"),
    "indices": (None, "no indices"),
    "topk_length": (None, "no topk_length"),
    "attn_sink": (None, "no attn_sink"),
    "extra_topk_length": (None, "only some of the extra cache"),
    "window_left": (3, "argument window_left"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_form_goes_to_the_callee_with_one_warning(seed, caplog, name):
    value, reason = UNKNOWN[name]
    call, _ = make_call(Case(num_heads=16), seed)
    seam = make_seam()
    got = []
    layer = Layer(16)
    with caplog.at_level(logging.WARNING, "headfit"), seam.running(layer):
        for _ in range(3):
            got.append(seam.call(lambda **kwargs: kwargs, **call | {name: value}))
    assert all(one[name] is value and one["q"] is call["q"] for one in got)
    assert len(caplog.records) == 1 and reason in caplog.text
    assert seam.passed_on.total() == 3 and not seam.served


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda call: call.update(q=call["q"].float()), "dtype torch.float32"),
        (lambda call: call.update(q=call["q"].expand(-1, 2, -1, -1)), "q: shape (3, 2, 64, 512)"),
        (lambda call: call.update(q=call["q"][:, :, :8]), "at least 16"),
        (lambda call: call.update(k_cache=call["k_cache"][..., :528]), "584"),
        (lambda call: call.update(indices=call["indices"].long()), "torch.int64"),
        (lambda call: call.update(topk_length=call["topk_length"][:2]), "window.lengths"),
        (lambda call: call.update(attn_sink=call["attn_sink"][:8]), "attn_sink: shape (8,)"),
    ],
    ids=["q-dtype", "two-tokens-a-row", "too-few-heads", "v41-cache", "int64-indices", "lengths", "short-sink"],
)
def test_tensors_of_another_form_go_to_the_callee(seed, change, reason):
    call, _ = make_call(Case(num_heads=16), seed)
    change(call)
    seam = make_seam()
    layer = Layer(16)
    with seam.running(layer):
        assert seam.call(lambda **kwargs: "theirs", **call) == "theirs"
    assert reason in " ".join(seam.passed_on)


def test_positional_arguments_and_other_layers_go_to_the_callee(seed):
    call, _ = make_call(Case(num_heads=16), seed)
    seam = make_seam(max_heads=8)
    assert seam.call(lambda **kwargs: "theirs", **call) == "theirs"
    layer = Layer(16)
    with seam.running(layer):
        assert seam.call(lambda *args: "theirs", call["q"]) == "theirs"
        assert seam.call(lambda **kwargs: "theirs", **call) == "theirs"
    assert set(seam.passed_on) == {
        "no layer of ours is running",
        "1 positional arguments",
        "16 heads a rank, more than 8",
    }


def test_layers_nest_and_an_error_does_not_leave_one_running(seed):
    call, _ = make_call(Case(num_heads=16), seed)
    seam = make_seam()
    outer, inner = (Layer(16, i) for i in range(2))
    with seam.running(outer):
        with pytest.raises(KeyError), seam.running(inner):
            seam.call(flash_mla_with_kvcache, **call)
            raise KeyError
        seam.call(flash_mla_with_kvcache, **call)
    seam.call(lambda **kwargs: None, **call)
    assert set(seam.layers) == {outer, inner} and seam.served == 2 and seam.passed_on.total() == 1
    del inner
    gc.collect()
    assert set(seam.layers) == {outer} and seam.served == 2  # a dropped model's layers are not kept alive


def checked_seam(arguments):
    return make_seam(check_sinks=lambda layer: arguments["attn_sink"])


@pytest.mark.parametrize(
    "fault, place",
    [
        (lambda out: out[41, 3].zero_(), "token 41 of 64, head 3"),
        (lambda out: out[63, 15].neg_(), "token 63 of 64, head 15"),
        (lambda out: out[7].copy_(out[8]), "token 7 of 64"),
        (lambda out: out[0, 0, 0].fill_(math.nan), "token 0 of 64, head 0 is off by inf"),
    ],
)
def test_check_mode_names_one_wrong_head_among_many(seed, fault, place):
    call, arguments = make_call(Case(num_tokens=64, num_heads=16, num_keys=(32, None)), seed)
    seam = checked_seam(arguments)
    run(seam, call, 16, layer_id=5)
    assert seam.checked == 1
    decode = seam.backend.decode

    def wrong(**kwargs):
        out, lse = decode(**kwargs)
        fault(out)
        return out, lse

    seam.backend.decode = wrong
    with pytest.raises(RuntimeError, match=f"HEADFIT_CHECK: layer 5, {place}"):
        run(seam, call, 16, layer_id=5)


def test_check_mode_knows_the_layers_own_sinks(seed):
    """A call that brings another rank's sinks is answered with them, and is wrong."""
    call, arguments = make_call(Case(num_heads=16, sinks=3.0, num_keys=(8, 8)), seed)
    seam = checked_seam({"attn_sink": arguments["attn_sink"].clone()})
    run(seam, call, 16)
    call["attn_sink"] += 1
    with pytest.raises(RuntimeError, match="HEADFIT_CHECK: layer 0, token"):
        run(seam, call, 16)


def test_check_mode_lets_nan_agree_with_nan_only(seed):
    call, arguments = make_call(Case(num_heads=16), seed)
    call["q"][1] = math.nan
    seam = checked_seam(arguments)
    out, _ = run(seam, call, 16)
    assert out[1, :, :16].isnan().all() and seam.checked == 1
    decode = seam.backend.decode

    def hides_nan(**kwargs):
        out, lse = decode(**kwargs)
        return out.nan_to_num(), lse

    seam.backend.decode = hides_nan
    with pytest.raises(RuntimeError, match="layer 0, token 1 of 3, head 0 is off by inf"):
        run(seam, call, 16)


def test_check_mode_is_as_strict_for_large_values(seed):
    """Where a square is no float32 any more; equal infinities agree."""
    call, arguments = make_call(Case(num_heads=16), seed)
    factor = 1.0

    def answers(**kwargs):
        out, lse = decode(**kwargs)
        return out * (1e30 * factor), lse

    def expected(**kwargs):
        out, lse = reference(**kwargs)
        return out * 1e30, lse

    seam = checked_seam(arguments)
    decode, reference = seam.backend.decode, seam_module.sparse_mqa_ref
    seam.backend.decode = answers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam_module, "sparse_mqa_ref", expected)
        run(seam, call, 16)
        factor = 0.8
        with pytest.raises(RuntimeError, match=r"is off by 0\.2"):
            run(seam, call, 16)
        factor = math.inf
        with pytest.raises(RuntimeError, match="is off by inf"):
            run(seam, call, 16)
        patch.setattr(seam_module, "sparse_mqa_ref", lambda **kwargs: tuple(x * math.inf for x in reference(**kwargs)))
        run(seam, call, 16)


def test_check_mode_refuses_nan_sinks_and_indices_past_the_pool(seed):
    call, arguments = make_call(Case(num_heads=16), seed)
    sink = arguments["attn_sink"].clone()
    seam = checked_seam({"attn_sink": sink})
    sink[3] = math.nan
    with pytest.raises(RuntimeError, match="layer 2, attn_sink: NaN among the rank's own"):
        run(seam, call, 16, layer_id=2)
    sink.copy_(arguments["attn_sink"])
    call["indices"][1, 0, 0] = call["k_cache"].shape[0] * call["k_cache"].shape[1]
    with pytest.raises(IndexError, match=r"window.indices\[row 1, column 0\] is"):
        run(seam, call, 16)


def test_calls_outside_layers_are_said_once(seed, caplog):
    call, _ = make_call(Case(num_heads=16), seed)
    seam = make_seam()
    with caplog.at_level(logging.WARNING, "headfit"):
        for _ in range(3):
            assert seam.call(lambda **kwargs: "theirs", **call) == "theirs"
    assert seam.passed_on == {"no layer of ours is running": 3}
    assert caplog.text.count("leaves a decode call to the server's kernel: no layer of ours is running") == 1


@pytest.mark.parametrize("case", [Case(num_heads=16, absent=1.0), Case(num_tokens=0, num_heads=16)])
def test_checked_rows_without_keys_are_zero(seed, case):
    call, arguments = make_call(case, seed)
    out, _ = run(checked_seam(arguments), call, 16)
    assert not out[:, :, :16].any()


def test_a_scale_of_zero_is_not_the_default_one(seed):
    call, arguments = make_call(Case(num_heads=16), seed)
    out, _ = run(make_seam(), call | {"softmax_scale": 0.0}, 16)
    assert_close(out[:, 0, :16], reference_float64(**arguments | {"softmax_scale": 0.0})[0], BF16_OUTPUT)


def test_a_window_page_of_256_and_pages_of_2(seed):
    """The server's own strides: 149,760 bytes a page of 256 tokens, 1,728 a page of two."""
    pools = [poisoned_pool(PackedFp8Format(), 3, size) for size in (256, 2)]
    assert [pool.kernel_view().stride(0) for pool in pools] == [149_760, 1_728]
    for pool in pools:
        pool.store(torch.arange(pool.page_size, pool.page_size + 2), torch.ones(2, HEAD_DIM))
    regions = [
        KVRegion(pool, torch.arange(pool.page_size, pool.page_size + 2).int()[None], torch.tensor([2]).int())
        for pool in pools
    ]
    call, _ = make_call(Case(num_tokens=1, num_heads=16), seed)
    call.update(q=torch.zeros_like(call["q"]), attn_sink=torch.full((64,), math.log(4.0)))
    names = (("k_cache", "indices", "topk_length"), ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"))
    for region, (cache, indices, lengths) in zip(regions, names, strict=True):
        call.update({cache: region.pool.kernel_view(), indices: region.indices[:, None], lengths: region.lengths})
    out, lse = run(make_seam(), call, 16)
    assert_close(out[:, 0, :16], torch.full((1, 16, HEAD_DIM), 0.5), BF16_OUTPUT)
    assert_close(lse[:, :16, 0], torch.full((1, 16), math.log(4.0)), FLOAT32)
