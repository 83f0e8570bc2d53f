"""What `headfit eval` does: the options, everything that can be checked first, then the run or the comparison."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headfit.evals.datasets import QuestionSet, check_shots, from_hub, questions_sha256, read_jsonl
from headfit.evals.extract import gold_number
from headfit.evals.tasks import AIME_SMALL_CAP, TASKS, prompt, prompts_sha256

if TYPE_CHECKING:
    from headfit.evals.score import Score
    from headfit.evals.store import RunStore

_SEEDS_A_RUN = 1 << 20  # so that runs with neighbouring seeds share no answer's seed
_LOCAL_BATCH = 32


def add_run_arguments(parser: argparse.ArgumentParser, task: str, *, integer: Callable, number: Callable) -> None:
    """Options of `headfit eval gsm8k` and `aime25`, beside those of a model in process.

    Args:
        integer, number: makers of argparse types with limits.
    """
    add, defaults = parser.add_argument, TASKS[task]
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--base-url", metavar="URL", help="OpenAI-compatible server, such as http://localhost:30000/v1")
    target.add_argument("--local", metavar="PATH|tiny", help="checkpoint to run in process")
    add("--out", required=True, metavar="FILE", help="JSONL of the run; an interrupted run goes on with it")
    add("--model", metavar="NAME", help="the server's name for the model (default: the only one it lists)")
    add("--api", choices=("chat", "completions"), help="default: chat for a server, completions in process")
    add("--data", metavar="FILE", help="JSONL with question and answer (default: the public data set, online)")
    add("--shots", metavar="FILE", help="JSONL that the shots come from (default: the public train split)")
    add("--num-shots", type=integer(0), default=defaults.num_shots, metavar="N", help="default %(default)s")
    add("--limit", type=integer(1), metavar="N", help="the first N questions only")
    add("--repeats", type=integer(1), default=defaults.repeats, metavar="N", help="answers a question, %(default)s")
    add("--temperature", type=number(0, 1e6), default=defaults.temperature, metavar="T", help="default %(default)s")
    add("--top-p", type=number(1e-9, 1), default=defaults.top_p, metavar="P", help="default %(default)s")
    tokens = ("--max-tokens", "--max-new-tokens")
    add(*tokens, type=integer(1), default=defaults.max_tokens, metavar="N", help="default %(default)s")
    add("--thinking", choices=("on", "off", "default"), default="default", help="asked of the server's chat template")
    add("--seed", type=integer(0), default=0, metavar="N", help="of sampling; each answer has its own from it")
    add("--concurrency", type=integer(1), default=32, metavar="N", help="requests at a time (default %(default)s)")
    add("--timeout", type=number(1e-3, 1e6), default=3600, metavar="S", help="of one request (default %(default)s)")
    add("--attempts", type=integer(1), default=6, metavar="N", help="of a question, before the run fails (default 6)")
    add("--pause", type=number(0, 600), default=1.0, metavar="S", help="before the second attempt; doubles after it")
    add("--quiet", action="store_true", help="no progress bar (there is none unless stderr is a terminal)")


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `headfit eval compare`."""
    parser.add_argument("a", metavar="A", help="JSONL of the run to compare with")
    parser.add_argument("b", metavar="B", help="JSONL of the run in question")
    parser.add_argument("--report", metavar="FILE", help="write a Markdown report")
    parser.add_argument("--plot", metavar="FILE", help="draw both (.png, .svg, .pdf); needs matplotlib")


@dataclass(frozen=True, slots=True)
class EvalRun:
    """A checked run: its settings, what may differ in a comparison, and `work(store)`, which is left to do.

    `open` takes the run's file, `answer` does the work.
    """

    file: str
    settings: dict[str, Any]
    arm: dict[str, Any]
    work: Callable[[RunStore], None]

    def open(self) -> AbstractContextManager[RunStore]:
        """The run's file, new or to go on with. Raises as `headfit.evals.store.open_store`."""
        from headfit.evals.store import open_store

        return open_store(self.file, self.settings, self.arm)

    def answer(self, store: RunStore) -> Score:
        """Answer what is not answered yet; the run's score.

        Raises:
            RunFailed, RankError: it could not be completed; what was answered is stored.
        """
        from headfit.evals.score import score_run

        self.work(store)
        return score_run(store.run, self.file)


def prepare(args: argparse.Namespace, *, progress: bool, **changes: Any) -> EvalRun:
    """Check a request, without asking a question or reading a weight.

    Args:
        changes: in process, `LocalArm`'s `pad_heads_to` and `alter`.

    Raises:
        ValueError, OSError: one line for the user.
        RunFailed: the server does not answer, or the model does not fit.
    """
    local = args.local is not None
    if local and (args.model is not None or args.thinking != "default"):
        raise ValueError("--model, --thinking: go with --base-url only")
    api = args.api or ("completions" if local else "chat")
    if args.task == "aime25" and args.max_tokens < AIME_SMALL_CAP:
        print(f"headfit: warning: --max-tokens {args.max_tokens} cuts long reasoning off (below 32k)", file=sys.stderr)
    data, shots = _questions(args)
    prompts = [prompt(args.task, question, shots.questions) for question in data.questions]
    settings = _settings(args, data, shots, prompts, api)
    golds = [str(gold_number(question.answer)) for question in data.questions]
    make = partial(_local_work, **changes) if local else _server_work
    arm, work = make(args, prompts, golds, settings, progress)
    return EvalRun(args.out, settings, {"seed": args.seed, **arm}, work)


def _questions(args: argparse.Namespace) -> tuple[QuestionSet, QuestionSet]:
    data = read_jsonl(args.data) if args.data else from_hub(args.task)
    if args.limit is not None:
        data = data.first(args.limit)
    if args.num_shots == 0:
        return data, QuestionSet("none", "none", ())
    if args.data and not args.shots:
        raise ValueError(f"--num-shots {args.num_shots}: allowed with --data: --shots FILE, or --num-shots 0")
    shots = (read_jsonl(args.shots) if args.shots else from_hub(args.task, shots=True)).first(args.num_shots)
    check_shots(shots.questions, data.questions)
    return data, shots


def _settings(
    args: argparse.Namespace, data: QuestionSet, shots: QuestionSet, prompts: Sequence[str], api: str
) -> dict[str, Any]:
    """What two runs must share to be compared."""
    return {
        "task": args.task,
        "data": data.source,
        "data_sha256": data.sha256,
        "questions_sha256": questions_sha256(data.questions),
        "num_questions": len(data.questions),
        "num_shots": len(shots.questions),
        "shots": shots.source,
        "shots_sha256": shots.sha256,
        "prompts_sha256": prompts_sha256(prompts),
        "api": api,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "max_tokens": args.max_tokens,
        "stop": list(TASKS[args.task].stop) if api == "completions" else [],
        "thinking": args.thinking,
        "repeats": args.repeats,
    }


def _server_work(args, prompts, golds, settings, progress) -> tuple[dict[str, Any], Callable[[RunStore], None]]:
    from headfit.evals.client import Endpoint, RequestError
    from headfit.evals.server import Load, RunFailed, ask_all

    endpoint = Endpoint(args.base_url, settings["api"], args.timeout, os.environ.get("OPENAI_API_KEY"))
    try:
        listed = endpoint.models()
    except RequestError as error:
        # A server that lists no models may still answer; one that cannot be reached will not.
        if args.model is None or error.retryable:
            raise RunFailed(f"{args.base_url}: {error}") from error
        listed = []
    names = [row["id"] for row in listed]
    if args.model is None and len(names) != 1:
        allowed = f"one of {', '.join(names)}" if names else "a name; the server lists no model"
        raise ValueError(f"--model: not given, allowed: {allowed}")
    model = args.model or names[0]
    common = {name: settings[name] for name in ("temperature", "top_p", "max_tokens")} | {"model": model}
    if settings["stop"]:
        common["stop"] = settings["stop"]
    if args.thinking != "default":
        # DeepSeek's template reads the one name, Qwen's the other; SGLang and vLLM pass both on.
        common["chat_template_kwargs"] = dict.fromkeys(("thinking", "enable_thinking"), args.thinking == "on")

    def options(key: tuple[int, int]) -> dict[str, Any]:
        return common | {"seed": args.seed * _SEEDS_A_RUN + key[0] * args.repeats + key[1]}

    load = Load(concurrency=args.concurrency, attempts=args.attempts, pause=args.pause)
    server = next((row.get("owned_by") for row in listed if row["id"] == model), None)
    arm = {"model": model, "server": server if isinstance(server, str) else None, "base_url": args.base_url}
    return arm, lambda store: ask_all(endpoint, store, prompts, golds, options, load=load, progress=progress)


def _local_work(
    args, prompts, golds, settings, progress, **changes
) -> tuple[dict[str, Any], Callable[[RunStore], None]]:
    from headfit.evals.local import answer_all

    arm = _local_arm(args, prompts, raw=settings["api"] == "completions", progress=progress, **changes)
    return {"model": args.local} | arm.description(), lambda store: answer_all(arm, store, golds)


def _local_arm(args: argparse.Namespace, prompts: list[str], *, raw: bool, progress: bool, **changes: Any) -> Any:
    from headfit import generate
    from headfit.evals.local import LocalArm
    from headfit.evals.server import RunFailed

    asked = argparse.Namespace(
        **vars(args)
        | {
            "model": args.local,
            "prompt": prompts,
            "prompts_file": None,
            "raw": raw,
            "max_new_tokens": args.max_tokens,
            "max_batch": args.max_batch or _LOCAL_BATCH,
            "seed": args.seed * _SEEDS_A_RUN,
        }
    )
    run = generate.prepare(asked, progress=progress)
    if not run.memory["fits"]:
        raise RunFailed(f"{args.local}: {run.memory['verdict']}")
    return LocalArm(run.job, run.device, **changes)


def show_settings(run: EvalRun) -> None:
    """Print what the run is, before it starts."""
    from headfit.evals.report import settings_text

    print(settings_text(run.settings, run.arm) + "\n", flush=True)


def show_score(file: str, settings: dict[str, Any], arm: dict[str, Any], score: Score, *, as_json: bool) -> None:
    """Print a run's score."""
    from headfit.evals.report import score_text

    if as_json:
        print(json.dumps({"file": file, "settings": settings, "arm": arm, "score": score.summary()}))
    else:
        print(score_text(Path(file).stem, score))


def rescore(args: argparse.Namespace) -> None:
    """`headfit eval score`: from the stored texts. Raises ValueError, OSError."""
    from headfit.evals.report import settings_text
    from headfit.evals.score import score_run
    from headfit.evals.store import read_run

    run = read_run(args.run_file)
    score = score_run(run, args.run_file)
    if not args.json:
        print(settings_text(run.settings, run.arm) + "\n")
    show_score(args.run_file, run.settings, run.arm, score, as_json=args.json)


def compare(args: argparse.Namespace) -> None:
    """`headfit eval compare`. Raises ValueError, OSError."""
    from headfit.evals import report
    from headfit.evals.compare import compare_runs
    from headfit.evals.store import read_run, sources_apart

    for option, file in (("--report", args.report), ("--plot", args.plot)):
        if file and Path(file).resolve() in (Path(args.a).resolve(), Path(args.b).resolve()):
            raise ValueError(f"{option}: {file} is one of the runs, allowed: another file")
    stems = Path(args.a).stem, Path(args.b).stem
    names = stems if stems[0] != stems[1] else (args.a, args.b)
    a, b = read_run(args.a), read_run(args.b)
    for name in sources_apart(a.settings, b.settings):  # shown for both, as what the arms do not share
        for run in (a, b):
            run.arm[name] = run.settings.pop(name, None)
    comparison = compare_runs(a, b, names)
    # Printed first: neither a folder that cannot be written nor a missing matplotlib hides the result.
    print(json.dumps(comparison.summary()) if args.json else report.comparison_text(comparison))
    if args.report:
        Path(args.report).write_text(report.markdown(comparison), encoding="utf-8", errors="backslashreplace")
    if args.plot:
        report.plot(comparison, args.plot)
