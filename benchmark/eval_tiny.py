"""Does `headfit eval` call the packaged checkpoint's arms equal, and see a fault? 500 held-out problems in process.

    python benchmark/eval_tiny.py --device cuda --out benchmark/results/eval_tiny-h200.json

Every arm is compared with the first. Two controls: sampled arms that differ in their seed alone, 20 pairs, of which at
most 3 may look significant; and a planted fault, rank 0's sinks on every rank, which must be. Prints a table, then one
JSON line; exits 1 where a control fails. Runs are kept in --runs, and an interrupted benchmark goes on with them.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from headfit import backends, cli
from headfit.assets.word_problems import WordProblem, held_out_problems, make_shots
from headfit.evals import command
from headfit.evals.compare import Comparison, compare_runs
from headfit.evals.report import points
from headfit.evals.store import read_run

MAX_TOKENS = 80
CONTROL_PAIRS, MOST_SIGNIFICANT = 20, 3
CONTROL_TEMPERATURE = 1.5  # about one answer in ten wrong
FAULT_P = 1e-3


def sinks_of_rank_0(model: Any, attn_tp: int) -> None:
    """Give the heads of every rank of `attn_tp` the sinks of rank 0's heads."""
    for layer in model.model.layers:
        sink = layer.self_attn.layer.attn_sink
        sink.data.copy_(sink.data[: len(sink) // attn_tp].repeat(attn_tp))


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run the checkpoint: options of `headfit eval`, and what has no option."""

    options: tuple[str, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    attn_tp: int = 1


def options(kv_format: str = "model", dtype: str = "float32", backend: str = "reference") -> tuple[str, ...]:
    """Of an arm; the first arm's where not given."""
    return ("--backend", backend, "--kv-format", kv_format, "--dtype", dtype)


FAULT = "fault: rank 0's sinks"
ARMS = {
    "exact heads": Arm(options()),
    "padded to 64 heads": Arm(options(), {"pad_heads_to": (64, 128)}),
    "packed fp8 KV": Arm(options("fp8")),
    "padded, packed fp8 KV": Arm(options("fp8"), {"pad_heads_to": (64, 128)}),
    "bfloat16, packed fp8 KV": Arm(options("fp8", "bfloat16")),
    "unified_kv_triton": Arm(options("fp8", "bfloat16", "unified_kv_triton")),
    "sparse_mqa_cuda": Arm(options("fp8", "bfloat16", "sparse_mqa_cuda")),
    "attention TP 2": Arm(options(), attn_tp=2),
    "attention TP 4": Arm(options(), attn_tp=4),
    FAULT: Arm(options(), {"alter": partial(sinks_of_rank_0, attn_tp=8)}),
}
FIRST = next(iter(ARMS))


def write_problems(file: Path, problems: list[WordProblem]) -> Path:
    """Problems in GSM8K's form."""
    rows = [json.dumps({"question": problem.question, "answer": problem.solution}) for problem in problems]
    file.write_text("\n".join(rows) + "\n")
    return file


def run_arm(
    arm: Arm, out: Path, *, problems: int, shots: int, device: str, batch: int, more: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Run or go on with one arm; its score. The problems lie beside `out`."""
    data = write_problems(out.parent / f"held_out_{problems}.jsonl", held_out_problems(problems))
    argv = ["eval", "gsm8k", "--local", "tiny", "--device", device, "--data", data, "--out", out, *arm.options]
    argv += ["--num-shots", shots, "--max-tokens", MAX_TOKENS, "--max-batch", batch, "--attn-tp", arm.attn_tp, *more]
    if shots:
        argv += ["--shots", write_problems(out.parent / f"shots_{shots}.jsonl", make_shots(shots, seed=0))]
    args = cli.parse([str(each) for each in argv])
    run = command.prepare(args, progress=sys.stderr.isatty(), **arm.changes)
    with run.open() as store:
        return run.answer(store).summary()


def compare(a: Path, b: Path) -> Comparison:
    """Two arms' runs."""
    return compare_runs(read_run(a), read_run(b), (a.stem, b.stem))


def obstacle(arm: Arm, device: str) -> str | None:
    """Why an arm cannot run here."""
    if device == "cuda" and (found := torch.cuda.device_count()) < arm.attn_tp:
        return f"needs {arm.attn_tp} GPUs, found {found}"
    asked = dict(zip(arm.options[::2], arm.options[1::2], strict=True))
    dtype = getattr(torch, asked["--dtype"])
    try:
        backends.choose(asked["--backend"], device, kv_format=asked["--kv-format"], dtype=dtype)
    except ValueError as error:
        return str(error)
    return None


def run_arms(names: list[str], folder: Path, **shape: Any) -> list[dict[str, Any]]:
    """A row an arm: its score, and what it differs by from the first."""
    rows = []
    for name in names:
        arm, out = ARMS[name], folder / f"{'-'.join(name.replace(':', '').split())}.jsonl"
        if reason := obstacle(arm, shape["device"]):
            rows.append({"arm": name, "not_run": reason})
            print(f"{name:<26} not run: {reason}", flush=True)
            continue
        start = time.perf_counter()
        score = run_arm(arm, out, **shape)
        row = {"arm": name, "seconds": round(time.perf_counter() - start, 1), "score": score}
        line = f"{name:<26}{score['extractors']['marked']['right']:>5} of {score['answers']}"
        if rows:
            found = compare(folder / f"{'-'.join(FIRST.split())}.jsonl", out).summary()
            row |= {key: found[key] for key in ("differences", "warnings", "verdict", "words")}
            marked = found["differences"]["marked"]
            line += f"  {points(marked['difference'])}, p = {marked['mcnemar_p']:.2g}: {found['verdict']}"
        rows.append(row)
        print(line, flush=True)
    return rows


def negative_control(folder: Path, **shape: Any) -> dict[str, Any]:
    """Pairs of sampled arms of one model: p of each pair."""
    outs = []
    for seed in range(2 * CONTROL_PAIRS):
        outs.append(folder / f"seed{seed}.jsonl")
        more = ("--temperature", CONTROL_TEMPERATURE, "--seed", seed)
        run_arm(ARMS[FIRST], outs[-1], more=more, **shape)
    found = [compare(*outs[pair : pair + 2]).differences["marked"] for pair in range(0, len(outs), 2)]
    significant = sum(each.significant for each in found)
    print(f"negative control: {significant} of {len(found)} pairs have p < 0.05 (at most {MOST_SIGNIFICANT} may)")
    return {
        "problems": shape["problems"],
        "temperature": CONTROL_TEMPERATURE,
        "p": [each.p for each in found],
        "discordant": [each.losses + each.gains for each in found],
        "significant": significant,
        "passed": significant <= MOST_SIGNIFICANT,
    }


def main() -> int:
    """Run arms and controls and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--problems", type=int, default=500)
    add("--shots", type=int, default=5)
    add("--batch", type=int, default=128)
    add("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM", help="the first always runs")
    add("--control-problems", type=int, default=100, help="of each of 40 sampled arms; 0: no negative control")
    add("--runs", type=Path, help="folder for the runs (default: a new one in the temporary directory)")
    add("--out", type=Path)
    args = parser.parse_args()
    folder = args.runs or Path(tempfile.mkdtemp(prefix="eval-tiny-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"runs in {folder}")
    shape = {"shots": args.shots, "device": args.device, "batch": args.batch}
    names = [FIRST, *(name for name in args.arms if name != FIRST)]
    rows = run_arms(names, folder, problems=args.problems, **shape)
    control = negative_control(folder, problems=args.control_problems, **shape) if args.control_problems else None
    planted = next((row for row in rows if row["arm"] == FAULT), None)
    seen = None if planted is None else planted["differences"]["marked"]["mcnemar_p"] < FAULT_P
    if seen is not None:
        print(f"planted fault {'seen' if seen else 'NOT SEEN'} at p < {FAULT_P}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    result = {
        "benchmark": "eval_tiny",
        "gpu": torch.cuda.get_device_name() if args.device == "cuda" else None,
        "gpus": torch.cuda.device_count() if args.device == "cuda" else 0,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit or None,
        "date": date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "rows": rows,
        "negative_control": control,
        "planted_fault_seen": seen,
    }
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if seen is False or (control and not control["passed"]) else 0


if __name__ == "__main__":
    sys.exit(main())
