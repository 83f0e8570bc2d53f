"""The `headfit` command: generate, plan, doctor, eval.

Nothing heavy is imported before a command needs it: `--help` needs the standard library only, `plan` no transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from headfit.launch import EndedBySignal, RankError, describe, unwinding_at_signals

if TYPE_CHECKING:
    from headfit.backends.base import KernelSupport

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
_EXIT_CODES = (
    "exit codes: 0 ok, 1 failed at run time, 2 bad input, 130 interrupted, 143 terminated (SIGTERM), "
    "129 hung up (SIGHUP); errors are one line on stderr"
)
_DOCTOR_FAILS = " Exits 1 where a model does not fit, or no SGLang server starts with the plugin's settings."
_PRESETS = {"flash": (64, 8), "pro": (128, 16)}  # heads and output groups of the released models


class InputError(Exception):
    """Something the user gave cannot be used."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `--help` and `--version` exit from within argparse."""
    _open_streams()
    try:
        with unwinding_at_signals():
            args = parse(argv)
            code = args.run(args)
            sys.stdout.flush()
            return code
    except InputError as error:
        return _fail(str(error), BAD_INPUT)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except EndedBySignal as ended:
        return _fail(f"ended by {ended.signal.name}", 128 + ended.signal)
    except BrokenPipeError:  # the reader of our output left; Python must not find that out again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        return _fail(str(error) if isinstance(error, RankError) else describe(error), FAILED)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """What a command line asks for. Raises InputError."""
    return _parser().parse_args(argv)


def _fail(message: str, code: int) -> int:
    print(f"headfit: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _open_streams() -> None:
    """A closed stdout or stderr leads nowhere; what the encoding of an open one lacks is escaped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            os.set_inheritable(null, True)  # or a rank's sockets would get the free number
            setattr(sys, name, os.fdopen(null, "w"))
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _checking_input() -> Iterator[None]:
    """What the checks before a run raise is the user's to mend."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise InputError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    from headfit import __version__

    parser = _Parser(prog="headfit", description="DeepSeek-V4 attention under tensor parallelism.", epilog=_EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"headfit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="generate | plan | doctor | eval")
    _add_generate(commands)
    _add_plan(commands)
    _add_doctor(commands)
    _add_eval(commands)
    return parser


def _add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> _Parser:
    parser = commands.add_parser(name, help=text, description=text, epilog=_EXIT_CODES)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _add_model(parser: argparse.ArgumentParser, default: str | None) -> None:
    text = "checkpoint folder; tiny is the one packaged with headfit"
    parser.add_argument("--model", default=default, metavar="PATH|tiny", help=text)


def _add_run_options(parser: argparse._ActionsContainer) -> None:
    """Options that decide what a rank holds in memory."""
    add = parser.add_argument
    add("--attn-tp", type=_integer(1), default=1, metavar="N", help="attention-TP ranks, a process each (default 1)")
    add("--backend", default="auto", help="auto, or a backend that `headfit doctor` lists (default auto)")
    add("--kv-format", choices=("auto", "model", "fp8"), default="auto", help="auto: model on CPU, fp8 on CUDA")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: float32 on CPU, else bfloat16")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where torch finds a GPU")
    add("--max-context", type=_integer(1), metavar="N", help="tokens of prompt and answer that the cache holds")
    add("--max-batch", type=_integer(1), metavar="N", help="sequences that run at a time; further prompts wait")


def _add_generate(commands: Any) -> None:
    text = "Answer prompts. Without a prompt: answer five sample problems and show the right answers."
    parser = _add_command(commands, "generate", _generate, text)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    prompts.add_argument("--prompts-file", metavar="FILE", help="UTF-8, one prompt a line; a blank line is an error")
    _add_model(parser, "tiny")
    _add_run_options(parser)
    add = parser.add_argument
    add("--raw", action="store_true", help="give prompts to the model as they are, without its chat template")
    add("--max-new-tokens", type=_integer(1), default=128, metavar="N", help="longest answer (default 128)")
    add("--temperature", type=_number(0, 1e6), default=0.0, metavar="T", help="0, the default, is greedy")
    add("--top-p", type=_number(1e-9, 1), default=1.0, metavar="P", help="sample from the likeliest tokens only")
    add("--seed", type=_integer(0), default=0, metavar="N", help="of sampling; prompt i draws with seed N + i")
    add("--quiet", action="store_true", help="no progress bar (there is none unless stderr is a terminal)")


def _add_plan(commands: Any) -> None:
    text = "Show how many query heads each rank owns, how many its kernel runs, and what padding wastes."
    parser = _add_command(commands, "plan", _plan, text)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--num-heads", type=_integer(1), metavar="N", help="query heads of the model")
    source.add_argument("--preset", choices=sorted(_PRESETS), help="DeepSeek-V4-Flash or DeepSeek-V4-Pro")
    source.add_argument("--model", metavar="PATH|tiny", help="checkpoint folder or config.json")
    parser.add_argument("--o-groups", type=_integer(1), metavar="N", help="output groups; goes with --num-heads")
    parser.add_argument("--attn-tp", type=_integer(1), metavar="N", help="one attention-TP size (default: all allowed)")


def _add_doctor(commands: Any) -> None:
    text = "Show what is installed and which backend auto takes; with --model, what memory a rank needs."
    parser = _add_command(commands, "doctor", _doctor, text + _DOCTOR_FAILS)
    _add_model(parser, None)
    _add_run_options(parser)


def _add_eval(commands: Any) -> None:
    from headfit.evals import command

    text = "GSM8K and AIME25 against a server or in process, and comparisons that say what they could have detected."
    parser = commands.add_parser("eval", help=text, description=text, epilog=_EXIT_CODES)
    evals = parser.add_subparsers(dest="task", required=True, metavar="gsm8k | aime25 | score | compare")
    for task, title in (("gsm8k", "GSM8K"), ("aime25", "AIME25")):
        run = _add_command(evals, task, _eval, f"Run {title}, or go on with an interrupted run.")
        command.add_run_arguments(run, task, integer=_integer, number=_number)
        _add_run_options(run.add_argument_group("in process"))
    score = _add_command(evals, "score", _eval_files, "Score a run again from its stored texts, without a server.")
    score.add_argument("run_file", metavar="RUN", help="JSONL of the run")
    text = "Compare two runs of the same questions: is there a drop, and which drop would have been seen?"
    command.add_compare_arguments(_add_command(evals, "compare", _eval_files, text))


def _integer(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if not minimum <= value < 2**31:
            raise argparse.ArgumentTypeError(f"{value}, allowed: {minimum} to {2**31 - 1}")
        return value

    return integer


def _number(minimum: float, maximum: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not minimum <= value <= maximum:  # NaN too
            raise argparse.ArgumentTypeError(f"{text}, allowed: {minimum:g} to {maximum:g}")
        return value

    return number


def _generate(args: argparse.Namespace) -> int:
    from headfit import generate

    with _checking_input():
        run = generate.prepare(args, progress=sys.stderr.isatty() and not (args.json or args.quiet))
    if not run.memory["fits"]:
        return _fail(f"{args.model}: {run.memory['verdict']}", FAILED)
    answers = run.start()
    summary = {"model": args.model, **generate.summary(run.job.shape, run.device)}
    if args.json:
        results = [
            {"prompt": question.prompt, "text": text, "finish_reason": reason}
            | ({} if question.expected is None else {"expected": question.expected})
            for question, (text, reason) in zip(run.questions, answers, strict=True)
        ]
        print(json.dumps(summary | {"results": results}))
    else:
        generate.show(summary, run, answers)
    return OK


def _plan(args: argparse.Namespace) -> int:
    with _checking_input():
        num_heads, o_groups = _heads(args)
        from headfit.head_layout import allowed_tp_sizes, plan_heads

        allowed = allowed_tp_sizes(num_heads, o_groups)
        if args.attn_tp is not None:
            plan_heads(
                num_heads=num_heads, o_groups=o_groups, attn_tp_size=args.attn_tp, attn_tp_rank=0, supported=None
            )
    from headfit.backends import KERNELS

    sizes = allowed if args.attn_tp is None else (args.attn_tp,)
    kernels = [
        {
            "name": k.name,
            "architectures": k.architectures,
            "num_heads": k.num_heads,
        }
        for k in KERNELS
    ]
    plan = {"num_heads": num_heads, "o_groups": o_groups, "allowed_attn_tp_sizes": allowed, "kernels": kernels}
    plan["plans"] = [
        {
            "attn_tp_size": size,
            "num_local_heads": num_heads // size,
            "kernels": [_fit(num_heads, size, kernel) for kernel in KERNELS],
        }
        for size in sizes
    ]
    print(json.dumps(plan) if args.json else _plan_table(plan))
    return OK


def _heads(args: argparse.Namespace) -> tuple[int, int | None]:
    """Query heads and output groups that a plan is asked for."""
    if args.num_heads is not None:
        return args.num_heads, args.o_groups
    if args.o_groups is not None:
        raise InputError("--o-groups: goes with --num-heads only")
    if args.preset:
        return _PRESETS[args.preset]
    from headfit.generate import find_model

    _, config = find_model(args.model)
    return config.num_heads, config.o_groups


def _fit(num_heads: int, size: int, kernel: KernelSupport) -> dict[str, Any]:
    """One cell of a plan; null where the kernel holds no such number of heads."""
    from headfit.head_layout import plan_heads

    cell = {"name": kernel.name, "architectures": kernel.architectures, "kernel_num_heads": None, "waste": None}
    if kernel.num_heads is None or num_heads // size <= max(kernel.num_heads):
        layout = plan_heads(num_heads=num_heads, attn_tp_size=size, attn_tp_rank=0, supported=kernel.num_heads)
        cell |= {"kernel_num_heads": layout.kernel_num_heads, "waste": layout.waste}
    return cell


def _plan_table(plan: dict[str, Any]) -> str:
    names = [f"{k['name']} ({_span(k['architectures'])})" for k in plan["kernels"]]
    widths = [max(len(name), 18) for name in names]
    groups = "" if plan["o_groups"] is None else f", {plan['o_groups']} output groups"
    header = "  ".join(["attention TP", "local heads", *(name.rjust(w) for name, w in zip(names, widths, strict=True))])
    rows = [f"{plan['num_heads']} query heads{groups}; kernel heads and waste by kernel:", "", header]
    for entry in plan["plans"]:
        cells = [
            "too many heads"
            if cell["kernel_num_heads"] is None
            else f"{cell['kernel_num_heads']} heads, {cell['waste']:4.0%}"
            for cell in entry["kernels"]
        ]
        columns = [f"{entry['attn_tp_size']:12}", f"{entry['num_local_heads']:11}"]
        rows.append("  ".join(columns + [cell.rjust(w) for cell, w in zip(cells, widths, strict=True)]))
    return "\n".join(rows)


def _span(architectures: tuple[str, ...]) -> str:
    return ", ".join(architectures) if len(architectures) < 3 else f"{architectures[0]} to {architectures[-1]}"


def _doctor(args: argparse.Namespace) -> int:
    from headfit import doctor, generate

    with _checking_input():
        memory = None if args.model is None else generate.model_memory(args)
    report = doctor.report() | {"memory": memory}
    print(json.dumps(report) if args.json else doctor.show(report))
    fits, plugin = memory is None or memory["fits"], report["sglang_plugin"]
    starts = plugin["obstacle"] is None or not doctor.is_loaded(plugin)
    return OK if fits and starts else FAILED


def _eval(args: argparse.Namespace) -> int:
    from headfit.evals import command
    from headfit.evals.server import RunFailed

    try:
        with contextlib.ExitStack() as stack:
            with _checking_input():
                run = command.prepare(args, progress=sys.stderr.isatty() and not (args.json or args.quiet))
                store = stack.enter_context(run.open())
            if not args.json:
                command.show_settings(run)
            score = run.answer(store)
    except RunFailed as error:
        return _fail(str(error), FAILED)
    command.show_score(args.out, run.settings, run.arm, score, as_json=args.json)
    return OK


def _eval_files(args: argparse.Namespace) -> int:
    from headfit.evals import command

    with _checking_input():
        (command.rescore if args.task == "score" else command.compare)(args)
    return OK


if __name__ == "__main__":
    sys.exit(main())
