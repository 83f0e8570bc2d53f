"""Attention TP over two real processes: each holds its half of the heads, gloo adds the halves up."""

import itertools

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from headfit.launch import run_local_ranks
from headfit.testing.measure import relative_norm
from headfit.testing.models import hf_config, random_model

PROMPT_LENGTH, LENGTH = 261, 265


def logits_of_a_rank(group, device, folder, ids):
    """Prefill in two chunks, then decode token by token: the logits of all tokens, and what this rank holds."""
    from headfit.backends.reference import ReferenceBackend
    from headfit.config import DeepSeekV4Config
    from headfit.forward_batch import ForwardBatch
    from headfit.hosts.transformers import experts_shard_over, forward, load_model
    from headfit.kv_cache import ModelDtypeFormat
    from headfit.model_cache import ModelCache

    model = load_model(folder, backend=ReferenceBackend(), group=group)
    cache = ModelCache(
        DeepSeekV4Config.from_file(folder),
        max_seqs=1,
        max_context=LENGTH,
        max_chunk=LENGTH,
        kv_format=ModelDtypeFormat(torch.float32),
        dtype=torch.float32,
    )
    out = []
    cuts = [0, 130, *range(PROMPT_LENGTH, LENGTH + 1)]
    with torch.inference_mode():
        for start, stop in itertools.pairwise(cuts):
            batch = ForwardBatch.for_step(cache, request_slots=[0], starts=[start], lengths=[stop - start])
            out.append(forward(model, ids[start:stop], batch))
    experts = model.model.layers[1].mlp.experts.down_proj
    held = experts.to_local() if hasattr(experts, "to_local") else experts
    layer = model.model.layers[0].self_attn.layer
    return {
        "logits": torch.cat(out).numpy(),
        "heads": layer.wq_b.weight.shape[0] // layer.head_dim,
        "expert_share": held.numel() / experts.numel(),
        "shards_experts": experts_shard_over(group.size)[0],
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    config = hf_config((0, 4, 128), index_topk=8)
    random_model(config, seed=9).save_pretrained(folder)
    ids = torch.randint(0, config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        expected = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids[None]).logits[0]
    return run_local_ranks(logits_of_a_rank, 2, args=(str(folder), ids), timeout=240), expected


def test_logits_equal_transformers(two_ranks):
    result, expected = two_ranks
    assert relative_norm(torch.from_numpy(result["logits"]), expected) <= 1e-5


def test_each_rank_holds_half(two_ranks):
    result, _ = two_ranks
    assert result["heads"] == 8
    assert result["expert_share"] == (0.5 if result["shards_experts"] else 1.0)
