"""The per-rank attention sink: right rank, never stale, one address. "Row n" is row n of the list of known faults."""

import copy
import math

import pytest
import torch
from torch import nn

from headfit import backends
from headfit.attn_sink import AttnSink, sink_addresses
from headfit.backends.reference import ReferenceBackend
from headfit.config import DeepSeekV4Config
from headfit.distributed import AttnTPGroup
from headfit.head_layout import attn_tp_coordinates, plan_heads
from headfit.models.deepseek_v4 import MQALayer
from headfit.testing.cases import KV_FORMATS, constant_case
from headfit.testing.measure import FLOAT32, assert_close
from headfit.testing.models import hf_config

pytestmark = pytest.mark.usefixtures("nan_empty")

FP8 = KV_FORMATS["fp8"]
NUM_HEADS = 16
CONFIG = DeepSeekV4Config.from_pretrained_config(hf_config([0]))
# Attention-TP rank and size, kernel head counts: the parameter itself, and every kind of view.
LAYOUTS = {"exact": (0, 1, None), "padded": (0, 1, (64,)), "rank3": (3, 8, None), "rank7-padded": (7, 8, (64,))}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def layer(request):
    return make_layer(*request.param)


def make_layer(rank=0, size=1, supported=None, sinks=None):
    """A layer whose sinks are loaded; nothing else of it is used here."""
    group = AttnTPGroup(rank, size, reduce_results=False)
    backend = ReferenceBackend(supported_num_heads=supported)
    layer = MQALayer(CONFIG, layer_id=0, backend=backend, group=group, dtype=torch.float32)
    layer.attn_sink.copy_(torch.randn(NUM_HEADS) if sinks is None else sinks)
    return layer


class Owner(nn.Module):
    """A sink without a layer: any head count, any parameter."""

    def __init__(self, sinks, *, max_kernel_heads=64):
        super().__init__()
        self.sink = AttnSink(self, num_heads=len(sinks), max_kernel_heads=max_kernel_heads)
        if sinks.dtype == torch.float32 and not sinks.is_meta:
            self.attn_sink.data.copy_(sinks)
        else:
            self.attn_sink = nn.Parameter(sinks, requires_grad=False)


def plan(num_heads=NUM_HEADS, rank=0, size=1, supported=None):
    return plan_heads(num_heads=num_heads, attn_tp_size=size, attn_tp_rank=rank, supported=supported)


def constant_output(sinks, num_keys=4):
    """First channel of the reference backend's output, per head, for keys of 1.0 and q = 0: n / (n + e^sink)."""
    o, _ = ReferenceBackend().decode(**constant_case([1.0] * num_keys, sinks, kv_format=FP8))
    assert torch.equal(o[0], o[0, :, :1].expand_as(o[0]))
    return o[0, :, 0]


def local_sinks(layer):
    return layer._attn_sink_local[: layer.head_layout.num_local_heads]


def test_row_05_alternating_kernel_widths_keep_the_address():
    owner = Owner(torch.randn(NUM_HEADS))
    for rank in range(8):
        wide, narrow = (plan(rank=rank, size=8, supported=(width,)) for width in (64, 16))
        views = [owner.sink.local(layout) for layout in (wide, narrow, wide, narrow)]
        assert len({view.data_ptr() for view in views}) == 1
        assert [len(view) for view in views] == [64, 16, 64, 16]
        outputs = [constant_output(view)[: wide.num_local_heads] for view in views]
        assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("backend", ["reference", "unified_kv_triton"])
@pytest.mark.parametrize("supported", [None, (64, 128)], ids=["exact", "padded"])
@pytest.mark.parametrize("rank", range(8))
def test_row_07_each_rank_takes_its_own_sinks(rank, supported, backend):
    owner = Owner(0.05 * torch.arange(128))
    layout = plan(128, rank, 8, supported)
    arguments = constant_case([1.0] * 4, owner.sink.local(layout), kv_format=FP8)
    o, _ = backends.create(backend).decode(**arguments)
    expected = torch.tensor([4 / (4 + math.exp(0.05 * (16 * rank + j))) for j in range(16)])
    assert_close(o[0, :16], expected[:, None].expand(-1, 512), FLOAT32)


def rebind_strided(layer, new):
    layer.attn_sink.data = torch.stack([new, torch.full_like(new, math.nan)], dim=1)[:, 0]


UPDATES = {
    "load_state_dict": lambda layer, new: layer.load_state_dict(layer.state_dict() | {"attn_sink": new}),
    "copy_": lambda layer, new: layer.attn_sink.copy_(new),
    "data.copy_": lambda layer, new: layer.attn_sink.data.copy_(new),
    "detached": lambda layer, new: layer.attn_sink.detach().copy_(new),
    "assign": lambda layer, new: layer.load_state_dict(layer.state_dict() | {"attn_sink": new.clone()}, assign=True),
    "rebind": lambda layer, new: setattr(layer.attn_sink, "data", new.clone()),
    "rebind_strided": rebind_strided,
    "rebind_bfloat16": lambda layer, new: setattr(layer.attn_sink, "data", new.bfloat16()),
    "replace": lambda layer, new: setattr(layer, "attn_sink", nn.Parameter(new.clone(), requires_grad=False)),
    "replace_trainable": lambda layer, new: setattr(layer, "attn_sink", nn.Parameter(new.clone())),
}
IN_PLACE = ("load_state_dict", "copy_", "data.copy_", "detached")


@pytest.mark.parametrize("inference", ["nowhere", "first_call", "update"])
@pytest.mark.parametrize("update", UPDATES)
def test_row_08_update_is_never_stale(layer, update, inference):
    """The held view stands for a captured graph's pointer: new at once, or refused by its changed address."""
    heads, num_local_heads = layer.head_layout.local_slice, layer.head_layout.num_local_heads
    with torch.inference_mode(inference == "first_call"):
        held = layer._attn_sink_local[:num_local_heads]
    for infinity in (0, -math.inf, math.inf):
        address, captured = layer._attn_sink_local.data_ptr(), sink_addresses(layer)
        new = torch.randn(NUM_HEADS).bfloat16().float()
        new[::3] += infinity
        with torch.inference_mode(inference == "update"):
            UPDATES[update](layer, new)
            if update in IN_PLACE:
                assert torch.equal(held, new[heads])
                assert sink_addresses(layer) == captured and layer._attn_sink_local.data_ptr() == address
            else:
                assert sink_addresses(layer) != captured
            assert torch.equal(local_sinks(layer), new[heads])
        assert local_sinks(layer).dtype == torch.float32
        assert torch.equal(local_sinks(layer), new[heads])


@pytest.mark.parametrize("update", IN_PLACE)
def test_row_08_replay_gives_the_new_output(update):
    layer = make_layer(5, 8, (64,), sinks=torch.full((NUM_HEADS,), math.log(4)))
    held = layer._attn_sink_local
    assert_close(constant_output(held)[:2], torch.full((2,), 0.5), FLOAT32)
    UPDATES[update](layer, torch.full((NUM_HEADS,), -math.inf))
    assert_close(constant_output(held)[:2], torch.ones(2), FLOAT32)


def restore_data(layer, old, new):
    backup = layer.attn_sink.data
    layer.attn_sink.data = new
    yield
    layer.attn_sink.data = backup


def restore_parameter(layer, old, new):
    backup = layer.attn_sink
    layer.attn_sink = nn.Parameter(new, requires_grad=False)
    yield
    layer.attn_sink = backup


def restore_state(layer, old, new):
    backup = layer.state_dict()
    layer.load_state_dict(backup | {"attn_sink": new}, assign=True)
    yield
    layer.load_state_dict(backup, assign=True)


@pytest.mark.parametrize("swap", [restore_data, restore_parameter, restore_state])
def test_row_08_swap_and_restore_keeps_both(layer, swap):
    """What averaging and A/B tests do: other weights for a while, then the old tensors again."""
    heads = layer.head_layout.local_slice
    old, new = layer.attn_sink.detach().clone(), torch.randn(NUM_HEADS)
    assert torch.equal(local_sinks(layer), old[heads])
    steps = swap(layer, old, new.clone())
    next(steps)
    assert torch.equal(local_sinks(layer), new[heads])
    assert next(steps, None) is None
    assert torch.equal(local_sinks(layer), old[heads])
    assert torch.equal(layer.attn_sink, old)


def test_row_08_memory_of_the_callers_own_is_followed(layer):
    """A flat weight buffer that a trainer writes: the layer reads it, whatever the padding."""
    flat = torch.randn(100)
    layer.attn_sink.data = flat[10 : 10 + NUM_HEADS]
    heads = layer.head_layout.local_slice
    for _ in range(2):
        assert torch.equal(local_sinks(layer), flat[10 : 10 + NUM_HEADS][heads])
        flat.copy_(torch.randn(100))
    layer.attn_sink.copy_(torch.arange(NUM_HEADS))
    assert torch.equal(flat[10 : 10 + NUM_HEADS], torch.arange(NUM_HEADS).float())


def test_row_08_layers_may_share_a_parameter():
    first, second = make_layer(7, 8, (64,)), make_layer(7, 8, (64,))
    second.attn_sink = first.attn_sink
    for _ in range(2):
        assert torch.equal(local_sinks(first), first.attn_sink[14:16])
        assert torch.equal(local_sinks(second), first.attn_sink[14:16])
        first.attn_sink.copy_(torch.randn(NUM_HEADS))


@pytest.mark.parametrize("cast", ["double", "half", "bfloat16"])
def test_row_08_cast_of_the_module_does_not_round_the_sinks(layer, cast):
    expected = layer.attn_sink.detach().clone()
    getattr(layer, cast)()
    assert layer.attn_sink.dtype == torch.float32 and torch.equal(layer.attn_sink, expected)
    view = layer._attn_sink_local
    assert view.dtype == torch.float32 and torch.equal(local_sinks(layer), expected[layer.head_layout.local_slice])
    layer.attn_sink.copy_(expected + 1)
    assert torch.equal(view[: len(local_sinks(layer))], (expected + 1)[layer.head_layout.local_slice])


@pytest.mark.parametrize("called_before", [False, True])
def test_row_08_deepcopy_is_independent(layer, called_before):
    before = layer.attn_sink.detach().clone()
    if called_before:
        assert local_sinks(layer) is not None
    twin = copy.deepcopy(layer)
    new, heads = torch.randn(NUM_HEADS), layer.head_layout.local_slice
    twin.attn_sink.copy_(new)
    assert torch.equal(local_sinks(twin), new[heads]) and torch.equal(local_sinks(layer), before[heads])
    assert twin._attn_sink_local.data_ptr() != layer._attn_sink_local.data_ptr()
    layer.attn_sink.copy_(2 * before)
    assert torch.equal(local_sinks(twin), new[heads]) and torch.equal(local_sinks(layer), 2 * before[heads])


def test_row_08_layer_built_under_inference_mode():
    with torch.inference_mode():
        layer = make_layer(3, 8, (64,))
        expected = layer.attn_sink[6:8].clone()
        assert torch.equal(local_sinks(layer), expected)
    layer.attn_sink.data.copy_(torch.arange(NUM_HEADS))
    assert torch.equal(local_sinks(layer), torch.tensor([6.0, 7.0]))


def test_row_08_data_rebound_to_a_view_of_itself_is_never_stale(layer):
    """Same first address, other elements: every head takes head 0's sink."""
    assert local_sinks(layer) is not None
    layer.attn_sink.data = layer.attn_sink.data[:1].expand(NUM_HEADS)
    new = layer.attn_sink.detach().clone()
    assert torch.equal(local_sinks(layer), new[layer.head_layout.local_slice])


def test_row_08_data_shortened_in_place_is_refused(layer):
    assert local_sinks(layer) is not None
    layer.attn_sink.data = layer.attn_sink.data[:8]
    with pytest.raises(ValueError, match=r"attn_sink: shape \(8,\), allowed: \(16,\)"):
        local_sinks(layer)


def test_row_08_change_of_rank_and_size_is_seen(layer):
    assert local_sinks(layer) is not None
    for rank, size in ((1, 2), (6, 8), (0, 1)):
        layer.head_layout = plan(rank=rank, size=size)
        assert torch.equal(local_sinks(layer), layer.attn_sink[layer.head_layout.local_slice])


def test_row_09_every_owner_is_refreshed_draft_layers_too():
    model = nn.Module()
    model.other = nn.Linear(2, 2)
    model.other.sink = "not a sink of ours"
    model.layers = nn.ModuleList([make_layer(3, 8, (64,))])
    model.draft = nn.ModuleDict({"attn": make_layer(3, 8)})
    layers = [model.layers[0], model.draft["attn"]]
    held, captured = [layer._attn_sink_local for layer in layers], sink_addresses(model)
    names = ("layers.0.attn_sink", "draft.attn.attn_sink")
    new = {name: torch.randn(NUM_HEADS) for name in names}
    model.load_state_dict(model.state_dict() | new)
    for view, sinks in zip(held, new.values(), strict=True):
        assert torch.equal(view[:2], sinks[6:8])
    assert len(captured) == 2 and sink_addresses(model) == captured
    model.load_state_dict(model.state_dict() | {names[1]: torch.zeros(NUM_HEADS)}, assign=True)
    assert [a == b for a, b in zip(sink_addresses(model), captured, strict=True)] == [True, False]


def test_row_10_full_float32_sinks_into_rank_5_of_8():
    full = torch.randn(128)
    owner = Owner(full.clone(), max_kernel_heads=64)
    view = owner.sink.local(plan(128, 5, 8, (64,)))
    assert view.shape == (64,) and view.dtype == torch.float32 and view.is_contiguous()
    assert torch.equal(view[:16], full[80:96])
    last = owner.sink.local(plan(128, 7, 8, (64,)))
    assert torch.equal(last[:16], full[112:]) and not last[16:].any()
    assert view.isfinite().all()


@pytest.mark.parametrize("behind", [math.nan, math.inf, -math.inf, 0.0, 300.0])
@pytest.mark.parametrize("rank", [0, 5, 7])
def test_row_10_what_follows_the_local_sinks_changes_no_bit(rank, behind):
    view = Owner(torch.randn(128)).sink.local(plan(128, rank, 8, (64,)))
    arguments = constant_case([1.0, 2.0, -3.0, 0.5], view, kv_format=FP8) | {"q": torch.randn(1, 64, 512)}
    other = torch.cat([view[:16], torch.full((48,), behind)])
    o, lse = ReferenceBackend().decode(**arguments)
    other_o, other_lse = ReferenceBackend().decode(**arguments | {"attn_sink": other})
    assert o[:, :16].isfinite().all() and torch.equal(o[:, :16], other_o[:, :16])
    assert torch.equal(lse[:, :16], other_lse[:, :16])


def test_row_11_distinct_float32_sinks_reach_their_heads():
    full = torch.linspace(-3, 3, 128)
    for rank in range(8):
        view = Owner(full.clone()).sink.local(plan(128, rank, 8))
        expected = 4 / (4 + full[16 * rank : 16 * rank + 16].exp())
        assert_close(constant_output(view), expected, FLOAT32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_row_11_narrow_sinks_are_widened(dtype):
    full = torch.linspace(-3, 3, 128).to(dtype)
    owner = Owner(full.clone())
    view = owner.sink.local(plan(128, 5, 8, (64,)))
    assert view.dtype == torch.float32 and torch.equal(view[:16], full[80:96].float())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool])
def test_row_11_integer_sinks_are_refused(dtype):
    owner = Owner(torch.zeros(16, dtype=dtype))
    with pytest.raises(TypeError, match="attn_sink: dtype"):
        owner.sink.local(plan())


def test_row_11_sinks_without_values_are_refused():
    owner = Owner(torch.empty(16, device="meta"))
    with pytest.raises(RuntimeError, match="attn_sink: on the meta device"):
        owner.sink.local(plan())


def test_row_11_a_layer_made_on_the_meta_device_is_filled_later():
    group, backend = AttnTPGroup(7, 8, reduce_results=False), ReferenceBackend(supported_num_heads=(64,))
    layer = MQALayer(CONFIG, layer_id=0, backend=backend, group=group, device="meta").to_empty(device="cpu")
    layer.attn_sink.fill_(0.5)
    assert torch.equal(layer._attn_sink_local, torch.tensor([0.5] * 2 + [0.0] * 62))
    assert torch.equal(layer.rotary.inv_freq, make_layer().rotary.inv_freq)


@pytest.mark.parametrize("shape", [(15,), (1, 16), ()])
def test_row_11_sinks_of_another_shape_are_refused(shape):
    owner = Owner(torch.zeros(16))
    owner.attn_sink = nn.Parameter(torch.zeros(shape), requires_grad=False)
    with pytest.raises(ValueError, match=r"attn_sink: shape .*allowed: \(16,\)"):
        owner.sink.local(plan())


@pytest.mark.parametrize("layout", [plan(32), plan(supported=(128,))], ids=["other_heads", "too_wide"])
def test_layout_that_does_not_fit_is_refused(layout):
    with pytest.raises(ValueError, match="does not fit a sink of 16 heads"):
        Owner(torch.zeros(16)).sink.local(layout)


def test_parameter_itself_where_the_rank_owns_all_heads():
    layer = make_layer()
    assert layer._attn_sink_local is layer.attn_sink


def test_row_13_data_parallel_attention_uses_the_attention_rank():
    rank, size = attn_tp_coordinates(global_rank=5, world_size=8, dp_size=2)
    assert (rank, size) == (1, 4)
    layout = plan(64, rank, size)
    assert layout.local_slice == slice(16, 32)
    assert torch.equal(Owner(torch.arange(64.0)).sink.local(layout), torch.arange(16.0, 32.0))
