"""Which kernel the plugin takes and when it gives way, without SGLang: the hooks are called by hand."""

import ast
import logging
import subprocess
import sys
import types

import pytest
import torch

from headfit import backends
from headfit.hosts.sglang import plugin as plugin_module
from headfit.hosts.sglang import sinks as sinks_module
from headfit.hosts.sglang.capabilities import ServerCode, UnsupportedServer, decode_heads, read_server
from headfit.hosts.sglang.plugin import AUTO_MAX_HEADS, Plugin
from headfit.hosts.sglang.settings import Settings
from headfit.hosts.sglang.sinks import LayerSinks


class Layer(torch.nn.Module):
    """What the plugin reads of a server's attention layer."""

    def __init__(self, num_heads=128, rank=3, size=8, dtype=torch.float32):
        super().__init__()
        self.n_heads, self.n_local_heads, self.attn_tp_rank, self.attn_tp_size = (
            num_heads,
            num_heads // size,
            rank,
            size,
        )
        self.attn_sink = torch.nn.Parameter(torch.zeros(num_heads, dtype=dtype))


class Backend(backends.reference.ReferenceBackend):
    """Records what it is prepared for; `fails` is raised instead."""

    def __init__(self, fails=None):
        super().__init__()
        self.prewarmed, self.fails = [], fails

    def prewarm(self, num_heads, device):
        if self.fails:
            raise self.fails
        self.prewarmed.append(num_heads)


@pytest.fixture
def make(monkeypatch):
    """make(kernel, seams=..., **settings) -> a plugin whose hooks are taken to be in place."""

    def make(kernel, seams=("module.function",), **settings):
        monkeypatch.setattr(plugin_module, "_is_hooked", lambda target, hook: True)
        monkeypatch.setattr(backends, "create", lambda name, **kwargs: kernel)
        code = ServerCode(
            shape="method",
            rank_attribute="attn_tp_rank",
            size_attribute="attn_tp_size",
            init=("a.init",),
            forward=("a.forward",),
            local_sink=(),
            updates=(),
            seams=seams,
            seam_obstacle="" if seams else "no function",
            loads_model=True,
        )
        return Plugin(Settings(**settings), code)

    return make


def build(plugin, *layers):
    """Layers that live as long as the plugin, which itself keeps none alive."""
    plugin.__dict__.setdefault("kept", []).extend(layers)
    for layer in layers:
        plugin._around_init(lambda layer: None, layer)


def test_loading_prepares_every_head_count_once(make):
    backend = Backend()
    plugin = make(backend)
    build(plugin, Layer(), Layer())
    assert plugin._around_load(lambda: "loaded") == "loaded" and backend.prewarmed == [16]
    build(plugin, Layer(size=4))  # a draft model, loaded later
    plugin._around_load(lambda: None)
    assert sorted(backend.prewarmed) == [16, 32] and plugin.seam.max_heads == AUTO_MAX_HEADS


def test_a_server_without_our_layers_is_left_alone(make):
    plugin = make(Backend())
    plugin._around_load(lambda: None)
    assert plugin.seam is None and not plugin.kernel
    assert plugin._around_seam(lambda **call: call, q=1) == {"q": 1}


def test_auto_leaves_a_kernel_that_does_not_compile_to_the_server(make, caplog):
    plugin = make(Backend(fails=OSError("no compiler")))
    build(plugin, Layer())
    with caplog.at_level(logging.INFO, "headfit"):
        plugin._around_load(lambda: None)
    assert plugin.seam is None and plugin.active and plugin.kernel == "the server's own (no compiler)"
    assert "could not be prepared for 16 heads: no compiler" in caplog.text
    plugin._around_load(lambda: None)
    assert plugin.seam is None


def test_a_draft_whose_kernel_does_not_compile_leaves_the_targets_alone(make):
    backend = Backend()
    plugin = make(backend)
    build(plugin, Layer())
    plugin._around_load(lambda: None)
    build(plugin, Layer(size=4))
    backend.fails = OSError("no compiler")
    for _ in range(2):
        plugin._around_load(lambda: None)
    assert backend.prewarmed == [16] and plugin.seam.refused == {32: "no compiler"}
    with plugin.seam.running(Layer(size=4)):
        assert plugin._around_seam(lambda **call: call, q=1) == {"q": 1}
    assert list(plugin.seam.passed_on) == ["32 heads a rank: no compiler"]


def test_a_kernel_asked_for_by_name_does_not_fail_quietly(make):
    plugin = make(Backend(fails=OSError("no compiler")), backend="sparse_mqa_cuda")
    build(plugin, Layer())
    with pytest.raises(OSError, match="no compiler"):
        plugin._around_load(lambda: None)


def test_a_kernel_that_cannot_run_here_is_refused_by_name():
    with pytest.raises(ValueError, match="sparse_mqa_cuda: needs a CUDA GPU"):
        plugin_module._backend(Settings(backend="sparse_mqa_cuda"), torch.device("cpu"), {16})


@pytest.mark.parametrize("counts, reason", [({16}, "needs a CUDA GPU"), ({128}, "128 heads a rank, more than 64")])
def test_auto_says_why_it_leaves_the_servers_kernel(counts, reason):
    backend, kernel = plugin_module._backend(Settings(), torch.device("cpu"), counts)
    assert backend is None and kernel.startswith("the server's own (auto: ") and reason in kernel


def test_without_a_seam_only_the_sinks_are_kept(make):
    plugin = make(Backend(), seams=())
    layer = Layer()
    build(plugin, layer)
    plugin._around_load(lambda: None)
    assert plugin.seam is None and "no function" in plugin.kernel
    layer.attn_sink.data.fill_(2.0)
    assert (plugin._around_local_sink(None, layer)[:16] == 2).all()


def test_a_kernel_asked_for_by_name_needs_a_seam(make):
    plugin = make(Backend(), seams=(), backend="unified_kv_triton")
    build(plugin, Layer())
    with pytest.raises(
        ValueError, match=r"HEADFIT_BACKEND=unified_kv_triton: this server has no decode call .* no function"
    ):
        plugin._around_load(lambda: None)


def test_auto_prepares_no_head_count_that_it_leaves_to_the_server(make):
    backend = Backend()
    plugin = make(backend)
    build(plugin, Layer(), Layer(rank=0, size=1))
    plugin._around_load(lambda: None)
    assert backend.prewarmed == [16]


def test_two_head_counts_and_a_kernel_that_does_not_compile(make):
    plugin = make(Backend(fails=OSError("no compiler")))
    build(plugin, Layer(), Layer(size=4))
    plugin._around_load(lambda: None)
    assert plugin.seam is None and plugin.active


def test_a_sink_that_changed_while_loading_makes_it_stand_down(make):
    backend = Backend()
    plugin = make(backend)
    layer = Layer()
    build(plugin, layer)
    layer.attn_sink = torch.nn.Parameter(torch.zeros(64))
    plugin._around_load(lambda: None)
    assert not plugin.active and not backend.prewarmed


def test_a_layer_of_another_kind_makes_it_stand_down_once(make, caplog):
    plugin = make(Backend())
    with caplog.at_level(logging.WARNING, "headfit"):
        build(plugin, Layer(dtype=torch.bfloat16), Layer(dtype=torch.bfloat16))
    assert not plugin.active and len(caplog.records) == 1 and "attn_sink: dtype torch.bfloat16" in caplog.text
    assert plugin._around_forward(lambda layer, x: x, None, 3) == 3
    assert plugin._around_local_sink(lambda layer: "theirs", Layer()) == "theirs"
    assert plugin._around_seam(lambda **call: call, q=1) == {"q": 1}


def test_hooks_that_were_not_applied_are_named(make, monkeypatch, caplog):
    plugin = make(Backend())
    monkeypatch.setattr(plugin_module, "_is_hooked", lambda target, hook: target != "a.forward")
    with caplog.at_level(logging.WARNING, "headfit"):
        build(plugin, Layer())
    assert not plugin.active and "did not apply: a.forward" in caplog.text and not plugin.sinks.layers


def test_another_setting_than_auto_is_kept_or_the_server_does_not_start(make, monkeypatch):
    named = make(Backend(), backend="sparse_mqa_cuda")
    with pytest.raises(RuntimeError, match=r"HEADFIT_BACKEND=sparse_mqa_cuda cannot be had .* dtype torch.bfloat16"):
        build(named, Layer(dtype=torch.bfloat16))
    for name in ("flashmla", "reference"):
        plugin = make(Backend(), backend=name)
        monkeypatch.setattr(plugin_module, "_is_hooked", lambda target, hook: target != "a.forward")
        with pytest.raises(RuntimeError, match=f"HEADFIT_BACKEND={name} cannot be had .* did not apply: a.forward"):
            build(plugin, Layer())


def test_a_sink_that_can_no_longer_be_kept_is_an_error_once_graphs_may_hold_it(make):
    plugin = make(Backend())
    layer = Layer()
    build(plugin, layer)
    plugin._around_load(lambda: None)
    layer.attn_sink.data = torch.zeros(128, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"would go on with old sinks: attn_sink: dtype torch.bfloat16"):
        plugin._around_update(lambda: None)
    with pytest.raises(RuntimeError, match="old sinks"):
        plugin._around_forward(lambda layer: None, layer)
    layer.attn_sink.data = torch.ones(128)
    plugin._around_update(lambda: None)
    assert plugin.active and (plugin.sinks.local(layer)[:16] == 1).all()


def test_a_draft_layer_that_cannot_be_kept_is_left_to_the_server_by_itself(make, caplog):
    plugin = make(Backend())
    first, bad = Layer(), Layer(dtype=torch.bfloat16)
    build(plugin, first)
    plugin._around_load(lambda: None)
    with caplog.at_level(logging.WARNING, "headfit"):
        build(plugin, bad)
    assert plugin.active and plugin.sinks.layers == (first,) and "leaves a layer to the server" in caplog.text
    assert plugin._around_forward(lambda layer: getattr(plugin.seam._thread, "run", None), bad) is None
    assert plugin._around_local_sink(lambda layer: "theirs", bad) == "theirs"
    assert plugin._around_forward(lambda layer: plugin.seam._thread.run.layer, first) is first
    plugin.settings = Settings(backend="sparse_mqa_cuda")
    with pytest.raises(RuntimeError, match="HEADFIT_BACKEND=sparse_mqa_cuda cannot be had"):
        build(plugin, Layer(dtype=torch.bfloat16))


def test_after_standing_down_updates_still_reach_the_sinks_that_have_a_home(make):
    plugin = make(Backend())
    plugin.sinks.shape = "cached"
    first, bad = Layer(), Layer(dtype=torch.bfloat16)
    build(plugin, first, bad)
    assert not plugin.active and plugin.sinks.layers == (first,) and bad._attn_sink_local is None
    first.attn_sink.data = torch.full((128,), 2.0)
    plugin._around_update(lambda: None)
    assert (first._attn_sink_local[:16] == 2).all()


def test_a_check_that_would_compare_nothing_is_refused(make):
    plugin = make(Backend(), seams=(), check=True)
    build(plugin, Layer())
    with pytest.raises(
        RuntimeError, match=r"HEADFIT_CHECK=1 cannot be had in .* the decode kernel is the server's own"
    ):
        plugin._around_load(lambda: None)
    with pytest.raises(RuntimeError, match="HEADFIT_CHECK=1 cannot be had"):
        make(Backend(), check=True).stand_down("another shape")
    plugin = make(Backend(), backend="reference", check=True)
    build(plugin, layer := Layer())
    plugin._around_load(lambda: None)
    layer.attn_sink.data.copy_(torch.arange(128.0))
    assert torch.equal(plugin.seam.check_sinks(layer), torch.arange(48.0, 64.0))


def test_a_hook_is_found_behind_a_wrapper_with_an_unset_cell(monkeypatch):
    def hook():
        pass

    def hooked():
        return hook

    def other():
        return unset

    other.__wrapped__ = hooked
    monkeypatch.setattr(plugin_module, "status", other)
    assert plugin_module._is_hooked("headfit.hosts.sglang.plugin.status", hook)
    assert not plugin_module._is_hooked("headfit.hosts.sglang.plugin.status", other)
    unset = None


def test_an_error_in_the_layer_comes_through_and_leaves_no_layer_running(make):
    plugin = make(Backend())
    layer = Layer()
    build(plugin, layer)

    def fails(layer):
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        plugin._around_forward(fails, layer)
    assert plugin.seam is not None and plugin.seam._thread.run is None


class Batch:
    def __init__(self, decodes=True, batch_size=3):
        self.forward_mode, self.batch_size = types.SimpleNamespace(is_decode=lambda: decodes), batch_size


def test_a_decode_that_does_not_come_to_the_seam_is_said(make, caplog):
    """As where the server decodes by another kernel on this GPU."""
    plugin = make(Backend())
    layer = Layer()
    build(plugin, layer)
    plugin._around_load(lambda: None)

    def calls(layer, batch):
        return plugin._around_seam(lambda **call: "theirs", q=1)

    with caplog.at_level(logging.WARNING, "headfit"):
        for batch in (Batch(decodes=False), Batch(batch_size=0)):
            plugin._around_forward(lambda layer, batch: None, layer, batch)
        assert plugin._around_forward(calls, layer, Batch()) == "theirs" and plugin.seam.passed_on.total() == 1
        assert "layer's decode" not in caplog.text and "auto: the faster one" in plugin.kernel
        for _ in range(2):
            assert plugin._around_forward(lambda layer, batch: "done", layer, batch=Batch()) == "done"
    said = "leaves a layer's decode to the server: the layer's decode does not call module.function here"
    assert caplog.text.count(said) == 1
    said = "sparse_mqa_cuda (auto: the faster one here); the server's own where the layer's decode does not call"
    assert plugin.status()["kernel"].startswith(said)


@pytest.mark.parametrize("settings", [{"backend": "reference"}, {"check": True}], ids=["by name", "check"])
def test_a_decode_that_does_not_come_to_the_seam_is_refused_where_it_was_asked_for(make, settings):
    plugin = make(Backend(), **settings)
    layer = Layer()
    build(plugin, layer)
    plugin._around_load(lambda: None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cannot be had in .*: the layer's decode does not call"):
            plugin._around_forward(lambda layer, batch: None, layer, Batch())


@pytest.mark.parametrize("settings", [{"backend": "reference"}, {"check": True}, {}], ids=["by name", "check", "auto"])
def test_a_decode_whose_calls_all_have_another_form_is_refused_where_it_was_asked_for(make, settings):
    plugin = make(Backend(), **settings)
    layer = Layer()
    build(plugin, layer)
    plugin._around_load(lambda: None)

    def run(batch):
        return plugin._around_forward(lambda layer, batch: plugin._around_seam(lambda **_: "theirs", q=1), layer, batch)

    assert run(Batch(decodes=False)) == "theirs"
    if settings:
        with pytest.raises(RuntimeError, match=r"(=reference|HEADFIT_CHECK=1) cannot be had in .*: no attn_sink"):
            run(Batch())
    else:
        assert run(Batch()) == "theirs" and plugin.seam.passed_on == {"no attn_sink": 2}


@pytest.mark.parametrize("num_heads, prepared", [(128, [16]), (64, [8, 64])])
def test_heads_that_are_shared_out_for_decode_alone_count(make, monkeypatch, num_heads, prepared):
    """Eight ranks of context parallelism: each layer has all heads when it is built, and an eighth when it decodes."""
    context = types.SimpleNamespace(decode_tp_size=8)
    monkeypatch.setitem(globals(), "get_cp_decode_attn_tp_ctx", lambda: context)  # in the layer's module
    plugin, layer = make(backend := Backend()), Layer(num_heads, 0, 1)
    build(plugin, layer)
    plugin._around_load(lambda: None)
    assert sorted(backend.prewarmed) == prepared and plugin.kernel == "sparse_mqa_cuda (auto: the faster one here)"
    context.decode_tp_size = None
    assert decode_heads(layer) == num_heads


@pytest.mark.parametrize("settings", [{}, {"backend": "reference"}], ids=["auto", "by name"])
def test_a_layer_whose_parameters_are_swapped_is_left_to_the_server(make, caplog, monkeypatch, settings):
    """As by CPU offload, which runs a layer with copies of its parameters: at another address in every forward."""
    plugin = make(Backend(), **settings)
    plugin.sinks.shape = "cached"
    layer, kept = Layer(), Layer()
    build(plugin, layer, kept)
    plugin._around_load(lambda: None)
    layer.forward = types.MethodType(
        lambda self: plugin._around_forward(lambda layer: layer.attn_sink.clone(), self), layer
    )
    monkeypatch.setattr(sinks_module, "_is_capturing", lambda tensor: True)

    def run():
        return torch.func.functional_call(layer, {"attn_sink": torch.arange(128.0)}, ())

    if settings:
        with pytest.raises(RuntimeError, match=r"HEADFIT_BACKEND=reference cannot be had .*CPU offload"):
            run()
        return
    with caplog.at_level(logging.WARNING, "headfit"):
        assert torch.equal(run(), torch.arange(128.0)) and torch.equal(run(), torch.arange(128.0))
    assert caplog.text.count("leaves a layer to the server") == 1 and "CPU offload" in caplog.text
    assert plugin.active and plugin.sinks.layers == (kept,) and layer._attn_sink_local is None


def test_the_kernel_is_chosen_for_the_gpu_where_some_layers_are_offloaded(make, monkeypatch):
    plugin = make(Backend())
    layers = [Layer() for _ in range(8)]
    build(plugin, *layers)
    layers[-1].attn_sink = torch.nn.Parameter(torch.empty(128, device="meta"))  # a device, with no GPU at hand
    seen = []
    monkeypatch.setattr(plugin, "_choose_kernel", seen.append)
    plugin._around_load(lambda: None)
    assert seen == [torch.device("meta")]


def test_an_update_that_fails_brings_rebound_sinks_home(make):
    plugin = make(Backend())
    plugin.sinks.shape = "cached"
    layer = Layer()
    build(plugin, layer)
    view = layer._attn_sink_local

    def fails():
        layer.attn_sink.data = torch.full((128,), 7.0)
        raise OSError("theirs")

    with pytest.raises(OSError, match="theirs"):
        plugin._around_update(fails)
    assert (view[:16] == 7).all()


@pytest.mark.parametrize("settings", [{}, {"HEADFIT_CHECK": "1"}, {"HEADFIT_BACKEND": "reference"}])
def test_whatever_fails_while_the_server_is_read_is_said(monkeypatch, caplog, settings):
    """SGLang swallows an exception of a plugin; the worker must not go on as stock with something asked for."""

    def fails():
        raise AssertionError("this GPU is not supported")

    monkeypatch.setattr(plugin_module, "read_server", fails)
    monkeypatch.setattr(plugin_module, "runs_a_model", lambda: True)
    for name in ("HEADFIT_CHECK", "HEADFIT_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    said = "AssertionError: this GPU is not supported"
    if settings:
        with pytest.raises(SystemExit, match=f"{'='.join(*settings.items())} cannot be had in .*{said}"):
            plugin_module.register()
    else:
        with caplog.at_level(logging.WARNING, "headfit"):
            plugin_module.register()
        assert f"stands down, SGLang {plugin_module.sglang_version()} runs as stock: {said}" in caplog.text
    assert plugin_module.status() == {"active": False}


def test_a_rebound_sink_is_refused_in_a_capture(monkeypatch):
    layer = Layer()
    sinks = LayerSinks(shape="cached", rank_attribute="attn_tp_rank", size_attribute="attn_tp_size")
    sinks.adopt(layer)
    view = layer._attn_sink_local
    layer.attn_sink.data = torch.ones(128)
    monkeypatch.setattr("headfit.hosts.sglang.sinks._is_capturing", lambda tensor: True)
    with pytest.raises(RuntimeError, match="run one before capturing a graph"):
        sinks.refresh(layer)
    assert not view.any()
    monkeypatch.undo()
    sinks.refresh(layer)
    assert (view[:16] == 1).all() and layer._attn_sink_local.data_ptr() == view.data_ptr()


def test_the_plugin_needs_torch_alone():
    """Servers pin a transformers of their own, so that headfit may have to be installed without its dependencies."""
    code = (
        "import sys, torch; before = set(sys.modules); import headfit.hosts.sglang;"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stdout))
    assert "headfit" in loaded and not loaded & {"transformers", "safetensors", "triton", "sglang", "cuda"}


def test_no_sglang_is_an_unsupported_server():
    with pytest.raises(UnsupportedServer, match="deepseek_v4 cannot be imported"):
        read_server()


@pytest.mark.parametrize("value", ["off", "auto"])
def test_register_does_nothing_in_a_launcher(monkeypatch, value):
    monkeypatch.setenv("HEADFIT_BACKEND", value)
    plugin_module.register()
    assert plugin_module.status() == {"active": False}


def test_register_refuses_an_unknown_setting(monkeypatch):
    monkeypatch.setenv("HEADFIT_BACKEND", "fastest")
    with pytest.raises(SystemExit, match="headfit: HEADFIT_BACKEND: 'fastest', allowed: auto"):
        plugin_module.register()


def test_register_refuses_a_kernel_by_name_where_the_server_cannot_have_it(monkeypatch, caplog):
    monkeypatch.setattr(plugin_module, "runs_a_model", lambda: True)
    monkeypatch.setenv("HEADFIT_BACKEND", "sparse_mqa_cuda")
    with pytest.raises(SystemExit, match=r"HEADFIT_BACKEND=sparse_mqa_cuda cannot be had .* cannot be imported"):
        plugin_module.register()
    monkeypatch.setenv("HEADFIT_BACKEND", "auto")
    plugin_module.register()
    assert "stands down" in caplog.text
