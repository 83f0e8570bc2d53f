"""The ratio-4 indexer picks the same entries as transformers', and the oracle would notice if it did not."""

import pytest
import torch
from transformers import DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Indexer, DeepseekV4IndexerScorer

from headfit.backends.reference import ReferenceBackend
from headfit.forward_batch import ForwardBatch
from headfit.hosts.transformers import forward
from headfit.layers.indexer import Indexer
from headfit.testing.measure import relative_norm
from headfit.testing.models import hf_config, random_model
from headfit.testing.ranks import load_all_ranks

LENGTH = 600
VISIBLE = torch.arange(1, LENGTH + 1) // 4  # entries complete at each token


class Recorded:
    """One prompt through transformers and through headfit, with what every ratio-4 layer selected."""

    def __init__(self, folder, index_topk: int) -> None:
        config = hf_config((4, 4), index_topk=index_topk)
        random_model(config, seed=11).save_pretrained(folder)
        self.ids = torch.randint(0, config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(5))
        oracle = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.expected, self.scores = [], []
        for module in oracle.modules():
            if isinstance(module, DeepseekV4Indexer):
                module.register_forward_hook(lambda _, args, out: self.expected.append(out[0]))
            if isinstance(module, DeepseekV4IndexerScorer):
                module.register_forward_hook(lambda _, args, out: self.scores.append(out[0]))
        self.model, self.cache = load_all_ranks(folder, backend=ReferenceBackend())
        self.picked = []
        for module in self.model.modules():
            if isinstance(module, Indexer):
                module.register_forward_hook(lambda _, args, out: self.picked.append(out))
        with torch.inference_mode():
            self.oracle_logits = oracle(self.ids[None]).logits[0]
        self.logits = self.run()

    @torch.inference_mode()
    def run(self) -> torch.Tensor:
        batch = ForwardBatch.for_step(self.cache, request_slots=[0], starts=[0], lengths=[LENGTH])
        return forward(self.model, self.ids, batch)


@pytest.fixture(scope="module", params=[8, 32, 512])
def recorded(request, tmp_path_factory):
    return Recorded(tmp_path_factory.mktemp("selection"), request.param)


def differing_rows(picked: torch.Tensor, expected: torch.Tensor) -> list[int]:
    """Tokens whose selected sets differ."""
    return [t for t in range(LENGTH) if set(picked[t].tolist()) - {-1} != set(expected[t].tolist()) - {-1}]


def test_selected_sets_equal_transformers(recorded):
    topk = recorded.picked[0].shape[1]
    for picked, expected, scores in zip(recorded.picked, recorded.expected, recorded.scores, strict=True):
        chosen = (picked >= 0).sum(dim=1)
        assert torch.equal(chosen, VISIBLE.clamp(max=topk))
        for t in differing_rows(picked, expected):
            # Only a tie at the cut excuses a difference: scores that float32 cannot order, or both exactly 0.
            ours, theirs = (set(row[t].tolist()) - {-1} for row in (picked, expected))
            cut = [scores[t, list(ours - theirs)], scores[t, list(theirs - ours)]]
            assert relative_norm(cut[0].sort().values, cut[1].sort().values) <= 1e-6, (t, cut)


def test_logits_behind_the_selection(recorded):
    assert relative_norm(recorded.logits, recorded.oracle_logits) <= 1e-5


def first_k(topk: int) -> torch.Tensor:
    k = torch.arange(topk).expand(LENGTH, -1)
    return torch.where(k < VISIBLE[:, None], k, -1)


def last_k(topk: int) -> torch.Tensor:
    k = VISIBLE[:, None] - 1 - torch.arange(topk)
    return torch.where(k >= 0, k, -1)


@pytest.mark.parametrize("recorded", [8, 32], indirect=True)  # with 512 every visible entry is selected
@pytest.mark.parametrize("mutation", [first_k, last_k])
def test_a_selection_that_ignores_the_scores_is_noticed(recorded, mutation, monkeypatch):
    topk = recorded.picked[0].shape[1]
    true_forward = Indexer.forward

    def mutated(self, *args):
        true_forward(self, *args)  # still stores the index keys
        return mutation(topk)

    monkeypatch.setattr(Indexer, "forward", mutated)
    assert differing_rows(mutation(topk), recorded.expected[0])
    assert relative_norm(recorded.run(), recorded.oracle_logits) > 1e-3
