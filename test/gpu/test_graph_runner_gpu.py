"""Decode of whole models by CUDA graphs: bit for bit as eager steps, near the CPU, and what a replay does not do.

"Row n" is row n of the list of known faults.
"""

import argparse
import math
from functools import partial

import pytest
import torch

from headfit import backends, generate
from headfit.assets.word_problems import few_shot_prompt, held_out_problems, make_shots
from headfit.backends import flashmla
from headfit.backends.reference import ReferenceBackend
from headfit.config import DeepSeekV4Config
from headfit.forward_batch import ForwardBatch
from headfit.generate import TINY
from headfit.hosts.recorded_decode import CudaGraphRecorder, RecordedDecode
from headfit.hosts.transformers import forward, graph_obstacle, load_model
from headfit.kv_cache import PackedFp8Format
from headfit.model_cache import ModelCache
from headfit.runner import Runner, SamplingParams
from headfit.testing.measure import relative_norm

BF16 = torch.bfloat16
MAX_SEQS, MAX_CONTEXT, MAX_CHUNK = 6, 600, 512
CONFIG = DeepSeekV4Config.from_file(TINY)
LIMIT = 2e-2  # bfloat16 activations through the model's layers give 1.7e-2 against float32 ones

# The models and the CPU's logits are made once, where one worker has all of these tests.
pytestmark = pytest.mark.xdist_group("graph_runner")
NAMES = ["reference", "unified_kv_triton", "sparse_mqa_cuda", "flashmla"]
each_backend = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def models():
    """One model a backend, loaded when first asked for."""
    loaded = {}

    def get(name):
        if name == "flashmla" and (obstacle := flashmla.obstacle()):
            pytest.skip(f"FlashMLA: {obstacle}")
        if name not in loaded:
            backend = backends.create(name, device="cuda")
            loaded[name] = load_model(TINY, backend=backend, dtype=BF16, device="cuda")
        return loaded[name]

    return get


def make_cache(device="cuda", dtype=BF16):
    sizes = {"max_seqs": MAX_SEQS, "max_context": MAX_CONTEXT, "max_chunk": MAX_CHUNK}
    return ModelCache(CONFIG, kv_format=PackedFp8Format(), dtype=dtype, device=device, **sizes)


def graphs(model, cache):
    return RecordedDecode(model, cache, partial(CudaGraphRecorder, cache.device))


def eager(model, cache):
    """The same steps over the same static memory, run anew each time."""
    return RecordedDecode(model, cache, lambda: lambda step: step)


@torch.inference_mode()
def prefill(model, cache, slot, ids):
    batch = ForwardBatch.for_step(cache, request_slots=[slot], starts=[0], lengths=[len(ids)])
    forward(model, torch.tensor(ids, device=cache.device), batch)


def texts():
    """Token ids of worked examples: what the checkpoint was trained on."""
    tokenizer = generate._load_tokenizer(TINY)
    problems = held_out_problems(MAX_SEQS)
    prompts = [few_shot_prompt(p, make_shots(5, seed, p.context)) for seed, p in enumerate(problems)]
    return [(tokenizer(prompt).input_ids * 3)[:MAX_CONTEXT] for prompt in prompts]


# slot -> (joins at step, leaves at step, prompt length). No prompt is so short that a rounding decides its next token.
LIVES = {0: (0, 200, 120), 1: (0, 30, 20), 2: (10, 140, 127), 3: (25, 26, 60), 4: (60, 200, 33), 5: (90, 199, 250)}


class Traffic:
    """Sequences that join and leave; each step brings one token of each."""

    def __init__(self):
        self.ids = texts()

    def joining(self, step):
        return [(slot, self.ids[slot][:length]) for slot, (joins, _, length) in LIVES.items() if joins == step]

    def at(self, step):
        slots = [slot for slot, (joins, leaves, _) in LIVES.items() if joins <= step < leaves]
        slots = slots[:: 1 if step % 2 else -1]
        positions = [LIVES[slot][2] + step - LIVES[slot][0] for slot in slots]
        tokens = [self.ids[slot][position] for slot, position in zip(slots, positions, strict=True)]
        return {"tokens": tokens, "request_slots": slots, "positions": positions}


def logits_of(model, cache, traffic):
    """Eager logits, one row a token of the traffic, float32."""
    decode, rows = eager(model, cache), []
    for step in range(200):
        for slot, ids in traffic.joining(step):
            prefill(model, cache, slot, ids)
        rows.append(decode(**traffic.at(step)).float())
    return torch.cat(rows)


@pytest.fixture(scope="module")
def cpu_logits():
    """The reference's logits on the CPU in float32 over packed caches, and the rows that say something about a kernel.

    A few tokens hang on a close decision inside the model (which expert, which entry): there bfloat16 activations alone
    move the logits by much of their norm, on the CPU too.
    """
    logits = {}
    for dtype in (torch.float32, BF16):
        model = load_model(TINY, backend=ReferenceBackend(), dtype=dtype)
        logits[dtype] = logits_of(model, make_cache("cpu", dtype), Traffic())
    expected = logits[torch.float32]
    steady = (logits[BF16] - expected).norm(dim=-1) <= 0.1 * expected.norm(dim=-1)
    assert steady.float().mean() > 0.98
    return expected, steady


@each_backend
def test_200_steps_with_sequences_joining_and_leaving(name, models, cpu_logits):
    """Teacher forcing: replayed logits against eager ones bit for bit, and against the CPU."""
    model, traffic = models(name), Traffic()
    cache, twin = make_cache(), make_cache()
    replayed, plain, rows = graphs(model, cache), eager(model, twin), []
    for step in range(200):
        for slot, ids in traffic.joining(step):  # an eager prefill between two replays: row 26
            prefill(model, cache, slot, ids)
            prefill(model, twin, slot, ids)
        logits = replayed(**traffic.at(step)).clone()
        assert torch.equal(logits, plain(**traffic.at(step))), f"step {step}"
        rows.append(logits.float().cpu())
    logits, (expected, steady) = torch.cat(rows), cpu_logits
    error = relative_norm(logits[steady], expected[steady])
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > LIMIT * expected.norm(dim=-1)
    differing = logits.argmax(-1) != expected.argmax(-1)
    print(f"{name}: relative norm {error:.2e}; {int(differing.sum())} of {len(logits)} tokens differ")
    assert error <= LIMIT and clear.float().mean() > 0.5
    assert not (differing & clear).any()


@each_backend
def test_a_replay_neither_allocates_nor_waits(name, models):
    model, cache = models(name), make_cache()
    for slot in range(3):
        prefill(model, cache, slot, [5, 6, 7])
    decode = graphs(model, cache)
    decode(tokens=[8, 9, 10], request_slots=[0, 1, 2], positions=[3, 3, 3])
    _, replay = decode._steps[4]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@each_backend
def test_row_08_sinks_between_two_replays(name, models):
    model = models(name)
    layers = [decoder_layer.self_attn.layer for decoder_layer in model.model.layers]
    kept = [layer.attn_sink.detach().clone() for layer in layers]
    cache, arguments = make_cache(), {"tokens": [8], "request_slots": [0], "positions": [3]}
    prefill(model, cache, 0, [5, 6, 7])
    decode, plain = graphs(model, cache), eager(model, cache)
    try:
        old = decode(**arguments).clone()
        for layer in layers:
            layer.attn_sink.data.copy_(torch.full_like(layer.attn_sink, 4.0))
        graph = decode._steps[1]
        assert torch.equal(decode(**arguments), plain(**arguments)) and decode._steps[1] is graph
        assert not torch.equal(decode(**arguments), old)
        layers[0].attn_sink.data = torch.full_like(layers[0].attn_sink, -math.inf)
        assert torch.equal(decode(**arguments), plain(**arguments)) and decode._steps[1] is not graph
    finally:
        for layer, values in zip(layers, kept, strict=True):
            layer.attn_sink.data.copy_(values)


@each_backend
def test_generate_decodes_by_graphs(name, models):
    """Prompts outnumber the slots; answers of graphs equal those of eager steps."""
    model = models(name)
    runner = Runner(model, make_cache())
    assert (
        isinstance(runner.recorded, RecordedDecode) and Runner(model, make_cache(), cuda_graphs=False).recorded is None
    )
    prompts = [ids[: 40 + 30 * i] for i, ids in enumerate(texts())] + [[9, 10] * 4, [11] * 30]
    sampling = SamplingParams(max_new_tokens=24, stop_token_ids=frozenset({CONFIG.vocab_size - 1, 1}))
    answers = runner.generate(prompts, sampling)
    assert all(answer.finish_reason for answer in answers)
    runner.recorded = eager(model, runner.cache)
    assert runner.generate(prompts, sampling) == answers


def test_float32_is_not_captured_and_says_why():
    model = load_model(TINY, backend=ReferenceBackend(), dtype=torch.float32, device="cuda")
    assert "the experts run as 'eager'" in graph_obstacle(model)
    with pytest.raises(ValueError, match="cuda_graphs: True, but the experts run as 'eager'"):
        Runner(model, make_cache(dtype=torch.float32), cuda_graphs=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES[1:])
def test_two_gpus_answer_as_one(name):
    """Attention TP 2 over nccl, decode captured on both ranks."""
    if name == "flashmla" and (obstacle := flashmla.obstacle()):
        pytest.skip(f"FlashMLA: {obstacle}")
    args = argparse.Namespace(
        model="tiny",
        prompt=None,
        prompts_file=None,
        raw=False,
        max_new_tokens=64,
        max_context=None,
        max_batch=None,
        temperature=0.0,
        top_p=1.0,
        seed=0,
        backend=name,
        kv_format="fp8",
        dtype="bfloat16",
        device="cuda",
        attn_tp=1,
    )
    one = generate.prepare(args, progress=False).start()
    args.attn_tp = 2
    assert generate.prepare(args, progress=False).start() == one
