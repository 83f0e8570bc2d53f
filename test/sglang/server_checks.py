"""`test/gpu/sglang_server_plugin.py` on stock SGLang classes: its hooks, what they count, force, plant and measure.

The functions run as those of `checks`; each of these scenarios loads the plugin beside headfit's, by an entry point.
"""

import dataclasses
import importlib
import json
import os
import sys
import tempfile
import types
from pathlib import Path

import flash_mla_stand_in
import layers
import torch
from decode import Step

from headfit.testing.cases import reference_float64
from headfit.testing.measure import BF16_OUTPUT, assert_close, relative_norm

GPU = Path(__file__).parents[1] / "gpu"
VARIABLE = "HEADFIT_SERVER_CHECK"


def install() -> None:
    """Before SGLang loads its plugins: the entry point on the path, and a folder for what the worker writes."""
    folder = Path(tempfile.mkdtemp(prefix="headfit-server-check-"))
    info = folder / "headfit_server_check-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headfit-server-check\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\ncheck = sglang_server_plugin:register\nlone = lone_rank:register\n"
    )
    sys.path[:0] = [str(folder), str(GPU), str(GPU.parents[1] / "benchmark")]
    os.environ[VARIABLE] = json.dumps({"folder": str(folder)} | json.loads(os.environ[VARIABLE]))


def worker():
    """The plugin's object of this process, ready as after a model's load."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    (hook,) = [
        hook
        for name, hooks in HookRegistry._hooks.items()
        if name.endswith("MQALayer.forward")
        for _, hook, _ in hooks
        if hook.__name__ == "around_forward"
    ]
    found = hook.__self__
    if found._counts is None:
        found.around_load(lambda: None)
    return found


def decode(layer, step: Step, q: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the hooked layer gives, float64 with `sink`)"""
    out = step.run(layer, q)
    wanted = reference_float64(
        q=q, window=step.window, compressed=step.compressed, attn_sink=sink, softmax_scale=512**-0.5
    )[0]
    return out, wanted


def built(size: int = 8, rank: int = 3, ratio: int = 4, seed: int = 7):
    layer = layers.build(128, rank, size)
    layer.attn_sink.data.copy_(4 + 2 * torch.randn(128, generator=torch.Generator().manual_seed(seed)))
    step = Step(num_tokens=3, compress_ratio=ratio, seed=seed)
    return layer, step, step.queries(layer.n_local_heads)


def calls_are_counted_with_and_without_our_kernel(version):
    """headfit's hooks are within the plugin's, whichever was loaded first: the server's kernel is not reached."""
    found = worker()
    layer, step, q = built()
    out, wanted = decode(layer, step, q, layer.attn_sink[48:64])
    assert_close(out, wanted, BF16_OUTPUT)
    ours = os.environ["HEADFIT_BACKEND"] != "off"
    assert found._counts[:, 0].tolist() == [1, 0 if ours else 1]
    assert not found._counts[:, 1:].any()
    found.write()
    seen = json.loads(Path(found.wishes.folder, f"worker-{os.getpid()}.json").read_text())
    assert seen["decode_calls"][0] == 1 and seen["plugin"]["active"] == ours and seen["rows"] == []


def decode_calls_are_held_against_float64(version):
    """Ours and the server's kernel on the same arguments; a neighbour's sinks are far off; nothing of it is counted."""
    found = worker()
    for ratio in (0, 4, 128):
        layer, step, q = built(ratio=ratio)
        found._calls.clear()
        out, wanted = decode(layer, step, q, layer.attn_sink[48:64])
        row = found.rows[-1]
        assert (row["layer"], row["compress_ratio"], row["batch"], row["step"]) == (0, ratio, 3, 0)
        assert row["ours"] == relative_norm(out[:4], wanted[:4])
        assert row["ours"] < BF16_OUTPUT.relative and row["stock"] < BF16_OUTPUT.relative < 0.02 < row["fault"], row
        assert row["refused"] is True
        decode(layer, step, q, layer.attn_sink[48:64])  # the next step is not due
        assert found.rows[-1] is row and len(row["num_keys"]) == 1 + (ratio > 0)
    assert found._counts[:, 0].tolist() == [6, 0]


def every_token_of_a_batch_has_its_turn(version):
    """At most 4 of a call, and each of 8 within two checked calls."""
    import sglang_server_plugin as plugin

    worker()
    seen = []
    reference = plugin.reference_float64

    def listening(*, q, **rest):
        seen.append(q)
        return reference(q=q, **rest)

    plugin.reference_float64 = listening
    layer = layers.build(128, 3, 8)
    step = Step(num_tokens=8, compress_ratio=4, seed=7)
    q = step.queries(layer.n_local_heads)
    for _ in range(4):
        step.run(layer, q)
    plugin.reference_float64 = reference
    assert [len(one) for one in seen] == [4, 4] and len(torch.cat(seen).unique(dim=0)) == 8


def padding_is_not_held_against_float64(version):
    """With DP attention an idle rank runs nothing but padding, and others some behind their requests' tokens."""
    from decode import Mode
    from sglang_server_plugin import num_real_tokens

    found = worker()
    layer, step, q = built()
    Mode.is_idle = lambda self: True
    step.run(layer, q)
    assert found.rows == [] and found._counts[:, 0].tolist() == [1, 0]
    del Mode.is_idle
    step.run(layer, q)
    assert [row["step"] for row in found.rows] == [0]
    batch = types.SimpleNamespace(forward_mode=Mode(), _original_batch_size=2)
    assert (num_real_tokens(batch, 3), num_real_tokens(batch, 1), num_real_tokens(None, 3)) == (2, 1, 3)
    batches = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardBatch
    padding = batches.prepare_mlp_sync_batch.__code__
    assert "_original_batch_size" in (*padding.co_names, *padding.co_consts)
    batch._original_batch_size = None
    assert num_real_tokens(batch, 3) == 3


def a_nan_of_the_reference_is_a_row(version):
    """Not an exception in the middle of a server's step."""
    found = worker()
    layer, step, q = built()
    q[1] = float("nan")
    step.run(layer, q)
    assert all(found.rows[0][name] != found.rows[0][name] for name in ("ours", "stock", "fault"))


def a_neighbours_sinks_are_planted(version):
    """Those of the next rank, in a circle; of a layer that owns all heads the other half's."""
    worker()
    for size, rank, wrong in ((8, 3, slice(64, 80)), (8, 7, slice(0, 16))):
        layer, step, q = built(size, rank)
        assert_close(*decode(layer, step, q, layer.attn_sink[wrong]), BF16_OUTPUT)
    layer, step, q = built(1, 0)
    assert_close(*decode(layer, step, q, layer.attn_sink.roll(-64)), BF16_OUTPUT)


def the_servers_kernel_gets_128_heads(version):
    worker()
    for ratio in (0, 128):
        layer, step, q = built(ratio=ratio)
        assert_close(*decode(layer, step, q, layer.attn_sink[48:64]), BF16_OUTPUT)
        call = flash_mla_stand_in.calls[-1]
        assert call["q"].shape == (3, 1, 128, 512) and call["attn_sink"].shape == (128,)


def tokens_are_forced_by_position(version):
    """Through the server's sampler; the log-probabilities are the model's own."""
    found = worker()
    module = importlib.import_module("sglang.srt.layers.sampler")
    module.get_global_server_args = module.get_server_args = lambda: types.SimpleNamespace(sampling_backend="pytorch")
    written = []
    logprobs = types.SimpleNamespace(
        compute_logprobs=lambda values, *rest: types.SimpleNamespace(write_output_to=lambda _: written.append(values))
    )
    sampler = types.SimpleNamespace(
        _preprocess_logits=lambda logits, info: logits,
        _sync_token_ids_across_tp=lambda *args: None,
        output_logprob_processor=logprobs,
        _attach_logprobs_to_output=lambda output, values, *rest: written.append(values),
        use_log_softmax_logprob=False,
        rl_on_policy_target=None,
    )
    logits = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    info = _Absent(is_all_greedy=True)
    positions = torch.tensor([5, 6, 1000])
    output = types.SimpleNamespace(next_token_logits=logits.clone())
    got = module.Sampler.forward(sampler, output, info, True, [0] * 3, [None] * 3, positions)
    assert torch.equal(got.long(), found._tokens[positions]) and got.shape == (3,)
    assert torch.equal(written[0], logits.log_softmax(-1)) and found._samples == 1


class _Absent(types.SimpleNamespace):
    """Whatever was not given is None."""

    def __getattr__(self, name):
        return None


def weights_are_made_where_the_loader_makes_dummy_ones(version):
    worker()
    loader = importlib.import_module("sglang.srt.model_loader.loader")
    layer = torch.nn.Module()
    layer.attn_sink = torch.nn.Parameter(torch.zeros(128))
    layer._attn_sink_local = layer.attn_sink
    layer.norm = torch.nn.LayerNorm(8)
    layer.wq_a = torch.nn.Linear(256, 64)
    network = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Module(), layer])})
    loader.initialize_dummy_weights(network)
    import sglang_server_model as model

    assert torch.equal(layer.attn_sink.detach(), model.sink_values(1, 128, seed=0))
    assert (layer.norm.weight == 1).all() and (layer.wq_a.bias == 0).all()
    assert abs(layer.wq_a.weight.std().item() * 16 - 1) < 0.05


def a_lone_ranks_layer_is_that_ranks(version):
    """Its heads and its run of the sinks, where the constructor takes a rank; with the server's TP at 1."""
    import checks

    if version != "0.5.16":
        assert "layers take no attention-TP rank" in checks.ENDS[-1]
        return
    worker()
    layer, step, q = built(1, 0)
    assert (layer.tp_rank, layer.tp_size, layer.n_local_heads, layer.n_heads) == (3, 8, 16, 128)
    assert_close(*decode(layer, step, q, layer.attn_sink[48:64]), BF16_OUTPUT)


def the_wishes_survive_the_environment(version):
    from sglang_server_plugin import Wishes

    fields = dataclasses.fields(Wishes)
    wishes = Wishes(**{field.name: {str: "x", int: 3, bool: True}[field.type] for field in fields})
    assert all(getattr(wishes, field.name) != field.default for field in fields)
    os.environ |= wishes.as_environment()
    assert Wishes.from_environment() == wishes


def _scenario(backend: str, *functions, **wishes):
    check = str(int("check_every" in wishes))
    return {"HEADFIT_BACKEND": backend, "HEADFIT_CHECK": check, VARIABLE: json.dumps(wishes)}, functions


def _lone_rank(backend: str):
    environment, functions = _scenario(backend, a_lone_ranks_layer_is_that_ranks)
    return environment | {"HEADFIT_LONE_RANK": "3/8"}, functions


SCENARIOS = {
    "server_plugin": _scenario(
        "reference",
        calls_are_counted_with_and_without_our_kernel,
        tokens_are_forced_by_position,
        weights_are_made_where_the_loader_makes_dummy_ones,
        the_wishes_survive_the_environment,
    ),
    "server_stock": _scenario("off", calls_are_counted_with_and_without_our_kernel),
    "server_padded": _scenario("off", the_servers_kernel_gets_128_heads, pad_to=128),
    "server_fault": _scenario("reference", a_neighbours_sinks_are_planted, neighbour_sinks=True),
    "server_lone_rank": _lone_rank("reference"),
    "server_lone_rank_stock": _lone_rank("off"),
    "server_eager": _scenario("reference", decode_calls_are_held_against_float64, check_every=2),
    "server_eager_rows": _scenario("reference", every_token_of_a_batch_has_its_turn, check_every=2),
    "server_eager_padding": _scenario("reference", padding_is_not_held_against_float64, check_every=2),
    "server_eager_nan": _scenario("reference", a_nan_of_the_reference_is_a_row, check_every=2),
}
