"""A server with and without the plugin, in turn: tokens a second, TTFT and TPOT by concurrency.

    python benchmark/serving.py --out benchmark/results/serving-h200.json --num-heads 128 -- \\
        python -m sglang.launch_server --model-path MODEL --tp-size 4 --port {port}
    python benchmark/serving.py --out RESULT.json --side-by-side --num-heads 128 -- ... --mem-fraction-static 0.4
    python benchmark/serving.py --out RESULT.json --num-heads 128 --attach stock=URL --attach plugin=URL
    python benchmark/serving.py --plot benchmark/results/serving-h200.json

The command after `--` starts the server of both arms; only `HEADFIT_BACKEND` differs: `off` for stock, `--backend` for
the plugin (and what `--env` gives one arm). A round starts, warms, measures and stops both, and the next round the
other way about. With `--side-by-side` both start once, share the GPUs and are measured in turn at every concurrency:
only one has work at a time, and the other, whose memory is its own, launches nothing. With `--attach` the same is done
with servers that already run. `--lone-rank 3/8` stands for a rank of attention TP 8 on one GPU (`lone_rank`). Both
arms get the same prompts: random token ids, new ones each round and concurrency; the prefix cache is flushed before
each measurement. The first round is left out (`--warm-up-rounds`): in it the arm that goes first compiles kernels that
the other then finds on disk.

A failed request is counted, printed and makes the exit code 1; a measurement with one gets no time. A started server's
log must say that headfit answered decode calls in the plugin's arm and none in stock's, with the heads that the rows
state, or the run ends; from it come the decode step's milliseconds by running requests, too. With `--profile N`: its
profiler's kernels at concurrency N. `--stop-after` ends early with the rounds that are done, one at least; a profile is
still taken side by side.
Prints a table and last one JSON line: the result without its rows.
"""

import argparse
import contextlib
import gzip
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import date
from pathlib import Path
from typing import Any

import lone_rank
import serving_report as report
import serving_server
from measured_on import git_commit, gpu_name, package_version
from serving_client import run_load
from serving_server import ServerError, flush_cache, get, post

CONCURRENCIES = (1, 8, 32, 64, 128)
ARMS = (report.STOCK, report.PLUGIN)
ATTENTION_KERNELS = r"flash_fwd|splitkv|mla_combine|mla_metadata|sparse_mqa"
PROFILED_STEPS = 10
PREFILL_S = 5.0  # until every prompt of a profiled load is prefilled
PROFILED_LENGTHS = 16  # how much longer a profiled request may run than a measured one
PORT_STEP = 20  # between the ports of two servers, for what each opens next to its own


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.plot:
        result = json.loads(args.plot.read_text())
        report.plot(result, args.plot.with_suffix(".png"))
        print("\n".join(report.table(result["rows"])))
        return 0
    result: dict[str, Any] = {"benchmark": "serving", "date": date.today().isoformat(), "command": sys.argv, "rows": []}
    result |= {"backend": args.backend, "prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens}
    result |= {"decode_step_ms": {}, "profiles": {}, "plugin": {}, "seed": args.seed}
    result |= {"lone_rank": args.lone_rank, "num_warm_up_errors": 0}
    if not args.attach:  # the servers run here, in this environment or in one that their command names
        versions = {name: package_version(name) for name in ("torch", "headfit")}
        result |= {"gpu": gpu_name(), **versions, "commit": args.commit or git_commit()}
    try:
        if args.side_by_side:
            _side_by_side(args, result)
        else:
            _rounds(args, result, _attached_round if args.attach else _started_round)
    except ServerError as error:
        print(f"serving.py: {error}", file=sys.stderr)
        return 1
    print("\n".join(report.table(result["rows"])))
    print(json.dumps({name: value for name, value in result.items() if name != "rows"}))
    return int(any(row["num_errors"] for row in result["rows"]) or result["num_warm_up_errors"] > 0)


def _rounds(args: argparse.Namespace, result: dict[str, Any], one: Callable[..., None]) -> None:
    """All rounds, or those before the first that would end too late if it took as long as the one before."""
    begin = last = time.monotonic()
    for number in range(-args.warm_up_rounds, args.rounds):
        one(args, number, result)
        if number < 0:
            result["num_warm_up_errors"] += sum(row["num_errors"] for row in result["rows"])
            result["rows"].clear()
            result["decode_step_ms"].clear()
        _write(args.out, result)
        now = time.monotonic()
        if args.stop_after and 0 <= number < args.rounds - 1 and 2 * now - last - begin > args.stop_after:
            print(f"stopped after {number + 1} of {args.rounds} rounds, {now - begin:.0f} s", file=sys.stderr)
            break
        last = now


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what cannot be run ends it with a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON result, written after every round")
    parser.add_argument("--plot", type=Path, metavar="RESULT", help="draw an earlier result and stop")
    parser.add_argument("--attach", action="append", default=[], metavar="ARM=URL")
    parser.add_argument("--side-by-side", action="store_true", help="start both arms once, on the same GPUs")
    parser.add_argument(
        "--env", action="append", default=[], metavar="ARM:NAME=VALUE", help="a variable of one arm's server"
    )
    parser.add_argument(
        "--num-heads", type=int, help="the model's query heads; read from a local config.json if left out"
    )
    parser.add_argument(
        "--lone-rank",
        type=lone_rank.argument,
        metavar="R/N",
        help="servers of TP 1 become rank R of attention TP N, on its own",
    )
    parser.add_argument("--backend", default="auto", help="HEADFIT_BACKEND of the plugin arm (default: auto)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of arms (default: 5)")
    parser.add_argument("--warm-up-rounds", type=int, default=1, help="pairs before them, not kept (default: 1)")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="start no round that would end later")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCIES))
    parser.add_argument("--requests-per-slot", type=int, default=4, help="requests a measurement, times concurrency")
    parser.add_argument("--min-requests", type=int, default=1, help="at least as many a measurement (default: 1)")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=32_768, help="prompts are ids from 2 to this")
    parser.add_argument("--port", type=int, default=30_000)
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument(
        "--profile", type=int, metavar="CONCURRENCY", help="profile one decode there, in the last round"
    )
    parser.add_argument("--profile-dir", type=Path, default=Path("/tmp/headfit-profile"))
    parser.add_argument("--commit", help="recorded in the result; default: what git says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("server", nargs="*", help="after `--`: the command that starts a server on {port}")
    args = parser.parse_args(arguments)
    args.attach = dict(_arm_and_url(parser, text) for text in args.attach)
    args.env = [_arm_and_variable(parser, text) for text in args.env]
    if not args.plot:
        if args.out is None:
            parser.error("--out is needed")
        if bool(args.attach) == bool(args.server):
            parser.error("give either a server command after `--` or --attach")
        if args.attach and set(args.attach) != set(ARMS):
            parser.error(f"--attach: {', '.join(sorted(args.attach))}, allowed: one URL each for {' and '.join(ARMS)}")
        if args.attach and (args.profile or args.env or args.side_by_side or args.lone_rank is not None):
            parser.error("--profile, --env, --side-by-side and --lone-rank need servers that this program starts")
        for name in (
            "rounds",
            "requests_per_slot",
            "min_requests",
            "prompt_tokens",
            "output_tokens",
            *(("num_heads",) * (args.num_heads is not None)),
        ):
            if getattr(args, name) < 1:
                parser.error(f"--{name.replace('_', '-')}: {getattr(args, name)}, allowed: at least 1")
        if args.warm_up_rounds < 0:
            parser.error(f"--warm-up-rounds: {args.warm_up_rounds}, allowed: at least 0")
        if min(args.concurrency) < 1:
            parser.error(f"--concurrency: {min(args.concurrency)}, allowed: at least 1")
    return args


def _arm_and_url(parser: argparse.ArgumentParser, text: str) -> tuple[str, str]:
    arm, _, url = text.partition("=")
    if arm not in ARMS or not url.startswith("http://"):
        parser.error(f"--attach: {text!r}, allowed: {' or '.join(f'{arm}=http://HOST:PORT' for arm in ARMS)}")
    return arm, url.rstrip("/")


def _arm_and_variable(parser: argparse.ArgumentParser, text: str) -> tuple[str, str, str]:
    arm, _, setting = text.partition(":")
    name, equals, value = setting.partition("=")
    if arm not in ARMS or not name or not equals:
        parser.error(f"--env: {text!r}, allowed: {' or '.join(f'{arm}:NAME=VALUE' for arm in ARMS)}")
    return arm, name, value


def _order(number: int) -> tuple[str, ...]:
    return ARMS if number % 2 == 0 else ARMS[::-1]


def _attached_round(args: argparse.Namespace, number: int, result: dict[str, Any]) -> None:
    facts = {arm: _facts(args, url) for arm, url in args.attach.items()}
    for concurrency in args.concurrency:
        for arm in _order(number):
            row = {"arm": arm, **facts[arm], "round": number, "concurrency": concurrency}
            result["rows"].append(row | measure(args, args.attach[arm], number, concurrency))
            _say(result["rows"][-1])


def _side_by_side(args: argparse.Namespace, result: dict[str, Any]) -> None:
    logs = {arm: args.out.with_name(f"{args.out.stem}-{arm}.log") for arm in ARMS}
    ports = {arm: args.port + PORT_STEP * number for number, arm in enumerate(ARMS)}
    warmed = dict.fromkeys(ARMS, 0)  # bytes of each log before the first round that counts

    def one(args: argparse.Namespace, number: int, result: dict[str, Any]) -> None:
        if number == 0:
            warmed.update({arm: log.stat().st_size for arm, log in logs.items()})
        _attached_round(args, number, result)

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(ARMS)) as pool:
        contexts = [_server(args, arm, ports[arm], logs[arm]) for arm in ARMS]
        # Entered in threads, for a start takes minutes; those that came up are left even where another did not.
        starts = [pool.submit(stack.enter_context, context) for context in contexts]
        wait(starts)
        for start in starts:
            start.result()
        args.attach = {arm: f"http://127.0.0.1:{port}" for arm, port in ports.items()}
        _rounds(args, result, one)
        if args.profile:
            result["profiles"] = {arm: profile(args, url) for arm, url in args.attach.items()}
    for arm, log in logs.items():
        _read_log(args, arm, log, result, warmed[arm])
    _write(args.out, result)


def _started_round(args: argparse.Namespace, number: int, result: dict[str, Any]) -> None:
    for arm in _order(number):
        log = args.out.with_name(f"{args.out.stem}-{arm}-{number}.log")
        url = f"http://127.0.0.1:{args.port}"
        with _server(args, arm, args.port, log):
            facts = _facts(args, url)
            for concurrency in args.concurrency:
                row = {"arm": arm, **facts, "round": number, "concurrency": concurrency}
                result["rows"].append(row | measure(args, url, number, concurrency))
                _say(result["rows"][-1])
            if args.profile and number == args.rounds - 1:
                result["profiles"][arm] = profile(args, url)
        _read_log(args, arm, log, result)


def _server(args: argparse.Namespace, arm: str, port: int, log: Path) -> contextlib.AbstractContextManager:
    command = [part.replace("{port}", str(port)) for part in args.server]
    traces = args.profile_dir / arm
    traces.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "HEADFIT_BACKEND": "off" if arm == report.STOCK else args.backend,
        "SGLANG_TORCH_PROFILER_DIR": str(traces),
    }
    environment |= {name: value for owner, name, value in args.env if owner == arm}
    environment.pop(lone_rank.VARIABLE, None)
    if args.lone_rank is not None:
        plugin = args.profile_dir / "lone-rank"
        lone_rank.write_entry_points(plugin, {"headfit_lone_rank": "lone_rank:register"})
        path = [str(plugin), str(Path(__file__).resolve().parent), environment.get("PYTHONPATH", "")]
        environment |= {lone_rank.VARIABLE: args.lone_rank, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    url = f"http://127.0.0.1:{port}"
    return serving_server.started(command, environment, url=url, log=log, timeout_s=args.start_timeout)


def _read_log(args: argparse.Namespace, arm: str, log: Path, result: dict[str, Any], warmed: int = 0) -> None:
    """The decode steps of an ended server after the first `warmed` bytes of its log; that all ran as the rows state."""
    data = log.read_bytes()
    steps, text = (part.decode(errors="replace") for part in (data[warmed:], data))
    result["decode_step_ms"].setdefault(arm, []).append(report.decode_step_ms(steps))
    result["plugin"][arm] = said = report.plugin_lines(text)
    answered = any(line.startswith("headfit answered") for line in said)
    if answered != (arm == report.PLUGIN and args.backend != "flashmla"):
        raise ServerError(
            f"the {arm} server's log {'shows' if answered else 'lacks'} calls answered by headfit: {said}"
        )
    lone = [line for line in said if line.startswith(lone_rank.SAID)]
    if bool(lone) != (args.lone_rank is not None):
        raise ServerError(f"the {arm} server's layers are {'' if lone else 'not '}one rank's: {said}")
    stated = {(row["num_local_heads"], row["num_heads"]) for row in result["rows"]}
    for line in said:
        for heads in re.findall(r"(\d+) of (\d+) heads", line):
            if stated and tuple(map(int, heads)) not in stated:
                raise ServerError(f"the {arm} server has other heads than the rows' {stated}: {line}")


def measure(args: argparse.Namespace, url: str, number: int, concurrency: int) -> dict[str, Any]:
    """One cell of the table: warm-up, an empty prefix cache, then the load. With a failed request there is no time."""
    load = {"concurrency": concurrency, "max_new_tokens": args.output_tokens}
    generator = random.Random(f"{args.seed}/{number}/{concurrency}")
    warm, prompts = (
        [[generator.randrange(2, args.vocab_size) for _ in range(args.prompt_tokens)] for _ in range(count)]
        for count in (concurrency, max(args.min_requests, concurrency * args.requests_per_slot))
    )
    run_load(url, warm, **load | {"max_new_tokens": min(16, args.output_tokens)})
    flush_cache(url)
    requests = run_load(url, prompts, **load)
    row = report.metrics(requests)
    if row["num_errors"]:
        print(f"  {row['num_errors']} failed: {next(r.error for r in requests if r.error)}", file=sys.stderr)
        row = {name: value if name.startswith("num_") else None for name, value in row.items()}
    return row


def profile(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """The kernels of some decode steps under load, from the profiler of attention-TP rank 0."""
    generator = random.Random(f"{args.seed}/profile")
    prompts = [
        [generator.randrange(2, args.vocab_size) for _ in range(args.prompt_tokens)] for _ in range(args.profile)
    ]
    before = set(args.profile_dir.rglob("*.trace.json.gz"))
    load = {"concurrency": args.profile, "max_new_tokens": PROFILED_LENGTHS * args.output_tokens}
    thread = threading.Thread(target=run_load, args=(url, prompts), kwargs=load)
    thread.start()
    time.sleep(PREFILL_S)
    post(url, "/start_profile", {"num_steps": PROFILED_STEPS, "activities": ["GPU"]})
    deadline = time.monotonic() + 120
    while not (traces := sorted(set(args.profile_dir.rglob("*TP-0*.trace.json.gz")) - before)):
        if time.monotonic() > deadline:
            raise ServerError(f"the profiler left no trace under {args.profile_dir}")
        time.sleep(0.25)
    if not thread.is_alive():
        raise ServerError("the profiled load ended before its profile; give more --output-tokens")
    time.sleep(1)  # it may still be written
    with contextlib.suppress(ServerError):  # what the load was for is done
        post(url, "/abort_request", {"abort_all": True})
    thread.join()
    with gzip.open(traces[-1], "rt") as stream:
        events = json.load(stream)["traceEvents"]
    return {"steps": PROFILED_STEPS, "concurrency": args.profile, **report.kernel_shares(events, ATTENTION_KERNELS)}


def _facts(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """What the server says of itself, and the heads that follow from it."""
    info = get(url, "/server_info")
    num_heads = args.num_heads or _configured_heads(info.get("model_path"))
    tp_size = int(info["tp_size"])
    attn_tp_size = tp_size // int(info.get("dp_size") or 1) if info.get("enable_dp_attention") else tp_size
    if args.lone_rank is not None:
        if tp_size != 1:
            raise ServerError(f"--lone-rank: the server's tp_size is {tp_size}, allowed: 1")
        _, attn_tp_size = lone_rank.parse(args.lone_rank)
    if num_heads % attn_tp_size:
        raise ServerError(f"{num_heads} heads do not divide by attention TP {attn_tp_size}")
    return {
        "sglang": info.get("version", "unknown"),
        "tp_size": tp_size,
        "num_heads": num_heads,
        "num_local_heads": num_heads // attn_tp_size,
    }


def _configured_heads(model_path: str | None) -> int:
    config = Path(model_path or "") / "config.json"
    if not config.is_file():
        raise ServerError(f"--num-heads is needed: {model_path!r} is no local folder with a config.json")
    return int(json.loads(config.read_text())["num_attention_heads"])


def _say(row: dict[str, Any]) -> None:
    speed = "no time" if row["output_tokens_per_s"] is None else f"{row['output_tokens_per_s']:.1f} tokens/s"
    which = f"round {row['round']}" if row["round"] >= 0 else "warm-up"
    print(f"{which} {row['arm']:<6} concurrency {row['concurrency']:>3}: {speed}", flush=True)


def _write(path: Path, result: dict[str, Any]) -> None:
    result["summary"] = report.summarise(result["rows"])
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
