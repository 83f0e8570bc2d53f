"""FlashMLA on a GPU: every backend's checks through padding, its metadata, long batches, and the layer that pads.

"Row n" is row n of the list of known faults.
"""

import math

import pytest
import torch
from test_layer_gpu import CONFIG, NUM_SEQS, UPDATES, Captured, check_rank_sinks, make_cache, make_layer, prefill

from headfit import backends
from headfit.attn_sink import sink_addresses
from headfit.backends import flashmla
from headfit.backends.reference import ReferenceBackend
from headfit.forward_batch import ForwardBatch
from headfit.kv_cache import HEAD_DIM
from headfit.testing import backend_checks
from headfit.testing.backend_checks import BF16, CHECKS, FP8, PAGES_PAST_TWO_GIB, assert_bit_equal, check_reference
from headfit.testing.cases import CASES, Case, make_case, reference_float64
from headfit.testing.measure import BF16_OUTPUT, Tolerance, assert_close, relative_norm
from headfit.testing.padded_backend import PaddedBackend
from headfit.testing.timing import capture, count_launches

pytestmark = pytest.mark.skipif(flashmla.obstacle() is not None, reason=f"FlashMLA: {flashmla.obstacle()}")
# Its exponentials are exp2 approximations over scores summed in another order.
LSE = Tolerance(absolute=1e-4, relative=1e-4, cosine=1e-8)
# What a corrupt key gives is the kernel's own; every e4m3 code is tried under usual scales below.
COMMON_CHECKS = [check for check in CHECKS if check.__name__ not in ("check_corrupt_key", "check_every_code")]
every_ratio = pytest.mark.parametrize("layer_id", [0, 1, 2], ids=["window", "ratio4", "ratio128"])
both_widths = pytest.mark.parametrize("width", [64, 128])


@pytest.fixture(autouse=True)
def lse_tolerance(monkeypatch):
    monkeypatch.setitem(backend_checks.LSE_TOLERANCES, "flashmla", LSE)


def make_backend(width=None, **options):
    return flashmla.FlashMLABackend(**options | ({"num_heads": (width,)} if width else {}))


def padded(width=None, poison=math.nan, **options):
    return PaddedBackend(make_backend(width, **options), poison=poison)


@both_widths
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case, width):
    if case.num_heads > width:
        pytest.skip("more heads than this width holds")
    for seed in range(2):
        backend_checks.check_case(padded(width), case, seed, "cuda")


@pytest.mark.parametrize("check", COMMON_CHECKS, ids=lambda check: check.__name__)
def test_check(check):
    """Rows 7, 12, 15, 16 and 2 among them."""
    check(padded(), "cuda")


def test_every_e4m3_code():
    backend_checks.check_every_code(padded(), "cuda", range(100, 150))


@pytest.mark.parametrize("num_heads", [8, 16, 32])
@both_widths
def test_rows_01_and_02_padding_may_hold_anything(width, num_heads):
    case = Case(num_tokens=33, num_heads=num_heads, num_keys=(128, 512), page_sizes=(256, 64), lengths="ragged")
    arguments = make_case(case, 1, kv_format=FP8, device="cuda", dtype=BF16)
    zeros = check_reference(padded(width, poison=0.0), arguments)
    for poison in (math.nan, math.inf):
        assert_bit_equal(padded(width, poison=poison).decode(**arguments), zeros)


@every_ratio
@pytest.mark.parametrize("size", [1, 2, 4])
@both_widths
@torch.inference_mode()
def test_layer_equals_the_reference_layer(width, size, layer_id):
    for rank in range(size):
        outputs = []
        for backend in (ReferenceBackend(), make_backend(width)):
            layer, cache = make_layer(layer_id, rank=rank, size=size, backend=backend), make_cache()
            torch.manual_seed(rank)
            prefill(layer, cache, [126, 5, 250])
            slots, positions = torch.arange(NUM_SEQS, device="cuda"), torch.tensor([126, 5, 250], device="cuda")
            batch = ForwardBatch.for_decode(cache, request_slots=slots, positions=positions)
            x = torch.randn(NUM_SEQS, CONFIG.hidden_size, dtype=BF16, device="cuda")
            outputs.append(layer(x, positions, batch))
        assert relative_norm(outputs[1], outputs[0]) < 1e-2, f"rank {rank}"


@every_ratio
@pytest.mark.parametrize("rank", [0, 3])
@torch.inference_mode()
def test_row_02_poisoned_padding_changes_no_bit_of_a_layer(rank, layer_id, monkeypatch):
    outputs = []
    for poison in (0.0, math.nan):
        layer, cache = make_layer(layer_id, rank=rank, size=4, backend=make_backend()), make_cache()
        plain = layer._queries

        def queries(*args, plain=plain, poison=poison, layer=layer):
            q = plain(*args)
            q[:, layer.head_layout.num_local_heads :] = poison
            return q

        monkeypatch.setattr(layer, "_queries", queries)
        torch.manual_seed(7)
        prefill(layer, cache, [126, 5, 250])
        captured = Captured(layer, cache, [126, 5, 250])
        outputs.append(captured.replay(captured.positions.clone(), captured.x.clone()))
    assert outputs[0].isfinite().all() and torch.equal(*outputs)


@every_ratio
@torch.inference_mode()
def test_replay_equals_eager_as_sequences_grow(layer_id):
    layer, lengths = make_layer(layer_id, rank=3, size=4, backend=make_backend()), [126, 5, 250]
    cache, twin = make_cache(), make_cache()
    for each in (cache, twin):
        torch.manual_seed(1)
        prefill(layer, each, lengths)
    captured = Captured(layer, cache, lengths)
    for step in range(6):  # over the borders of 4, 128 and the window
        positions = torch.tensor([length + step for length in lengths], device="cuda")
        x = torch.randn_like(captured.x)
        batch = ForwardBatch.for_decode(twin, request_slots=captured.slots, positions=positions)
        assert torch.equal(captured.replay(positions, x), layer(x, positions, batch))


@torch.inference_mode()
def test_row_05_alternate_widths_keep_a_captured_sink():
    layer, cache = make_layer(0, rank=3, size=4, backend=make_backend()), make_cache()
    prefill(layer, cache, [9, 5, 7])
    captured = Captured(layer, cache, [9, 5, 7])
    positions, x = captured.positions.clone(), captured.x.clone()
    before, address = captured.replay(positions, x), layer._attn_sink_local.data_ptr()
    wide = layer.head_layout
    exact = make_layer(0, rank=3, size=4, backend=ReferenceBackend())
    layer.head_layout, layer.backend = exact.head_layout, ReferenceBackend()
    batch = ForwardBatch.for_decode(cache, request_slots=captured.slots, positions=positions)
    narrow = layer(x, positions, batch)
    layer.head_layout = wide
    assert layer._attn_sink_local.data_ptr() == address
    assert torch.equal(captured.replay(positions, x), before) and relative_norm(narrow, before) < 1e-2


@both_widths
@pytest.mark.parametrize("rank", [0, 3, 7])
def test_row_07_each_rank_has_its_own_sinks(rank, width):
    check_rank_sinks(make_backend(width), rank)


@pytest.mark.parametrize("update", [name for name in UPDATES if name != "rebind"])
@torch.no_grad()
def test_row_08_a_replay_sees_new_sinks(update):
    layer = make_layer(0, rank=1, size=4, backend=make_backend())
    layer.attn_sink.fill_(math.log(4))
    layer.wq_b.weight.zero_()  # equal scores: the sink's share depends on it and the key count alone
    captured = Captured(layer, make_cache(), [0, 0, 0])
    addresses = sink_addresses(layer)
    positions, x = torch.zeros(NUM_SEQS, dtype=torch.int64, device="cuda"), captured.x.clone()
    old = captured.replay(positions, x)
    UPDATES[update](layer, torch.full_like(layer.attn_sink, -math.inf))
    assert sink_addresses(layer) == addresses
    assert relative_norm(captured.replay(positions, x), 5 * old) < 1e-2  # one key: its share goes from 1/5 to 1


@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_rows_25_and_26_captured(num_tokens):
    backend_checks.check_captured(padded(), num_tokens, 16)


def test_row_25_other_lengths_in_the_same_tensors():
    backend = make_backend()
    case = Case(num_tokens=4, num_heads=64, num_keys=(512, None), page_sizes=(64, 2))
    arguments = make_case(case, 3, kv_format=FP8, device="cuda", dtype=BF16)
    with backend.step():
        for lengths in ([512] * 4, [64, 512, 1, 0], [512, 3, 512, 511]):
            arguments["window"].lengths.copy_(torch.tensor(lengths))
            check_reference(backend, arguments, str(lengths))


def test_row_06_a_long_batch_needs_bounded_memory():
    """24,576 tokens: beside the result, a few times the output of one launch."""
    backend, num_tokens = make_backend(), 24_576
    case = Case(num_tokens=1, num_heads=64, num_keys=(128, 512), page_sizes=(64, 64))
    arguments = make_case(case, 4, kv_format=FP8, device="cuda", dtype=BF16)
    expected, _ = reference_float64(**arguments)
    arguments["q"] = arguments["q"].expand(num_tokens, -1, -1).contiguous()
    for name in ("window", "compressed"):
        region = arguments[name]
        arguments[name] = type(region)(
            region.pool, region.indices.expand(num_tokens, -1).contiguous(), region.lengths.expand(num_tokens)
        )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, lse = backend.decode(**arguments)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - o.nbytes - lse.nbytes
    print(f"extra peak {extra / 2**20:.0f} MiB, one launch's output {flashmla.MAX_LAUNCH_BYTES / 2**20:.0f} MiB")
    assert extra <= 5 * flashmla.MAX_LAUNCH_BYTES
    for row in (0, 2047, 2048, num_tokens - 1):
        assert_close(o[row : row + 1], expected.float(), BF16_OUTPUT, f"row {row}")


def test_row_17_index_past_the_pool():
    backend_checks.check_index_past_the_pool(padded(checked=True), "cuda")


@pytest.mark.parametrize(("page_size", "num_pages"), PAGES_PAST_TWO_GIB)
def test_row_18_offsets_past_two_gib(page_size, num_pages):
    backend_checks.check_wide_offsets(padded(), "cuda", page_size, num_pages)


def test_row_19_an_empty_batch_is_not_launched():
    backend = make_backend()
    arguments = make_case(Case(num_tokens=0, num_heads=64), 0, kv_format=FP8, device="cuda", dtype=BF16)
    results = []
    assert count_launches(capture(lambda: results.append(backend.decode(**arguments)))) == 0
    o, lse = results[0]
    assert o.shape == (0, 64, HEAD_DIM) and lse.shape == (0, 64)


def test_row_20_133_indices():
    case = Case(num_tokens=5, num_heads=64, num_keys=(133, 133), page_sizes=(256, 64), strided=True)
    check_reference(make_backend(), make_case(case, 5, kv_format=FP8, device="cuda", dtype=BF16))


def test_row_28_alone_and_in_a_batch():
    with pytest.raises(ValueError, match="batch_invariant: True"):
        make_backend(batch_invariant=True)
    backend = make_backend()
    arguments = make_case(
        Case(num_tokens=32, num_heads=64, num_keys=(128, 512), page_sizes=(256, 64)),
        6,
        kv_format=FP8,
        device="cuda",
        dtype=BF16,
    )
    alone = backend_checks.rows_of(arguments, slice(0, 1))
    o, o_alone = backend.decode(**arguments)[0][:1], backend.decode(**alone)[0]
    expected, _ = reference_float64(**alone)
    assert relative_norm(o, expected) <= 3e-3 and relative_norm(o_alone, expected) <= 3e-3
    ulp = 2.0 ** (torch.frexp(o.float().abs().amax()).exponent.item() - 8)
    assert (o.float() - o_alone.float()).abs().max().item() <= 2 * ulp


@torch.inference_mode()
def test_row_27_no_kernel_of_the_captured_step_builds_the_sink():
    """Against a layer whose sink lies where padding has no room, and is copied: the way it was before."""
    counts = {}
    for name in ("copied", "view"):
        layer = make_layer(0, rank=3, size=4, backend=make_backend())
        if name == "copied":
            layer.attn_sink.data = layer.attn_sink.data.clone()
        captured = Captured(layer, make_cache(), [0, 0, 0])
        counts[name] = count_launches(captured.graph)
    print(f"nodes of a padded layer's step: {counts['copied']} with a copied sink, {counts['view']} with the view")
    assert counts["view"] == counts["copied"] - 1


def test_a_step_computes_its_metadata_once():
    """Three calls with the same length tensors, in one step and each on its own."""
    backend = make_backend()
    case = Case(num_tokens=8, num_heads=64, num_keys=(128, 512), page_sizes=(256, 64))
    arguments = make_case(case, 8, kv_format=FP8, device="cuda", dtype=BF16)
    expected = check_reference(backend, arguments)

    def three():
        return [backend.decode(**arguments) for _ in range(3)]

    def in_a_step():
        with backend.step():
            return three()

    three(), in_a_step()
    counts = count_launches(capture(three)), count_launches(capture(in_a_step))
    print(f"launches of three calls: {counts[0]} each on its own, {counts[1]} in one step")
    assert counts[1] <= counts[0] - 2
    for result in in_a_step():
        assert_bit_equal(result, expected)


def test_names():
    assert backends.choose("flashmla", "cuda") == ("flashmla", "asked for")
    assert backends.create("flashmla", device="cuda").supported_num_heads == flashmla.SUPPORT.num_heads
