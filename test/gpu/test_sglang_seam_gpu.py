"""The SGLang seam on a GPU: in a captured CUDA graph, with the kernel that serves; needs no SGLang."""

import math
import sys
from pathlib import Path

import pytest
import torch

from headfit import backends
from headfit.hosts.sglang.seam import Seam
from headfit.hosts.sglang.sinks import LayerSinks
from headfit.testing.cases import Case, reference_float64
from headfit.testing.measure import BF16_OUTPUT, assert_close

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))
from seam_calls import Layer, make_call

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernel is for sm90", allow_module_level=True)


@pytest.fixture(params=["sparse_mqa_cuda", "unified_kv_triton"])
def seam(request):
    return Seam(backends.create(request.param, device="cuda"))


def run(seam, layer, call):
    with seam.running(layer):
        return seam.call(None, **call)


def captured(seam, layer, call):
    """(graph, out) of one call, warmed on a side stream first."""
    seam.backend.prewarm(layer.n_local_heads, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(seam, layer, call)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(seam, layer, call)[0]
    return graph, out


@pytest.mark.parametrize("num_heads", [8, 16, 32, 64])
@pytest.mark.parametrize("pages, keys", [((256, 64), (128, 512)), ((256, 2), (128, 64)), ((256, 64), (128, None))])
def test_answers_as_the_callee_would(seam, num_heads, pages, keys):
    case = Case(num_tokens=5, num_heads=num_heads, num_keys=keys, page_sizes=pages, lengths="ragged", absent=0.1)
    call, arguments = make_call(case, 1, device="cuda")
    out, lse = run(seam, Layer(num_heads), call)
    expected, expected_lse = reference_float64(**arguments)
    assert_close(out[:, 0, :num_heads], expected, BF16_OUTPUT)
    expected_lse = torch.where(expected_lse == -math.inf, math.inf, expected_lse)
    assert_close(lse[:, :num_heads, 0], expected_lse, BF16_OUTPUT)


def test_a_replay_follows_lengths_and_queries(seam):
    """Row 26: captured at one set of lengths, replayed at others with eager work between."""
    case = Case(num_tokens=4, num_heads=16, num_keys=(128, 512), page_sizes=(256, 64))
    call, arguments = make_call(case, 2, device="cuda")
    layer = Layer(16)
    graph, out = captured(seam, layer, call)
    for number, lengths in enumerate(([512, 1, 0, 64], [64, 512, 512, 7])):
        call["extra_topk_length"].copy_(torch.tensor(lengths, dtype=torch.int32))
        call["q"][:, 0, :16].normal_(generator=torch.Generator("cuda").manual_seed(number))
        run(seam, layer, make_call(case, 3, device="cuda")[0])
        graph.replay()
        arguments["q"] = call["q"][:, 0, :16]
        assert_close(out[:, 0, :16], reference_float64(**arguments)[0], BF16_OUTPUT)


def test_a_replay_sees_an_updated_sink(seam):
    """Row 8: four keys of 1.0 and a sink of ln 4 give 0.5; with the parameter set to -inf the same graph gives 1."""
    owner = torch.nn.Module()
    owner.n_heads, owner.n_local_heads, owner.attn_tp_rank, owner.attn_tp_size = 128, 16, 7, 8
    owner.attn_sink = torch.nn.Parameter(torch.full((128,), math.log(4.0), device="cuda"))
    sinks = LayerSinks(shape="method", rank_attribute="attn_tp_rank", size_attribute="attn_tp_size")
    sinks.adopt(owner)
    call, arguments = make_call(Case(num_tokens=1, num_heads=16, num_keys=(4, None)), 4, device="cuda")
    arguments["window"].pool.store(arguments["window"].indices[0], torch.ones(4, 512, device="cuda"))
    call["q"].zero_()
    call["attn_sink"] = sinks.local(owner)
    graph, out = captured(seam, owner, call)
    graph.replay()
    assert_close(out[:, 0, :16], torch.full((1, 16, 512), 0.5), BF16_OUTPUT)
    owner.attn_sink.data.fill_(-math.inf)
    graph.replay()
    assert_close(out[:, 0, :16], torch.ones(1, 16, 512), BF16_OUTPUT)
    owner.attn_sink.data = torch.zeros(128, device="cuda")  # bound elsewhere: home with the next update
    sinks.refresh(owner)
    graph.replay()
    assert_close(out[:, 0, :16], torch.full((1, 16, 512), 0.8), BF16_OUTPUT)


def test_a_capture_counts_and_is_not_checked():
    call, arguments = make_call(Case(num_heads=16, num_keys=(64, 64)), 5, device="cuda")
    backend = backends.create("sparse_mqa_cuda", device="cuda")
    seam = Seam(backend, check_sinks=lambda layer: arguments["attn_sink"])
    captured(seam, Layer(16), call)
    assert (seam.served, seam.captured, seam.checked) == (2, 1, 1)
