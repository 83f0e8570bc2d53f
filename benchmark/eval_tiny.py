"""Does `headfit eval` call the packaged checkpoint's arms equal, and see a fault? 500 held-out problems in process.

    python benchmark/eval_tiny.py --device cuda --out benchmark/results/eval_tiny-h200.json

Every arm is compared with the first. Two controls: sampled arms that differ in their seed alone, 20 pairs, of which at
most 3 may look significant; and a planted fault, rank 0's sinks on every rank, which must be. Prints a table, then one
JSON line; exits 1 where a control fails. Runs are kept in --runs, and an interrupted benchmark goes on with them; --out
is written anew after every arm.

--jobs arms run at a time, each in a process of its own: a decode step of a model this small is bound by the CPU.
"""

import argparse
import json
import multiprocessing
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from measured_on import git_commit

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
    "flashmla, padded to 64": Arm(options("fp8", "bfloat16", "flashmla")),
    "attention TP 2": Arm(options(), attn_tp=2),
    "attention TP 4": Arm(options(), attn_tp=4),
    FAULT: Arm(options(), {"alter": partial(sinks_of_rank_0, attn_tp=8)}),
}
FIRST = next(iter(ARMS))


def write_problems(file: Path, problems: list[WordProblem]) -> Path:
    """Problems in GSM8K's form. The file is there whole or not at all, as arms that run together share it."""
    rows = [json.dumps({"question": problem.question, "answer": problem.solution}) for problem in problems]
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text("\n".join(rows) + "\n")
    return new.replace(file)


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


@dataclass(frozen=True, slots=True)
class Deferred:
    """Work that is done when its result is asked for."""

    work: Callable[[], Any]

    def result(self) -> Any:
        """Do it."""
        return self.work()


Submit = Callable[..., Any]
"""Takes a function and its arguments; what it returns has the `result()`."""


def timed_arm(arm: Arm, out: Path, **how: Any) -> tuple[dict[str, Any], float]:
    """`run_arm`, and the seconds that it took."""
    start = time.perf_counter()
    return run_arm(arm, out, **how), round(time.perf_counter() - start, 1)


def one_thread() -> None:
    """A worker's start: torch on one thread, since the other cores have their own arms."""
    torch.set_num_threads(1)


@contextmanager
def workers(jobs: int) -> Iterator[Submit]:
    """Runs what is submitted, `jobs` at a time; with one job in this process, when its result is asked for."""
    if jobs == 1:
        yield lambda work, *args, **kwargs: Deferred(partial(work, *args, **kwargs))
        return
    # Spawned: a forked CUDA context is unusable.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=one_thread) as pool:
        try:
            yield pool.submit
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def file_of(name: str, folder: Path) -> Path:
    """An arm's run."""
    return folder / f"{'-'.join(re.findall(r'[A-Za-z0-9_]+', name))}.jsonl"


def start_arms(names: list[str], folder: Path, submit: Submit, **shape: Any) -> dict[str, Any]:
    """The arms' runs; of an arm that cannot run here the reason."""
    return {
        name: obstacle(ARMS[name], shape["device"]) or submit(timed_arm, ARMS[name], file_of(name, folder), **shape)
        for name in names
    }


def rows_of(runs: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """A row an arm, when it is there: its score, and what it differs by from the first."""
    for name, run in runs.items():
        if isinstance(run, str):
            print(f"{name:<26} not run: {run}", flush=True)
            yield {"arm": name, "not_run": run}
            continue
        try:
            score, seconds = run.result()
        except Exception as error:  # the other arms still count
            print(f"{name:<26} FAILED: {error}", flush=True)
            yield {"arm": name, "failed": f"{type(error).__name__}: {error}"}
            continue
        row = {"arm": name, "seconds": seconds, "score": score}
        line = f"{name:<26}{score['extractors']['marked']['right']:>5} of {score['answers']}"
        if name != FIRST:
            found = compare(file_of(FIRST, folder), file_of(name, folder)).summary()
            row |= {key: found[key] for key in ("differences", "warnings", "verdict", "words")}
            marked = found["differences"]["marked"]
            line += f"  {points(marked['difference'])}, p = {marked['mcnemar_p']:.2g}: {found['verdict']}"
        print(line, flush=True)
        yield row


def start_control(folder: Path, submit: Submit, **shape: Any) -> list[tuple[Path, Any]]:
    """The runs of sampled arms of one model, each with its file."""
    outs = [folder / f"seed{seed}.jsonl" for seed in range(2 * CONTROL_PAIRS)]
    more = [("--temperature", CONTROL_TEMPERATURE, "--seed", seed) for seed in range(len(outs))]
    return [
        (out, submit(timed_arm, ARMS[FIRST], out, more=each, **shape)) for out, each in zip(outs, more, strict=True)
    ]


def negative_control(runs: list[tuple[Path, Any]], *, problems: int) -> dict[str, Any]:
    """p of each pair of sampled arms."""
    scores = [run.result()[0]["extractors"]["marked"]["right"] for _, run in runs]
    pairs = [(runs[i][0], runs[i + 1][0]) for i in range(0, len(runs), 2)]
    found = [compare(a, b).differences["marked"] for a, b in pairs]
    significant = sum(each.significant for each in found)
    print(f"negative control: {significant} of {len(found)} pairs have p < 0.05 (at most {MOST_SIGNIFICANT} may)")
    return {
        "problems": problems,
        "temperature": CONTROL_TEMPERATURE,
        "right": scores,
        "p": [each.p for each in found],
        "discordant": [each.losses + each.gains for each in found],
        "significant": significant,
        "passed": significant <= MOST_SIGNIFICANT,
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what cannot be run ends it with a message."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--problems", type=int, default=500)
    add("--shots", type=int, default=5)
    add("--batch", type=int, default=128)
    add("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM", help="the first always runs")
    add("--control-problems", type=int, default=100, help="of each of 40 sampled arms; 0: no negative control")
    add("--jobs", type=int, help="arms at a time (default: half of the cores, at most 8, on a GPU; else 1)")
    add("--runs", type=Path, help="folder for the runs (default: a new one in the temporary directory)")
    add("--commit", help="recorded in the result; default: what git says")
    add("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda, allowed where torch sees no GPU: cpu")
    if args.problems < 1:
        parser.error(f"--problems: {args.problems}, allowed: at least 1")
    if args.jobs is None:
        args.jobs = max(1, min(8, (os.cpu_count() or 1) // 2)) if args.device == "cuda" else 1
    return args


def write(result: dict[str, Any], out: Path | None) -> None:
    """The result as far as it goes, whole: what is interrupted leaves the file as it was."""
    if out:
        new = out.with_name(f"{out.name}.new")
        new.write_text(json.dumps(result, indent=1) + "\n")
        new.replace(out)


def main() -> int:
    """Run arms and controls and write the result."""
    args = parse_arguments()
    folder = args.runs or Path(tempfile.mkdtemp(prefix="eval-tiny-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"runs in {folder}")
    on_gpu = args.device == "cuda"
    result = {
        "benchmark": "eval_tiny",
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": args.commit or git_commit(),
        "date": date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "jobs": args.jobs,
        "rows": [],
        "negative_control": None,
        "planted_fault_seen": None,
    }
    shape = {"shots": args.shots, "device": args.device, "batch": args.batch}
    names = [FIRST, *(name for name in args.arms if name != FIRST)]
    with workers(args.jobs) as submit:
        runs = start_arms(names, folder, submit, problems=args.problems, **shape)
        count = args.control_problems
        control_runs = start_control(folder, submit, problems=count, **shape) if count else None
        for row in rows_of(runs, folder):
            result["rows"].append(row)
            if row["arm"] == FAULT and "score" in row:
                result["planted_fault_seen"] = row["differences"]["marked"]["mcnemar_p"] < FAULT_P
            write(result, args.out)
        if control_runs:
            result["negative_control"] = negative_control(control_runs, problems=count)
    seen, control = result["planted_fault_seen"], result["negative_control"]
    if seen is not None:
        print(f"planted fault {'seen' if seen else 'NOT SEEN'} at p < {FAULT_P}")
    print(json.dumps(result))
    write(result, args.out)
    failed = any("failed" in row for row in result["rows"])
    return int(failed or seen is False or bool(control and not control["passed"]))


if __name__ == "__main__":
    sys.exit(main())
