"""Decode by recorded steps: buckets, padding rows, sequences that join and leave, sinks, and what is refused.

The recorder here stands in for CUDA graphs: it keeps one result tensor a step, and runs the step again to replay it.
"""

import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headfit.backends.reference import ReferenceBackend
from headfit.forward_batch import ForwardBatch
from headfit.generate import TINY
from headfit.hosts import transformers as host
from headfit.hosts.recorded_decode import RecordedDecode, batch_buckets
from headfit.hosts.transformers import forward, graph_obstacle
from headfit.runner import Runner, SamplingParams
from headfit.testing.measure import Tolerance, assert_close
from headfit.testing.models import hf_config, random_model
from headfit.testing.ranks import load_all_ranks

# The same float32 arithmetic over batches of other sizes, through a few layers.
LOGITS = Tolerance(absolute=1e-4, relative=1e-5, cosine=1e-9)
BF16 = torch.bfloat16
PROMPTS = [[5, 6, 7] * 50, [8], [9, 10] * 4, [11] * 30, [12, 13]]
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"}


class NoWaiting(TorchDispatchMode):
    """Refuses operators whose result the host would wait for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name not in WAITING, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


class StandIn:
    """A recorder over which a test sees what was recorded and replayed."""

    def __init__(self, log, *, strict=False):
        self.log, self.strict = log, strict
        log.append("recorder")

    def __call__(self, step):
        result = step().clone()
        self.log.append(f"record {len(result)}")

        def replay():
            self.log.append(f"replay {len(result)}")
            if self.strict:
                with NoWaiting():
                    return result.copy_(step())
            return result.copy_(step())

        return replay


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    random_model(hf_config((0, 4, 128), index_topk=8), seed=5).save_pretrained(folder)
    return folder


@pytest.fixture
def log():
    return []


@pytest.fixture
def loaded(folder):
    return load_all_ranks(folder, backend=ReferenceBackend(), max_seqs=6, max_context=200, max_chunk=190)


@pytest.fixture
def decode(loaded, log):
    return RecordedDecode(*loaded, lambda: StandIn(log))


def prefill(model, cache, slot, ids):
    batch = ForwardBatch.for_step(cache, request_slots=[slot], starts=[0], lengths=[len(ids)])
    with torch.inference_mode():
        forward(model, torch.tensor(ids), batch)


def step_alone(model, cache, slot, position, token):
    batch = ForwardBatch.for_step(cache, request_slots=[slot], starts=[position], lengths=[1])
    with torch.inference_mode():
        return forward(model, torch.tensor([token]), batch)


def test_buckets():
    assert batch_buckets(1) == (1,) and batch_buckets(3) == (1, 2, 3) and batch_buckets(8) == (1, 2, 4, 8)
    assert batch_buckets(20) == (1, 2, 4, 8, 16, 20)
    for max_seqs in (1, 7, 64, 256):
        buckets = batch_buckets(max_seqs)
        assert buckets[-1] == max_seqs and list(buckets) == sorted(set(buckets))
    with pytest.raises(ValueError, match="max_seqs"):
        batch_buckets(0)


@pytest.mark.parametrize("max_seqs", [2, 3, 5])
def test_answers_equal_those_without_recorded_steps(folder, max_seqs, log):
    model, cache = load_all_ranks(folder, backend=ReferenceBackend(), max_seqs=max_seqs, max_context=200, max_chunk=64)
    runner = Runner(model, cache)
    assert runner.recorded is None
    sampling = SamplingParams(max_new_tokens=8)
    expected = runner.generate(PROMPTS, sampling)
    runner.recorded = RecordedDecode(model, cache, lambda: StandIn(log))
    assert runner.generate(PROMPTS, sampling) == expected
    assert log.count(f"record {max_seqs}") == 1 and log.count(f"replay {max_seqs}") >= 7
    # Answers of different lengths: sequences leave, and the batch goes through smaller buckets.
    stop = SamplingParams(max_new_tokens=8, stop_token_ids=frozenset({expected[0].token_ids[2]}))
    recorded = runner.generate(PROMPTS, stop)
    runner.recorded = None
    assert recorded == runner.generate(PROMPTS, stop)
    assert log.count("recorder") == 1 and cache.num_free == max_seqs


def test_the_tiny_checkpoint_answers_alike(log):
    model, cache = load_all_ranks(TINY, backend=ReferenceBackend(), max_seqs=3, max_context=160, max_chunk=64)
    runner, sampling = Runner(model, cache), SamplingParams(max_new_tokens=12)
    expected = runner.generate([[3, 4, 5] * 40, [6, 7], [8] * 9], sampling)
    runner.recorded = RecordedDecode(model, cache, lambda: StandIn(log))
    assert runner.generate([[3, 4, 5] * 40, [6, 7], [8] * 9], sampling) == expected


def test_sequences_join_and_leave(folder, decode, log):
    """Teacher forcing: at each step some sequences bring a token; each one's logits are those it has alone."""
    model, cache = decode.model, decode.cache
    twin_model, twin = load_all_ranks(folder, backend=ReferenceBackend(), max_seqs=6, max_context=200, max_chunk=190)
    lives = {0: (0, 40), 1: (0, 12), 2: (5, 30), 3: (9, 14), 4: (13, 40), 5: (20, 40)}  # slot: (joins at, leaves at)
    ids = {slot: torch.randint(1, 96, (170,)).tolist() for slot in lives}
    prompt_lengths = {0: 120, 1: 1, 2: 7, 3: 127, 4: 3, 5: 60}
    sizes = set()
    for step in range(40):
        for slot, (joins, _) in lives.items():
            if step == joins:
                prefill(model, cache, slot, ids[slot][: prompt_lengths[slot]])
                prefill(twin_model, twin, slot, ids[slot][: prompt_lengths[slot]])
        slots = [slot for slot, (joins, leaves) in lives.items() if joins <= step < leaves][:: 1 if step % 2 else -1]
        positions = [prompt_lengths[slot] + step - lives[slot][0] for slot in slots]
        tokens = [ids[slot][position] for slot, position in zip(slots, positions, strict=True)]
        logits = decode(tokens=tokens, request_slots=slots, positions=positions)
        alone = [step_alone(twin_model, twin, *part) for part in zip(slots, positions, tokens, strict=True)]
        assert_close(logits, torch.cat(alone), LOGITS, f"step {step}")
        sizes.add(len(slots))
    assert len(sizes) >= 3
    assert sorted(entry for entry in log if entry.startswith("record ")) == sorted(
        f"record {bucket}" for bucket in decode.buckets if any(_bucket(decode, size) == bucket for size in sizes)
    )


def _bucket(decode, size):
    return next(bucket for bucket in decode.buckets if bucket >= size)


def cache_bytes(cache):
    """What sequences can read: pools without their spare page, states without the row for dropped writes."""
    parts = []
    for layer in cache.layers:
        pools = (layer.window, layer.compressed, layer.index_keys)
        parts += [pool.buffer[: pool.num_pages].clone() for pool in pools if pool is not None]
        parts += [state[:-1].clone() for state in (layer.state, layer.index_state) if state is not None]
    return parts


def test_padding_rows_and_recording_write_nothing(decode):
    """Three sequences in a bucket of four; slot 0, which padding rows carry, is another sequence's."""
    model, cache = decode.model, decode.cache
    prompt = list(range(1, 31))
    for slot in range(6):
        prefill(model, cache, slot, prompt)
    before = cache_bytes(cache)
    decode._record(4)
    assert all(map(torch.equal, before, cache_bytes(cache)))
    decode(tokens=[3, 4, 5], request_slots=[1, 2, 3], positions=[30, 30, 30])
    after = cache_bytes(cache)
    window = cache.layers[0].window
    slots = cache.window_slots(torch.tensor([[0], [4], [5]]), torch.arange(40)).flatten()
    written = cache.window_slots(torch.tensor([1, 2, 3]), torch.tensor([30, 30, 30]))
    rows_before, rows_after = before[0].flatten(0, 1), after[0].flatten(0, 1)
    assert window.num_slots == len(rows_before)
    assert torch.equal(rows_before[slots], rows_after[slots])
    assert not torch.equal(rows_before[written], rows_after[written])


def test_a_step_never_waits_for_the_device(loaded, log):
    model, cache = loaded
    decode = RecordedDecode(model, cache, lambda: StandIn(log, strict=True))
    prefill(model, cache, 0, [1, 2, 3])
    with pytest.raises(AssertionError, match="waits for the device"):
        decode(tokens=[4], request_slots=[0], positions=[3])  # the experts' loop does
    model.set_experts_implementation("grouped_mm")
    expected = step_alone(model, cache, 0, 3, 4)
    assert_close(decode(tokens=[4], request_slots=[0], positions=[3]), expected, LOGITS)


def test_row_08_sinks_written_in_place_show_and_rebound_ones_are_recorded_again(decode, log, caplog):
    model, cache = decode.model, decode.cache
    prefill(model, cache, 0, [5, 6, 7])
    arguments = {"tokens": [8], "request_slots": [0], "positions": [3]}
    layers = [decoder_layer.self_attn.layer for decoder_layer in model.model.layers]
    old = decode(**arguments).clone()
    for layer in layers:
        layer.attn_sink.data.copy_(torch.full_like(layer.attn_sink, 9.0))
    written = decode(**arguments).clone()
    assert not torch.equal(written, old) and log.count("record 1") == 1
    assert_close(written, step_alone(model, cache, 0, 3, 8), LOGITS)
    with caplog.at_level(logging.WARNING):
        layers[1].attn_sink.data = torch.full_like(layers[1].attn_sink, -9.0)
        rebound = decode(**arguments).clone()
    assert "attn_sink was rebound" in caplog.text
    assert log.count("record 1") == 2 and log.count("recorder") == 2
    assert not torch.equal(rebound, written)
    assert_close(rebound, step_alone(model, cache, 0, 3, 8), LOGITS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [1]}, "1, 2, 2 long, allowed: equally long, 1 to 6"),
        ({"tokens": [], "request_slots": [], "positions": []}, "0, 0, 0 long"),
        ({"tokens": [1] * 7, "request_slots": range(7), "positions": [0] * 7}, "7, 7, 7 long"),
        ({"request_slots": [2, 2]}, r"request_slots: \[2, 2\] names a slot twice"),
        ({"request_slots": [0, 6]}, "request_slots: 6, allowed: 0 to 5"),
        ({"positions": [0, -1]}, "positions: -1, allowed: 0 to 199"),
        ({"positions": [200, 0]}, "positions: 200, allowed: 0 to 199"),
        ({"tokens": [1, -1]}, "tokens: -1, allowed: 0 to "),
        ({"tokens": [10**6, 1]}, "tokens: 1000000, allowed: 0 to "),
        ({"tokens": [1.7, 1]}, "tokens: 1.7, allowed: int"),
        ({"request_slots": [torch.tensor(1), torch.tensor(1)]}, r"request_slots: tensor\(1\), allowed: int"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_anything_runs(decode, log, changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        decode(**{"tokens": [1, 2], "request_slots": [0, 1], "positions": [0, 0]} | changes)
    assert log == ["recorder"]


def test_the_cpu_decodes_eagerly_and_says_so(loaded, caplog):
    with caplog.at_level(logging.INFO, logger="headfit.runner"):
        assert Runner(*loaded).recorded is None and Runner(*loaded, cuda_graphs=False).recorded is None
    assert [record.getMessage() for record in caplog.records] == [
        "decode: eager (the device is cpu)",
        "decode: eager (asked for)",
    ]
    with pytest.raises(ValueError, match="cuda_graphs: True, but the device is cpu; allowed here: None, False"):
        Runner(*loaded, cuda_graphs=True)


def test_what_is_in_the_way_of_a_graph(loaded, monkeypatch):
    model, _ = loaded
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert "the experts run as 'eager', which waits for the device (torch.float32)" in graph_obstacle(model)
    model.set_experts_implementation("grouped_mm")
    assert graph_obstacle(model) is None


def test_experts_are_loaded_in_their_graph_safe_form(folder, monkeypatch):
    """bfloat16 on CUDA: grouped products; the same answers as the loop over experts."""
    assert host._experts_implementation(BF16, "cuda:1") == "grouped_mm"
    assert host._experts_implementation(torch.float32, "cuda") == host._experts_implementation(BF16, "cpu") == "eager"
    logits = []
    for implementation in ("eager", "grouped_mm"):
        monkeypatch.setattr(host, "_experts_implementation", lambda *_, chosen=implementation: chosen)
        model, cache = load_all_ranks(folder, backend=ReferenceBackend(), max_context=200, max_chunk=190)
        assert model.config._experts_implementation == implementation
        prefill(model, cache, 0, [1, 2, 3])
        logits.append(step_alone(model, cache, 0, 3, 4))
    assert_close(*logits, LOGITS)
