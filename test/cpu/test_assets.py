"""The packaged checkpoint: headfit's greedy answers are transformers' own, on every attention-TP size."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, DeepseekV4ForCausalLM

from headfit.assets.evaluate_tiny import few_shot_prompts
from headfit.assets.word_problems import few_shot_prompt, held_out_problems, parse_answer
from headfit.backends.reference import ReferenceBackend
from headfit.config import DeepSeekV4Config
from headfit.generate import TINY
from headfit.kv_cache import PackedFp8Format
from headfit.runner import Runner, SamplingParams
from headfit.testing.ranks import load_all_ranks

NUM_PROMPTS, NUM_FEW_SHOT = 50, 6  # the others are bare questions, which a CPU gets through sooner
SAMPLING = SamplingParams(max_new_tokens=80, stop_token_ids=frozenset({1}))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def problems():
    return held_out_problems(NUM_PROMPTS)


@pytest.fixture(scope="module")
def prompts(tokenizer, problems):
    texts = few_shot_prompts(problems[:NUM_FEW_SHOT], tokenizer)
    texts += [few_shot_prompt(problem, []) for problem in problems[NUM_FEW_SHOT:]]
    return [tokenizer(text).input_ids for text in texts]


@pytest.fixture(scope="module")
def expected(prompts):
    """transformers' greedy tokens, one prompt a call, without the stop token."""
    model = DeepseekV4ForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=SAMPLING.max_new_tokens,
                eos_token_id=sorted(SAMPLING.stop_token_ids),
            )
        tokens = out[0, len(prompt) :].tolist()
        answers.append([token for token in tokens if token not in SAMPLING.stop_token_ids])
    return answers


def answers(prompts, *, attn_tp_size: int = 1, kv_format=None):
    model, cache = load_all_ranks(
        TINY,
        backend=ReferenceBackend(),
        attn_tp_size=attn_tp_size,
        max_seqs=NUM_PROMPTS,
        max_context=600,
        max_chunk=128,
        kv_format=kv_format,
    )
    return [answer.token_ids for answer in Runner(model, cache).generate(prompts, SAMPLING)]


@pytest.mark.parametrize("attn_tp_size", [1, 2, 4])
def test_greedy_tokens_equal_transformers(prompts, expected, attn_tp_size):
    assert answers(prompts, attn_tp_size=attn_tp_size) == expected


def right(tokenizer, problems, token_ids) -> list[bool]:
    texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
    return [parse_answer(text) == problem.answer for text, problem in zip(texts, problems, strict=True)]


def test_packed_fp8_keeps_the_accuracy(tokenizer, problems, prompts, expected):
    """At least 90% right, as the checkpoint promises, and no more lost than chance explains.

    With p = 1/2 for each discordant problem, 6 lost and none won has probability 1/64.
    """
    exact = right(tokenizer, problems, expected)
    packed = right(tokenizer, problems, answers(prompts, kv_format=PackedFp8Format()))
    assert sum(exact) >= 0.9 * NUM_PROMPTS
    lost = sum(a and not b for a, b in zip(exact, packed, strict=True))
    won = sum(b and not a for a, b in zip(exact, packed, strict=True))
    assert lost - won < 6, (lost, won)


def test_few_shot_prompts_exercise_the_selection(prompts, tokenizer):
    assert tokenizer.eos_token_id == 1
    topk = DeepSeekV4Config.from_file(TINY).index_topk
    assert 8 <= topk <= 32
    assert all(300 <= len(prompt) <= 600 and len(prompt) // 4 >= 4 * topk for prompt in prompts[:NUM_FEW_SHOT])


def test_the_checkpoint_is_small_and_complete():
    config = DeepSeekV4Config.from_file(TINY)
    assert {0, 4, 128} == set(config.compress_ratios)
    assert config.num_heads >= 16 and config.o_groups >= 8 and 0 < config.num_hash_layers < config.num_hidden_layers
    assert sum(file.stat().st_size for file in Path(TINY).iterdir()) <= 16 * 2**20
    assert {"README.md", "tokenizer.json", "config.json"} <= {file.name for file in Path(TINY).iterdir()}
