"""Does attention change the packaged checkpoint's answers? 500 held-out problems through every arm, greedy.

    python benchmark/tiny_accuracy.py --device cuda --out benchmark/results/tiny_accuracy-h200.json

Arms differ in the heads that the kernel is given, the KV format and the dtype. Prints a table, then one JSON line.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer

from headfit.assets.evaluate_tiny import few_shot_prompts
from headfit.assets.word_problems import held_out_problems, parse_answer
from headfit.backends.reference import ReferenceBackend
from headfit.config import DeepSeekV4Config
from headfit.generate import TINY
from headfit.hosts.transformers import load_model
from headfit.kv_cache import ModelDtypeFormat, PackedFp8Format
from headfit.model_cache import ModelCache
from headfit.runner import Runner, SamplingParams

# name -> dtype, supported_num_heads, packed KV
ARMS = {
    "exact heads, model KV": (torch.float32, None, False),
    "exact heads, packed fp8 KV": (torch.float32, None, True),
    "padded to 64 heads, packed fp8 KV": (torch.float32, (64, 128), True),
    "exact heads, bfloat16, packed fp8 KV": (torch.bfloat16, None, True),
}


def answers(arm: str, prompts: list[list[int]], stop_token: int, device: str) -> list[list[int]]:
    """Greedy tokens of each prompt through one arm."""
    dtype, supported, packed = ARMS[arm]
    model = load_model(TINY, backend=ReferenceBackend(supported_num_heads=supported), dtype=dtype, device=device)
    cache = ModelCache(
        DeepSeekV4Config.from_file(TINY),
        max_seqs=min(128, len(prompts)),
        max_context=max(map(len, prompts)) + 80,
        max_chunk=128,
        kv_format=PackedFp8Format() if packed else ModelDtypeFormat(dtype),
        dtype=dtype,
        device=device,
    )
    sampling = SamplingParams(max_new_tokens=80, stop_token_ids=frozenset({stop_token}))
    return [answer.token_ids for answer in Runner(model, cache).generate(prompts, sampling, progress=True)]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what cannot be run ends it with a message."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if found else "cpu")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not found:
        parser.error("--device: cuda, allowed where torch sees no GPU: cpu")
    if args.problems < 1:
        parser.error(f"--problems: {args.problems}, allowed: at least 1")
    return args


def main() -> None:
    """Run every arm and write the result."""
    args = parse()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    problems = held_out_problems(args.problems)
    prompts = [tokenizer(prompt).input_ids for prompt in few_shot_prompts(problems, tokenizer)]
    rows = []
    for arm in ARMS:
        start = time.perf_counter()
        texts = [tokenizer.decode(tokens) for tokens in answers(arm, prompts, tokenizer.eos_token_id, args.device)]
        right = sum(parse_answer(text) == problem.answer for text, problem in zip(texts, problems, strict=True))
        rows.append({"arm": arm, "right": right, "problems": len(problems), "seconds": time.perf_counter() - start})
        print(f"{arm:<40}{right:>5} of {len(problems)}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    result = {
        "benchmark": "tiny_accuracy",
        "gpu": torch.cuda.get_device_name() if args.device == "cuda" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit or None,
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "rows": rows,
    }
    line = json.dumps(result)
    print(line)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
