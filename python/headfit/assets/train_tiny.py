"""Train the tiny DeepSeek-V4 checkpoint in ``tiny/`` on generated word problems, with transformers' own model.

    python -m headfit.assets.train_tiny --out CHECKPOINT          train, save, evaluate
    python -m headfit.assets.train_tiny --eval-only CHECKPOINT    evaluate a saved checkpoint

Masters are float32 under bfloat16 autocast; the checkpoint is stored in bfloat16, except for the parameters that
transformers keeps in float32. Three things differ from an ordinary language model run:

* ``sinks`` start widely spread and learn slowly, so the heads settle around clearly different values. A hinge loss on
  some steps keeps the loss with sinks rolled between ranks above ``ROLLED_LOSS``: the model breaks if they are mixed
  up, which is what a test checkpoint is for.
* The indexer's top-k passes no gradient. As in DeepSeek Sparse Attention (DeepSeek-V3.2 report, section 2.1) the
  indexer learns from a KL loss towards the layer's own attention over the compressed entries, first with attention
  dense over all entries, then with the top-k selection on and a dense step every ``DENSE_EVERY`` steps.
* The top-k routers are balanced with ``e_score_correction_bias`` (DeepSeek-V3, section 2.1.2).
"""

import argparse
import contextlib
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import DeepseekV4ForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from headfit.assets.evaluate_tiny import CONDITIONS, evaluate
from headfit.assets.tiny_losses import IGNORED, Observer, rolled_loss
from headfit.assets.tiny_model import VOCAB_SIZE, dense_experts, make_config, make_model, save
from headfit.assets.tiny_tokenizer import build_tokenizer
from headfit.assets.word_problems import PRICED_GOODS, draw_shots, make_price_list, price_drill, question_prompt

ROLL_EVERY = 16
DENSE_EVERY = 4
DRILL_SHARE = 0.35


class Documents(IterableDataset):
    """Endless few-shot documents of fixed length: an optional price list, then worked problems.

    Each problem is the zero-shot, one-shot, ... test of those before it. Yields ``input_ids`` and next-token
    ``labels``; after the last digit of an answer the label is EOS although the document goes on, so that a completion
    ends with its answer. Only solutions carry labels.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, length: int, seed: int) -> None:
        self.tokenizer = tokenizer
        self.length = length
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed}-{worker.id if worker else 0}")
        while True:
            yield self._document(rng)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def _document(self, rng: random.Random) -> tuple[Tensor, Tensor]:
        context = make_price_list(rng, rng.randint(4, PRICED_GOODS)) if rng.random() < 0.7 else ""
        ids = [self.tokenizer.bos_token_id] + (self._encode(f"{context}\n\n") if context else [])
        labels = [IGNORED] * len(ids)
        gap = self._encode("\n\n")
        while len(ids) < self.length:
            drill = context and rng.random() < DRILL_SHARE
            problem = price_drill(rng, context) if drill else draw_shots(rng, 1, context)[0]
            question = self._encode(question_prompt(problem))
            solution = self._encode(f" {problem.solution}")
            ids += question + solution + gap
            labels += [IGNORED] * (len(question) - 1) + solution + [self.tokenizer.eos_token_id] + [IGNORED] * len(gap)
        return torch.tensor(ids[: self.length]), torch.tensor(labels[: self.length])


def parameter_groups(model: nn.Module, lr: float) -> list[dict]:
    """Weight decay on matrices only; sinks learn at a tenth of the rate and keep their spread."""
    groups: dict[str, list[nn.Parameter]] = {"matrix": [], "vector": [], "sinks": []}
    for name, parameter in model.named_parameters():
        kind = "sinks" if name.endswith("sinks") else "vector" if parameter.ndim < 2 or "bias" in name else "matrix"
        groups[kind].append(parameter)
    return [
        {"params": groups["matrix"], "lr": lr, "weight_decay": 0.05},
        {"params": groups["vector"], "lr": lr, "weight_decay": 0.0},
        {"params": groups["sinks"], "lr": 0.1 * lr, "weight_decay": 0.0},
    ]


def learning_rate(step: int, steps: int, warmup: int = 200) -> float:
    """Linear warm-up, then cosine to zero, as a factor of the peak."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train(model: DeepseekV4ForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> dict:
    """Run the training loop; returns the recipe's outcome: steps, seconds and the mean loss of the last 100 steps."""
    device = torch.device(args.device)
    model.to(device).train()
    ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)
    model.set_experts_implementation("dense")
    observer = Observer(model)
    if args.compile:
        torch._dynamo.config.recompile_limit = 32
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(parameter_groups(model, args.lr), betas=(0.9, 0.95), fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args.steps))
    loader = DataLoader(Documents(tokenizer, args.length, args.seed), args.batch, num_workers=args.workers)
    autocast = torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()
    start, losses, rolled = time.time(), [], math.nan
    for step, (ids, labels) in zip(range(args.steps), loader, strict=False):
        ids, labels = ids.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        dense = step < args.steps // 2 or step % DENSE_EVERY == 0
        observer.start_step(dense=dense)
        with autocast:
            logits = model(input_ids=ids, use_cache=False).logits
        task = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        selection = observer.indexer_loss() if dense else torch.zeros_like(task)
        observer.balance_routers()
        (task + selection).backward()
        if step >= 200 and step % ROLL_EVERY == 0:
            observer.start_step(dense=dense)
            rolled = rolled_loss(model, ids, labels, autocast, tp=2 ** (1 + step // ROLL_EVERY % 3))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(task.detach())
        if step % args.log_every == 0:
            known = labels != IGNORED
            correct = (logits.argmax(-1) == labels)[known].float().mean()
            print(
                f"step {step} loss {task:.4f} token accuracy {correct:.4f} indexer {selection:.4f} "
                f"rolled {rolled:.2f} "
                f"grad {norm:.2f} seconds {time.time() - start:.0f}",
                flush=True,
            )
    final = torch.stack(losses[-100:]).mean().item()
    return {"steps": len(losses), "seconds": round(time.time() - start), "final_loss": round(final, 4)}


def main() -> None:
    """Train and save, or only evaluate; print the accuracies and write them where asked."""
    parser = argparse.ArgumentParser(description="Train or evaluate headfit's tiny DeepSeek-V4 checkpoint.")
    parser.add_argument("--out", type=Path, help="folder for the trained checkpoint")
    parser.add_argument("--eval-only", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--results", type=Path, help="JSON file for the measured accuracies")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=640)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--problems", type=int, default=500, help="held-out problems to evaluate on")
    parser.add_argument("--conditions", nargs="*", default=CONDITIONS, choices=CONDITIONS)
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    results: dict = {}
    checkpoint = args.eval_only
    if checkpoint is None:
        torch.manual_seed(args.seed)
        tokenizer = build_tokenizer(VOCAB_SIZE, args.seed)
        model = make_model(make_config(tokenizer))
        results["training"] = train(model, tokenizer, args)
        save(model, tokenizer, args.out)
        checkpoint = args.out
    results |= evaluate(checkpoint, args.problems, args.device, args.conditions)
    print(json.dumps(results, indent=2))
    if args.results:
        args.results.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
