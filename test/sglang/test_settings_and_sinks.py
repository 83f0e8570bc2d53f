"""Settings from the environment, and what a layer's sink must be: without SGLang."""

import pytest
import torch

from headfit.hosts.sglang.settings import BACKENDS, Settings
from headfit.hosts.sglang.sinks import LayerSinks


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"HEADFIT_BACKEND": "fast"}, "HEADFIT_BACKEND: 'fast', allowed: auto, sparse_mqa_cuda"),
        ({"HEADFIT_BACKEND": ""}, "HEADFIT_BACKEND: ''"),
        ({"HEADFIT_CHECK": "yes"}, "HEADFIT_CHECK: 'yes', allowed: 0, 1"),
    ],
)
def test_settings_refuse_what_they_do_not_know(environment, message):
    with pytest.raises(ValueError) as error:
        Settings.from_environment(environment)
    assert message in str(error.value)


def test_settings_default_and_round_trip():
    assert Settings.from_environment({}) == Settings(backend="auto", check=False)
    for backend in BACKENDS:
        settings = Settings(backend=backend, check=backend not in ("flashmla", "off"))
        assert Settings.from_environment(settings.as_environment()) == settings


@pytest.mark.parametrize("backend", ["flashmla", "off"])
def test_a_check_of_the_servers_own_kernel_is_refused(backend):
    with pytest.raises(ValueError, match=f"HEADFIT_CHECK: 1, allowed with HEADFIT_BACKEND={backend}: 0"):
        Settings.from_environment({"HEADFIT_BACKEND": backend, "HEADFIT_CHECK": "1"})


def test_a_sink_that_is_not_float32_or_not_whole_is_refused():
    layer = torch.nn.Module()
    layer.n_heads, layer.n_local_heads, layer.tp_rank, layer.tp_size = 64, 16, 1, 4
    sinks = LayerSinks(shape="method", rank_attribute="tp_rank", size_attribute="tp_size")
    layer.attn_sink = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"attn_sink: dtype torch.bfloat16, allowed: torch.float32"):
        sinks.adopt(layer)
    layer.attn_sink = torch.nn.Parameter(torch.zeros(32))
    with pytest.raises(ValueError, match=r"attn_sink: \(32,\), allowed: \(64,\)"):
        sinks.adopt(layer)
    layer.attn_sink = torch.nn.Parameter(torch.arange(64.0))
    sinks.adopt(layer)
    assert torch.equal(sinks.local(layer)[:16], torch.arange(16.0, 32.0))
    with pytest.raises(ValueError, match=r"kernel_num_heads: 8, allowed: 16 to 128"):
        sinks.local(layer, 8)
    layer.tp_size = 6
    with pytest.raises(ValueError, match="attn_tp_size 6"):
        sinks.local(layer)
