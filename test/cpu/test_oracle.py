"""Logits of prefill and decode against transformers' DeepSeek-V4, float32, unquantised.

Attention is causal, so one oracle run over 1000 tokens is the oracle of every shorter prompt and every decode step.
"""

import itertools

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from headfit.backends.reference import ReferenceBackend
from headfit.forward_batch import ForwardBatch
from headfit.hosts.transformers import forward
from headfit.testing.measure import relative_norm
from headfit.testing.models import hf_config, random_model
from headfit.testing.ranks import load_all_ranks

LIMIT = 1e-5  # the requirement is 1e-4
LENGTH = 1000
# Each ratio alone, then mixed; selection drops entries from 4 * topk tokens on.
MODELS = {
    "window": ((0,), 32),
    "ratio4-topk8": ((4,), 8),
    "ratio4-topk512": ((4,), 512),
    "ratio128": ((128,), 32),
    "mixed-topk32": ((0, 4, 128, 4), 32),
}


class Oracle:
    """A random checkpoint on disk, two prompts of 1000 tokens and transformers' logits at each of their tokens."""

    def __init__(self, name: str, folder) -> None:
        ratios, index_topk = MODELS[name]
        self.folder = folder / name
        random_model(hf_config(ratios, index_topk=index_topk), seed=7).save_pretrained(self.folder)
        model = DeepseekV4ForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(3)
        self.prompts = [torch.randint(0, model.config.vocab_size, (LENGTH,), generator=generator) for _ in range(2)]
        with torch.inference_mode():
            self.logits = [model(ids[None]).logits[0] for ids in self.prompts]


@pytest.fixture(scope="session")
def oracle(tmp_path_factory):
    made = {}

    def get(name: str) -> Oracle:
        if name not in made:
            made[name] = Oracle(name, tmp_path_factory.mktemp("oracle"))
        return made[name]

    return get


class Driver:
    """Feeds a model's cache step by step and compares each step's logits with the oracle's."""

    def __init__(self, oracle: Oracle, *, attn_tp_size: int = 1, backend=None, max_chunk: int = LENGTH) -> None:
        self.oracle = oracle
        self.model, self.cache = load_all_ranks(
            oracle.folder, backend=backend or ReferenceBackend(), attn_tp_size=attn_tp_size, max_chunk=max_chunk
        )
        self.errors = []

    @torch.inference_mode()
    def step(self, *parts: tuple[int, int, int, int]) -> None:
        """For each (slot, which, start, stop): tokens [start, stop) of prompt `which` into request slot `slot`."""
        batch = ForwardBatch.for_step(
            self.cache,
            request_slots=[slot for slot, _, _, _ in parts],
            starts=[start for _, _, start, _ in parts],
            lengths=[stop - start for _, _, start, stop in parts],
        )
        self._compare(batch, parts)

    @torch.inference_mode()
    def decode(self, *parts: tuple[int, int, int]) -> None:
        """One token per sequence through the static-shape metadata, for each (slot, which, position)."""
        batch = ForwardBatch.for_decode(
            self.cache,
            request_slots=torch.tensor([slot for slot, _, _ in parts]),
            positions=torch.tensor([position for _, _, position in parts]),
        )
        self._compare(batch, [(slot, which, position, position + 1) for slot, which, position in parts])

    def _compare(self, batch: ForwardBatch, parts) -> None:
        ids = torch.cat([self.oracle.prompts[which][start:stop] for _, which, start, stop in parts])
        expected = torch.cat([self.oracle.logits[which][start:stop] for _, which, start, stop in parts])
        self.errors.append(relative_norm(forward(self.model, ids, batch), expected))

    def check(self) -> None:
        assert self.errors and max(self.errors) <= LIMIT, self.errors


@pytest.mark.parametrize("name", MODELS)
def test_prompt_lengths_then_decode(oracle, name):
    driver = Driver(oracle(name))
    for length in (1, 3, 4, 5, 127, 128, 129, 300):
        driver.step((0, 0, 0, length))
        for position in range(length, length + 5):
            driver.decode((0, 0, position))
    driver.check()


@pytest.mark.parametrize("name", ["ratio4-topk8", "mixed-topk32"])
def test_a_thousand_tokens_at_once_then_in_chunks(oracle, name):
    driver = Driver(oracle(name))
    driver.step((0, 0, 0, LENGTH - 4))
    for position in range(LENGTH - 4, LENGTH):
        driver.decode((0, 0, position))
    cuts = [0, 1, 3, 6, 126, 130, 131, 255, 384, 389, 520, 1000]  # across 4, 128 and window borders
    for start, stop in itertools.pairwise(cuts):
        driver.step((1, 1, start, stop))
    driver.check()


def test_ragged_batches_of_chunks_and_single_tokens(oracle):
    driver = Driver(oracle("mixed-topk32"), max_chunk=200)
    driver.step((2, 0, 0, 5), (0, 1, 0, 200), (3, 1, 0, 1))
    driver.step((3, 1, 1, 131), (2, 0, 5, 6), (0, 1, 200, 259))
    driver.step((0, 1, 259, 260), (3, 1, 131, 132), (2, 0, 6, 7))
    driver.decode((0, 1, 260), (2, 0, 7), (3, 1, 132))
    driver.step((1, 0, 0, 129), (2, 0, 8, 140))
    driver.check()


def test_a_released_slot_leaks_nothing_into_the_next_sequence(oracle):
    driver = Driver(oracle("mixed-topk32"))
    driver.step((0, 1, 0, 300))
    driver.step((0, 0, 0, 6))
    for position in range(6, 10):
        driver.decode((0, 0, position))
    driver.check()


def test_padding_rows_of_a_static_decode_change_nothing(oracle):
    driver = Driver(oracle("mixed-topk32"))
    driver.step((0, 0, 0, 127), (1, 1, 0, 3))
    before = [layer.window.buffer.clone() for layer in driver.cache.layers]
    with torch.inference_mode():
        batch = ForwardBatch.for_decode(
            driver.cache, request_slots=torch.tensor([0, 0]), positions=torch.tensor([-1, -1])
        )
        forward(driver.model, torch.tensor([1, 2]), batch)
    for old, layer in zip(before, driver.cache.layers, strict=True):
        assert torch.equal(old[:-1], layer.window.buffer[:-1])
    driver.decode((0, 0, 127), (1, 1, 3))
    driver.check()


def test_row_19_steps_without_tokens(oracle):
    driver = Driver(oracle("mixed-topk32"))
    driver.step((0, 0, 0, 5))
    none = torch.empty(0, dtype=torch.int64)
    for batch in (
        ForwardBatch.for_step(driver.cache, request_slots=[0], starts=[5], lengths=[0]),
        ForwardBatch.for_step(driver.cache, request_slots=[], starts=[], lengths=[]),
        ForwardBatch.for_decode(driver.cache, request_slots=none, positions=none),
    ):
        for decoder_layer in driver.model.model.layers:
            x = torch.empty(0, driver.model.config.hidden_size)
            assert decoder_layer.self_attn.layer(x, batch.positions, batch).shape == x.shape
    driver.step((0, 0, 5, 9), (1, 1, 0, 0), (2, 1, 0, 3))  # one sequence of a batch may bring nothing
    driver.check()


@pytest.mark.parametrize(
    ("name", "attn_tp_size"),
    [*[("mixed-topk32", size) for size in (2, 4, 8)], *[(name, 8) for name in ("window", "ratio4-topk8", "ratio128")]],
)
def test_every_rank_of_attention_tp(oracle, name, attn_tp_size):
    driver = Driver(oracle(name), attn_tp_size=attn_tp_size)
    driver.step((0, 0, 0, 126))
    driver.step((0, 0, 126, 261), (1, 1, 0, 4))
    driver.decode((0, 0, 261), (1, 1, 4))
    driver.check()


def test_attention_tp_through_a_padded_kernel(oracle):
    driver = Driver(oracle("mixed-topk32"), attn_tp_size=4, backend=ReferenceBackend(supported_num_heads=(64, 128)))
    driver.step((0, 0, 0, 130))
    driver.decode((0, 0, 130))
    driver.check()


def test_shuffled_pages(oracle):
    driver = Driver(oracle("mixed-topk32"))
    generator = torch.Generator().manual_seed(1)
    for table in (driver.cache.window_table, *driver.cache.entry_tables.values()):
        table.copy_(torch.randperm(table.numel(), generator=generator).view_as(table))
    driver.step((0, 0, 0, 140), (1, 1, 0, 300))
    driver.decode((0, 0, 140), (1, 1, 300))
    driver.check()


def test_transformers_own_cached_decode(oracle):
    """The oracle's own decode agrees with its prefill, so comparing decode steps with prefill logits is fair."""
    case = oracle("mixed-topk32")
    model = DeepseekV4ForCausalLM.from_pretrained(case.folder, dtype=torch.float32).eval()
    ids = case.prompts[0]
    with torch.inference_mode():
        out = model(ids[None, :130], use_cache=True)
        for position in range(130, 134):
            out = model(
                ids[None, position : position + 1],
                past_key_values=out.past_key_values,
                position_ids=torch.tensor([[position]]),
                use_cache=True,
            )
            assert relative_norm(out.logits[0, -1], case.logits[0][position]) <= LIMIT
