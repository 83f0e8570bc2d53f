"""Auxiliary losses of the tiny checkpoint's training: indexer, router balance and dependence on the sinks."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

from headfit.assets.evaluate_tiny import rolled_sinks

ROLLED_LOSS = 1.5
ALL_ENTRIES = 1 << 20
IGNORED = -100


class Observer:
    """Forward hooks that expose what the auxiliary losses need: indexer scores, attention on entries, routing."""

    def __init__(self, model: DeepseekV4ForCausalLM) -> None:
        self.topk = model.config.index_topk
        self.limit = torch.tensor(self.topk, device=model.device)
        self.scores: dict[int, Tensor] = {}
        self.attention: dict[int, Tensor] = {}
        self.routed: dict[int, Tensor] = {}
        self.indexers: list[nn.Module] = []
        self.routers: list[DeepseekV4TopKRouter] = []
        for index, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            if attention.layer_type == "compressed_sparse_attention":
                indexer = attention.compressor.indexer
                # Dense and sparse steps share one compiled graph: the indexer ranks all entries, the hook cuts.
                indexer.index_topk = ALL_ENTRIES
                indexer.register_forward_hook(self._cut)
                self.indexers.append(indexer)
                indexer.register_forward_pre_hook(lambda _, args: (args[0].detach(), args[1].detach(), *args[2:]))
                indexer.scorer.register_forward_hook(lambda _, args, out, i=index: self.scores.update({i: out}))
                attention.register_forward_hook(lambda _, args, out, i=index: self.attention.update({i: out[1]}))
            if isinstance(layer.mlp.gate, DeepseekV4TopKRouter):
                slot = len(self.routers)
                self.routers.append(layer.mlp.gate)
                layer.mlp.gate.register_forward_hook(lambda _, args, out, i=slot: self.routed.update({i: out[2]}))

    def _cut(self, _: nn.Module, args: tuple, ranked: Tensor) -> Tensor:
        return torch.where(torch.arange(ranked.shape[-1], device=ranked.device) < self.limit, ranked, -1)

    def start_step(self, *, dense: bool) -> None:
        """Forget the last step, and let attention see all compressed entries or the indexer's top-k of them."""
        self.scores.clear()
        self.attention.clear()
        self.routed.clear()
        self.limit.fill_(ALL_ENTRIES if dense else self.topk)

    def indexer_loss(self) -> Tensor:
        """KL from the indexer's scores to the head-summed attention over visible entries, rows weighted by its mass."""
        total = torch.zeros((), device=next(iter(self.scores.values())).device)
        for index, scores in self.scores.items():
            entries, length = scores.shape[-1], scores.shape[1]
            target = self.attention[index][..., -entries:].detach().float().sum(1)
            threshold = (torch.arange(length, device=scores.device) + 1) // (length // entries)
            visible = torch.arange(entries, device=scores.device) < threshold.unsqueeze(-1)
            predicted = scores.masked_fill(~visible, -1e4).log_softmax(-1)
            mass = target.sum(-1, keepdim=True)
            wanted = (target / mass.clamp_min(1e-9)).clamp_min(1e-9).log()
            total = total + (target * (wanted - predicted)).sum() / mass.sum().clamp_min(1e-9)
        return total

    @torch.no_grad()
    def balance_routers(self, speed: float = 1e-3) -> None:
        """Move each router's correction bias towards the experts that got fewer tokens than the mean."""
        for slot, router in enumerate(self.routers):
            counts = F.one_hot(self.routed[slot].flatten(), router.num_experts).float().sum(0)
            router.e_score_correction_bias += speed * torch.sign(counts.mean() - counts)


def rolled_loss(
    model: DeepseekV4ForCausalLM, ids: Tensor, labels: Tensor, autocast: contextlib.AbstractContextManager, tp: int
) -> float:
    """The task loss with sinks rolled by one of ``tp`` ranks; adds the hinge's gradient, except to the sinks."""
    sinks = [layer.self_attn.sinks for layer in model.model.layers]
    grads = [sink.grad.clone() for sink in sinks]
    with rolled_sinks(model, tp):
        with autocast:
            logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        F.relu(ROLLED_LOSS - loss).backward()
    for sink, grad in zip(sinks, grads, strict=True):
        sink.grad = grad
    return loss.item()
