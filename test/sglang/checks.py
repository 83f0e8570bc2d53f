"""What must hold in a worker process whose plugin was loaded through SGLang's own entry point; one function a fact.

Run by `worker.py` within each SGLang version; the functions of `CHECKS[scenario]` get the version.
"""

import importlib
import logging
import os
import types

import flash_mla_stand_in
import layers
import pytest
import server_checks
import torch
from decode import Mode, Step

from headfit.testing.cases import reference_float64
from headfit.testing.measure import BF16_OUTPUT, assert_close

WITH_DRAFT = ("0.5.16", "0.5.23")
SHAPES = {"0.5.13.post1": "all_heads", "0.5.16": "cached", "0.5.23": "method"}


def plugin():
    from headfit.hosts.sglang import plugin

    return plugin._plugin


def forward_sink(layer) -> torch.Tensor:
    """The sink that the layer's forward hands to the server's attention backend."""
    step, seen = Step(num_tokens=1, compress_ratio=0, seed=0), []
    call = step.call_backend
    step.call_backend = lambda **kwargs: (seen.append(kwargs["attn_sink"]), call(**kwargs))[1]
    step.run(layer, step.queries(layer.n_local_heads))
    return seen[0]


def expected(step: Step, layer, q: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    return reference_float64(
        q=q, window=step.window, compressed=step.compressed, attn_sink=sink, softmax_scale=512**-0.5
    )[0]


def every_hook_is_applied(version):
    from sglang.srt.plugins.hook_registry import HookRegistry

    status = plugin().status()
    assert status["active"] and status["shape"] == SHAPES[version] and status["sglang"].startswith(version)
    assert set(plugin()._hooks) <= HookRegistry._patched
    hooked = " ".join(plugin()._hooks)
    for name in ("MQALayer.forward", "load_weights", "update_weights_from_tensor", "update_weights_from_disk"):
        assert name in hooked, name
    assert "_from_distributed" in hooked and "ModelRunner.load_model" in hooked
    assert ("DSparkAttention.forward" in hooked) == (version in WITH_DRAFT)
    assert len(plugin().code.seams) == 1


def head_counts_for_tp_1_to_16(version):
    for num_heads in (64, 128):
        for size in (1, 2, 4, 8, 16):
            for rank in {0, size // 2, size - 1}:
                layer = layers.build(num_heads, rank, size)
                layout = plugin().sinks.layout(layer)
                assert layout.num_local_heads == layer.n_local_heads == num_heads // size
                assert layout.kernel_num_heads == (64 if num_heads // size <= 64 else 128)
                assert layout.local_slice.start == rank * num_heads // size
    assert plugin().active


def sink_slice_of_ranks_0_3_7(version):
    """Row 7: sink[i] = 0.05 i; a window of four keys of 1.0 gives 4 / (4 + e^sink) in every channel."""
    sinks = 0.05 * torch.arange(128)
    for rank in (0, 3, 7):
        layer = layers.build(128, rank, 8)
        layer.attn_sink.data.copy_(sinks)
        local = sinks[16 * rank : 16 * (rank + 1)]
        given = forward_sink(layer)
        assert given.shape == (64,) and torch.equal(given[:16], local)
        step = constant_step()
        out = step.run(layer, torch.zeros(1, 16, 512, dtype=torch.bfloat16))
        assert_close(out, (4 / (4 + local.exp()))[None, :, None].expand(1, 16, 512), BF16_OUTPUT)


def constant_step() -> Step:
    step = Step(num_tokens=1, compress_ratio=0, seed=0)
    slots = 256 + torch.arange(4)
    step.window.pool.store(slots, torch.ones(4, 512))
    step.window.indices[0, :4] = slots
    step.window.lengths.fill_(4)
    return step


def dp_attention_takes_the_attention_tp_rank(version):
    """Row 13: of 8 ranks with DP 2, global rank 5 is attention-TP rank 1 of 4 and owns heads 16..31 of 64."""
    layers.set_parallel(1, 4)
    layers._PARALLEL.tp_rank, layers._PARALLEL.tp_size = 5, 8
    layer = layers.module().MQALayer(layers._config(64), 0)
    layer.attn_sink.data.copy_(torch.arange(64.0))
    assert torch.equal(forward_sink(layer)[:16], torch.arange(16.0, 32.0))


def a_write_into_the_parameter_shows_in_place(version):
    """Row 8: whatever writes the parameter, the address that a captured graph holds shows the new values."""
    layer = layers.build(128, 3, 8)
    layer.attn_sink.data.zero_()
    view = plugin().sinks.local(layer)
    address = view.data_ptr()
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    ways = {
        "default_weight_loader": lambda new: default_weight_loader(layer.attn_sink, new),
        "load_state_dict": lambda new: layer.load_state_dict({"attn_sink": new}, strict=False),
        "data.copy_": lambda new: layer.attn_sink.data.copy_(new),
        "direct update": lambda new: update_from_tensor({"attn": layer}, {"attn.attn_sink": new}),
    }
    for number, (name, write) in enumerate(ways.items()):
        new = torch.randn(128, generator=torch.Generator().manual_seed(number))
        write(new)
        assert torch.equal(view[:16], new[48:64]), name
        given = forward_sink(layer)
        assert torch.equal(given[:16], new[48:64]) and given.data_ptr() == address, name


def a_rebound_parameter_comes_home_with_the_update(version):
    """Rows 8 and 9: every layer, the draft's too, whichever of them the update names."""
    built = {"target": layers.build(128, 5, 8), "nextn": layers.build(128, 5, 8, layer_id=3)}
    if version in WITH_DRAFT:
        built["dspark"] = layers.build(128, 5, 8, draft=True)
    views = {name: plugin().sinks.local(layer) for name, layer in built.items()}
    news = {name: torch.randn(128, generator=torch.Generator().manual_seed(ord(name[0]))) for name in built}
    for name, layer in built.items():
        layer.attn_sink.data = news[name].clone()
    update_from_tensor({"other": torch.nn.Linear(2, 2)}, {"other.bias": torch.ones(2)})
    for name, layer in built.items():
        assert torch.equal(views[name][:16], news[name][80:96]), name
        assert layer.attn_sink.data_ptr() == layer._headfit_sink_home.data_ptr()
        layer.attn_sink.data.fill_(7.0)
        assert (views[name][:16] == 7).all(), name
    names = dict(built["target"].named_parameters())
    assert names["attn_sink"].shape == (128,) and not [n for n in built["target"].state_dict() if "headfit" in n]


def update_from_tensor(modules: dict, tensors: dict) -> None:
    """The server's own update function, the hooked one."""
    model = torch.nn.ModuleDict(modules)
    try:
        owner = importlib.import_module("sglang.srt.model_executor.model_runner_components.weight_updater")
        update = owner.WeightUpdater.update_weights_from_tensor
    except ModuleNotFoundError:
        owner = importlib.import_module("sglang.srt.model_executor.model_runner")
        update = owner.ModelRunner.update_weights_from_tensor
    owner.monkey_patch_torch_reductions = lambda: None
    owner.get_parallel = lambda: types.SimpleNamespace(tp_rank=0)
    runner = types.SimpleNamespace(
        model=model,
        get_model=lambda: model,
        device="cpu",
        tp_rank=0,
        _assert_weight_cache_inactive=lambda name: None,
    )
    done, message = update(runner, list(tensors.items()), load_format="direct")
    assert done, message


def decode_is_answered_for_the_ranks_own_heads(version):
    """Through the real forwards of layer and backend, with all three cache forms; padded query rows are poison."""
    for ratio in (0, 4, 128):
        for num_heads, size, rank in ((64, 8, 7), (128, 8, 3), (128, 4, 2), (64, 1, 0)):
            layer = layers.build(num_heads, rank, size)
            layer.attn_sink.data.normal_()
            step = Step(num_tokens=3, compress_ratio=ratio, seed=ratio + rank)
            q = step.queries(layer.n_local_heads)
            before, seen = plugin().status()["served"], len(flash_mla_stand_in.calls)
            out = step.run(layer, q)
            local = layer.attn_sink[rank * layer.n_local_heads :][: layer.n_local_heads]
            assert_close(out, expected(step, layer, q, local), BF16_OUTPUT, f"ratio {ratio}, TP {size}")
            assert plugin().status()["served"] == before + 1
            assert len(flash_mla_stand_in.calls) == seen, "the server's own kernel ran too"
    assert not plugin().status()["passed_on"]


def a_draft_layer_is_answered_too(version):
    layer = layers.build(128, 6, 8, draft=True)
    layer.attn_sink.data.normal_()
    step = Step(num_tokens=5, compress_ratio=0, seed=1)
    q = step.queries(16)
    before = plugin().status()
    out = step.run(layer, q)
    assert_close(out, expected(step, layer, q, layer.attn_sink[96:112]), BF16_OUTPUT)
    after = plugin().status()
    assert after["served"] == before["served"] + 1 and after["served_layers"] == before["served_layers"] + 1


def decode_tp_switching_gets_its_own_slice(version):
    """A layer built for TP 1 whose server narrows it for decode, as `maybe_use_decode_attn_tp` does."""
    layer = layers.build(128, 0, 1)
    layer.attn_sink.data.copy_(torch.arange(128.0))
    assert torch.equal(forward_sink(layer), layer.attn_sink)
    layer.n_local_heads, layer.attn_tp_rank, layer.attn_tp_size = 32, 2, 4
    assert torch.equal(forward_sink(layer)[:32], torch.arange(64.0, 96.0))
    step = Step(num_tokens=2, compress_ratio=4, seed=2)
    q = step.queries(32)
    assert_close(step.run(layer, q), expected(step, layer, q, torch.arange(64.0, 96.0)), BF16_OUTPUT)
    layer.n_local_heads, layer.attn_tp_rank, layer.attn_tp_size = 128, 0, 1
    assert forward_sink(layer).shape == (128,)


def a_call_outside_our_layers_goes_through(version):
    step = Step(num_tokens=2, compress_ratio=0, seed=3)
    q = step.queries(64)
    seen = len(flash_mla_stand_in.calls)
    out = step.call_backend(
        q=q,
        k=q,
        v=q,
        layer=types.SimpleNamespace(layer_id=0, tp_q_head_num=64, v_head_dim=512),
        attn_sink=torch.zeros(64),
        forward_batch=types.SimpleNamespace(forward_mode=Mode()),
        compress_ratio=0,
        save_kv_cache=False,
    )
    assert len(flash_mla_stand_in.calls) == seen + 1
    assert_close(out, expected(step, None, q, torch.zeros(64)), BF16_OUTPUT)


def the_worker_says_what_runs_once(version):
    """After the checks before: one line, with version, heads, kernel and the reason."""
    lines = [record for record in RECORDS if "decode kernel" in record]
    assert len(lines) == 1, lines
    assert f"SGLang {version}" in lines[0] and "reference (asked for" in lines[0] and "TP rank" in lines[0]
    assert [line for line in RECORDS if "answered 1 decode calls" in line]


def stock_stays_stock(version):
    """No layer is touched and no call answered."""
    from headfit.hosts.sglang import status

    assert status().get("active") is False
    layer = layers.build(128, 3, 8)
    layer.attn_sink.data.normal_()
    assert not hasattr(layer, "_headfit_sink_home")
    step = Step(num_tokens=2, compress_ratio=4, seed=4)
    q = step.queries(16)
    seen = len(flash_mla_stand_in.calls)
    assert_close(step.run(layer, q), expected(step, layer, q, layer.attn_sink[48:64]), BF16_OUTPUT)
    assert len(flash_mla_stand_in.calls) == seen + 1


def stock_keeps_the_old_sink(version):
    """The fault that the plugin mends: a copy made in the first forward, which later weights do not reach."""
    layer = layers.build(128, 3, 8)
    layer.attn_sink.data.fill_(1.0)
    assert (forward_sink(layer)[:16] == 1).all()
    layer.attn_sink.data.fill_(2.0)
    assert (forward_sink(layer)[:16] == 1).all()


def nothing_is_hooked(version):
    from sglang.srt.plugins.hook_registry import HookRegistry

    assert not HookRegistry._patched and not HookRegistry._hooks
    assert not [line for line in RECORDS if "stands down" in line]


def one_warning_says_why(version):
    lines = [line for line in RECORDS if "stands down" in line]
    assert len(lines) == 1 and f"SGLang {version} runs as stock" in lines[0], lines
    assert "takes no positions" in lines[0] or "did not apply" in lines[0]


def the_servers_kernel_gets_64_heads_and_the_ranks_sink(version):
    """`flashmla`, or `auto` where no kernel of ours runs: FlashMLA, padded to 64, with a live sink, in all versions."""
    layer = layers.build(128, 3, 8)
    layer.attn_sink.data.normal_()
    step = Step(num_tokens=2, compress_ratio=128, seed=5)
    q = step.queries(16)
    for _ in range(2):
        out = step.run(layer, q)
        assert flash_mla_stand_in.calls[-1]["q"].shape == (2, 1, 64, 512)
        assert_close(out, expected(step, layer, q, layer.attn_sink[48:64]), BF16_OUTPUT)
        layer.attn_sink.data.normal_()
    reason = "auto: backend sparse_mqa_cuda: needs a CUDA GPU"
    if plugin().settings.backend == "flashmla":
        reason = "HEADFIT_BACKEND=flashmla"
    assert plugin().status()["served"] == 0 and f"the server's own ({reason}" in plugin().status()["kernel"]
    assert (layer.n_heads, layer.attn_sink.shape) == (128, (128,))


def checked_calls_name_a_wrong_result(version):
    """`HEADFIT_CHECK=1`: right results pass, and a neighbour rank's sink does not."""
    layer = layers.build(128, 3, 8)
    layer.attn_sink.data.copy_(torch.arange(128) % 32 - 16.0)
    step = Step(num_tokens=2, compress_ratio=4, seed=6)
    q = step.queries(16)
    step.run(layer, q)
    seam = plugin().seam
    decode = seam.backend.decode
    seam.backend.decode = lambda *, attn_sink, **kwargs: decode(attn_sink=attn_sink.flip(0), **kwargs)
    with pytest.raises(RuntimeError, match="HEADFIT_CHECK: layer 0, token"):
        step.run(layer, q)


def checked_calls_know_the_ranks_own_sinks(version):
    """Row 7 under `HEADFIT_CHECK=1`: rank 0's sinks on rank 3."""
    layer = layers.build(128, 3, 8)
    layer.attn_sink.data.normal_(4.0, 2.0)
    sinks, step = plugin().sinks, Step(num_tokens=2, compress_ratio=4, seed=6)
    local = sinks.local

    def of_rank_0(layer, *args):
        attribute, rank = sinks._rank_attribute, 3
        setattr(layer, attribute, 0)
        try:
            return local(layer, *args)
        finally:
            setattr(layer, attribute, rank)

    sinks.local = of_rank_0
    sinks.refresh(layer)  # where the server keeps a view of its own
    try:
        with pytest.raises(RuntimeError, match="HEADFIT_CHECK: layer 0, token"):
            step.run(layer, step.queries(16))
    finally:
        sinks.local = local


def a_worker_ends_rather_than_serve_as_stock(version):
    """SGLang logs a plugin's exception and goes on; this one it does not catch."""
    (end,) = ENDS
    wanted = "HEADFIT_BACKEND: 'sparse_mqa', allowed: auto"
    if os.environ["HEADFIT_BACKEND"] == "sparse_mqa_cuda":
        wanted = (
            f"HEADFIT_BACKEND=sparse_mqa_cuda cannot be had in SGLang {version}: MQALayer.forward takes no positions"
        )
    assert end.startswith(f"headfit: {wanted}"), end


RECORDS: list[str] = []
ENDS: list[str] = []  # what workers said that ended while they loaded the plugins


class Recorder(logging.Handler):
    def emit(self, record):
        RECORDS.append(record.getMessage())


_MAIN = (
    every_hook_is_applied,
    head_counts_for_tp_1_to_16,
    sink_slice_of_ranks_0_3_7,
    dp_attention_takes_the_attention_tp_rank,
    a_write_into_the_parameter_shows_in_place,
    a_rebound_parameter_comes_home_with_the_update,
    decode_is_answered_for_the_ranks_own_heads,
    a_call_outside_our_layers_goes_through,
    the_worker_says_what_runs_once,
)
# Environment of a scenario, and what must hold in it; a scenario is one worker process.
SCENARIOS = {
    "main": ({"HEADFIT_BACKEND": "reference"}, _MAIN),
    "draft": ({"HEADFIT_BACKEND": "reference"}, (a_draft_layer_is_answered_too,)),
    "switching": ({"HEADFIT_BACKEND": "reference"}, (decode_tp_switching_gets_its_own_slice,)),
    "auto_without_gpu": ({}, (the_servers_kernel_gets_64_heads_and_the_ranks_sink,)),
    "flashmla": ({"HEADFIT_BACKEND": "flashmla"}, (the_servers_kernel_gets_64_heads_and_the_ranks_sink,)),
    "check": (
        {"HEADFIT_BACKEND": "reference", "HEADFIT_CHECK": "1"},
        (checked_calls_name_a_wrong_result, checked_calls_know_the_ranks_own_sinks),
    ),
    "off": ({"HEADFIT_BACKEND": "off"}, (nothing_is_hooked, stock_stays_stock)),
    "stale": ({"HEADFIT_BACKEND": "off"}, (stock_keeps_the_old_sink,)),
    "another_plugin_only": ({"SGLANG_PLUGINS": "another"}, (nothing_is_hooked, stock_stays_stock)),
    "changed_signature": ({}, (one_warning_says_why, stock_stays_stock)),
    "misspelt": ({"HEADFIT_BACKEND": "sparse_mqa"}, (a_worker_ends_rather_than_serve_as_stock,)),
    "by_name_changed_signature": (
        {"HEADFIT_BACKEND": "sparse_mqa_cuda"},
        (a_worker_ends_rather_than_serve_as_stock,),
    ),
    "failed_hook": ({}, (one_warning_says_why, stock_stays_stock)),
    **server_checks.SCENARIOS,
}
ONLY_IN = {"draft": WITH_DRAFT, "switching": ("0.5.23",), "stale": ("0.5.16", "0.5.23")}
