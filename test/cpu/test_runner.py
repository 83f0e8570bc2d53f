"""The runner: batching, sampling, stopping, and what it refuses."""

import pytest

from headfit.backends.reference import ReferenceBackend
from headfit.runner import Runner, SamplingParams
from headfit.testing.models import hf_config, random_model
from headfit.testing.ranks import load_all_ranks

PROMPTS = [[5, 6, 7] * 50, [8], [9, 10] * 4, [11] * 30, [12, 13]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runner")
    random_model(hf_config((0, 4, 128), index_topk=8), seed=5).save_pretrained(folder)
    return folder


@pytest.fixture
def runner(folder):
    return Runner(*load_all_ranks(folder, backend=ReferenceBackend(), max_seqs=2, max_context=200, max_chunk=64))


def tokens(runner, prompts=PROMPTS, **sampling):
    return [answer.token_ids for answer in runner.generate(prompts, SamplingParams(**sampling))]


def test_more_prompts_than_slots_answer_as_each_alone(runner):
    together = tokens(runner, max_new_tokens=6)
    assert together == [tokens(runner, [prompt], max_new_tokens=6)[0] for prompt in PROMPTS]
    assert all(len(answer) == 6 for answer in together) and runner.cache.num_free == 2


def test_slots_that_the_caller_holds_are_left_alone(runner):
    expected = tokens(runner, max_new_tokens=2)
    held = runner.cache.allocate()
    assert tokens(runner, max_new_tokens=2) == expected
    runner.cache.release(held)
    with pytest.raises(ValueError, match="slot: 0 is not in use"):
        runner.cache.release(held)


def test_stop_token_ends_an_answer(runner):
    free = tokens(runner, PROMPTS[:2], max_new_tokens=6)
    token = free[0][2]
    stop = frozenset({token})
    answers = runner.generate(PROMPTS[:2], SamplingParams(max_new_tokens=6, stop_token_ids=stop))
    assert answers[0].token_ids == free[0][: free[0].index(token)] and answers[0].finish_reason == "stop"
    assert answers[1].finish_reason == ("stop" if stop & set(free[1]) else "length")


def test_sampling_is_repeatable_and_each_prompt_has_its_own_draws(runner):
    sampling = {"max_new_tokens": 8, "temperature": 5.0, "seed": 3}
    first = tokens(runner, [PROMPTS[1]] * 3, **sampling)
    assert first == tokens(runner, [PROMPTS[1]] * 3, **sampling)
    assert len(set(map(tuple, first))) == 3
    assert first[1] == tokens(runner, [PROMPTS[1]], **sampling | {"seed": 4})[0]


@pytest.mark.parametrize("sampling", [{"temperature": 0.001}, {"temperature": 2, "top_p": 1e-9}])
def test_narrow_sampling_is_greedy(runner, sampling):
    assert tokens(runner, max_new_tokens=3, **sampling) == tokens(runner, max_new_tokens=3)


def test_an_error_in_a_run_frees_its_slots(runner):
    expected = tokens(runner, PROMPTS[:2], max_new_tokens=2)
    for _ in range(3):
        with pytest.raises(IndexError):
            runner.generate([[5], [10_000]], SamplingParams(max_new_tokens=2))
    assert runner.cache.num_free == 2 and tokens(runner, PROMPTS[:2], max_new_tokens=2) == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5], []], r"prompts\[1\]: empty"),
        ([[5] * 190], r"prompts\[0\]: 190 tokens and max_new_tokens 20 .*200 tokens"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(runner, prompts, message):
    with pytest.raises(ValueError, match=message):
        runner.generate(prompts, SamplingParams(max_new_tokens=20))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 2.5},
        {"temperature": -1},
        {"temperature": 1e-40},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"seed": -1},
        {"seed": 2**64},
    ],
    ids=str,
)
def test_sampling_parameters_out_of_range_are_named(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"{name}.*{value}.*allowed"):
        SamplingParams(**wrong)


def test_no_prompts(runner):
    assert runner.generate([], SamplingParams()) == []
