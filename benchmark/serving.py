"""A server with and without the plugin, in turn: tokens a second, TTFT and TPOT by concurrency.

    python benchmark/serving.py --out benchmark/results/serving-h200.json --num-heads 128 -- \\
        python -m sglang.launch_server --model-path MODEL --tp-size 4 --port {port}
    python benchmark/serving.py --out RESULT.json --side-by-side --num-heads 128 -- ... --mem-fraction-static 0.4
    python benchmark/serving.py --out RESULT.json --num-heads 128 --attach stock=URL --attach plugin=URL
    python benchmark/serving.py --plot benchmark/results/serving-h200.json

The command after `--` starts the server of both arms; only `HEADFIT_BACKEND` differs: `off` for stock, `--backend` for
the plugin (and what `--env` gives one arm). A round starts, warms, measures and stops both, and the next round the
other way about. With `--side-by-side` both start once, share the GPUs and are measured in turn at every concurrency:
only one has work at a time, and the other, whose memory is its own, launches nothing; with SGLang's `--sleep-on-idle`
it takes no CPU core either. A model of few layers measures the CPU's code. With `--attach` the same is done
with servers that already run. `--lone-rank 3/8` stands for a rank of attention TP 8 on one GPU (`lone_rank`). Both
arms get the same prompts: random token ids, new ones each round and concurrency; the prefix cache is flushed before
each measurement. The first round is left out (`--warm-up-rounds`): in it the arm that goes first compiles kernels that
the other then finds on disk, those for every number of whole prompts in a prefill batch included.

A request that fails, or ends with other than the tokens asked for, is counted, printed and makes the exit code 1, as a
profile does that could not be taken; a measurement with one gets no time. A started server's log must say that headfit
answered decode calls in the plugin's arm, with a kernel of its own in every worker and no call left to the server's,
and none in stock's, with the heads that the rows state, or the run ends; from it come the decode step's milliseconds by
running requests, too. With `--profile N`: its profiler's kernels at concurrency N. `--stop-after` ends early with the
rounds that are done, one at least; a profile is still taken side by side.

RESULT.json is written after every round that counts and holds whole rounds only: `complete` once nothing is left to
do, `error` where something ended the run before, `verified` where the rows' servers ran here and their logs were read.
SIGINT, SIGTERM and SIGHUP end the servers, too. Prints a table and last one JSON line: the result without its rows.
"""

import argparse
import contextlib
import gzip
import json
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import Any

import lone_rank
import serving_report as report
import serving_server
from measured_on import git_commit, gpu_name, package_version
from serving_arguments import ARMS, PORT_STEP, parse
from serving_client import Request, run_load
from serving_server import ServerError, flush_cache, get, post

ATTENTION_KERNELS = r"flash_fwd|splitkv|mla_combine|mla_metadata|sparse_mqa"
PROFILED_STEPS = 10
PREFILL_S = 5.0  # until every prompt of a profiled load is prefilled
TRACE_S = 120.0  # for a trace to be there, whole
PROFILED_LENGTHS = 16  # how much longer a profiled request may run than a measured one


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments, __doc__)
    if args.plot:
        return _plot(args.plot, args.plotted)
    result: dict[str, Any] = {"benchmark": "serving", "complete": False, "verified": False}
    result |= {"date": date.today().isoformat(), "command": sys.argv, "rows": []}
    result |= {"backend": args.backend, "prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens}
    result |= {"decode_step_ms": {}, "profiles": {}, "plugin": {}, "seed": args.seed}
    result |= {"lone_rank": args.lone_rank, "num_warm_up_errors": 0}
    if not args.attach:  # the servers run here, in this environment or in one that their command names
        versions = {name: package_version(name) for name in ("torch", "headfit")}
        result |= {"gpu": gpu_name(), **versions, "commit": args.commit or git_commit()}
    try:
        with serving_server.signals_raised():
            if args.side_by_side:
                _side_by_side(args, result)
            else:
                _rounds(args, result, _attached_round if args.attach else _started_round)
            _write(args.out, result | {"complete": True})
    except (ServerError, OSError) as error:
        return _failed(args.out, result, str(error), 1)
    except serving_server.Signalled as signalled:
        return _failed(args.out, result, f"ended by {signalled}", signalled.exit_code)
    result["complete"] = True
    print("\n".join([*report.table(result["rows"]), *report.notes(result)]))
    print(json.dumps({name: value for name, value in result.items() if name != "rows"}))
    failed = any("error" in found for found in result["profiles"].values())
    return int(failed or result["num_errors"] + result["num_warm_up_errors"] > 0)


def _failed(out: Path, result: dict[str, Any], error: str, exit_code: int) -> int:
    """Leave the rounds that are done, and an earlier file where none is."""
    if result["rows"]:
        with contextlib.suppress(OSError):  # a full disk
            _write(out, result | {"error": error})
    with contextlib.suppress(OSError):  # a terminal that hung up
        print(f"serving.py: {error}", file=sys.stderr)
    return exit_code


def _plot(path: Path, result: dict[str, Any]) -> int:
    print("\n".join([*report.table(result["rows"]), *report.notes(result)]))
    try:
        report.plot(result, path.with_suffix(".png"))
    except ImportError as error:
        print(f"serving.py: --plot: matplotlib is needed for {path.with_suffix('.png')}: {error}", file=sys.stderr)
        return 1
    return 0


def _rounds(args: argparse.Namespace, result: dict[str, Any], one: Callable[..., None]) -> None:
    """All rounds, or those before the first that would end too late if it took as long as the one before.

    one: fills a round's own rows, decode steps, plugin lines and profiles, which count once it has returned.
    """
    begin = last = time.monotonic()
    for number in range(-args.warm_up_rounds, args.rounds):
        found: dict[str, Any] = {"rows": [], "decode_step_ms": {}, "plugin": {}, "profiles": {}, "num_errors": 0}
        one(args, number, found)
        if number < 0:
            result["num_warm_up_errors"] += found["num_errors"] + sum(row["num_errors"] for row in found["rows"])
        else:
            _add(result, found)
            result["verified"] = bool(args.server)
            _write(args.out, result)
        now = time.monotonic()
        if args.stop_after and 0 <= number < args.rounds - 1 and 2 * now - last - begin > args.stop_after:
            print(f"stopped after {number + 1} of {args.rounds} rounds, {now - begin:.0f} s", file=sys.stderr)
            break
        last = now


def _add(result: dict[str, Any], found: dict[str, Any]) -> None:
    result["rows"] += found["rows"]
    for arm, steps in found["decode_step_ms"].items():
        result["decode_step_ms"].setdefault(arm, []).extend(steps)
    for name in ("plugin", "profiles"):
        result[name] |= found[name]


def _order(number: int) -> tuple[str, ...]:
    return ARMS if number % 2 == 0 else ARMS[::-1]


def _attached_round(
    args: argparse.Namespace, number: int, found: dict[str, Any], logs: dict[str, Path] | None = None
) -> None:
    facts = {arm: _facts(args, url) for arm, url in args.attach.items()}
    if number < 0:
        for arm in _order(number):
            found["num_errors"] += warm_prefill(args, args.attach[arm])
    for concurrency in args.concurrency:
        for arm in _order(number):
            row = {"arm": arm, **facts[arm], "round": number, "concurrency": concurrency}
            found["rows"].append(row | measure(args, args.attach[arm], number, concurrency, logs and logs[arm]))
            _say(found["rows"][-1])


def _side_by_side(args: argparse.Namespace, result: dict[str, Any]) -> None:
    logs = {arm: args.out.with_name(f"{args.out.stem}-{arm}.log") for arm in ARMS}
    ports = {arm: args.port + PORT_STEP * number for number, arm in enumerate(ARMS)}
    warmed = dict.fromkeys(ARMS, 0)  # bytes of each log before the first round that counts

    def one(args: argparse.Namespace, number: int, found: dict[str, Any]) -> None:
        if number == 0:
            warmed.update({arm: log.stat().st_size for arm, log in logs.items()})
        _attached_round(args, number, found, logs)
        for arm, log in logs.items():
            found["plugin"][arm] = _checked(args, arm, log.read_text(errors="replace"), found["rows"])

    with _running(args, {arm: (ports[arm], logs[arm]) for arm in ARMS}) as urls:
        args.attach = urls
        _rounds(args, result, one)
        if args.profile:
            result["profiles"] = {arm: profiled(args, url, logs[arm]) for arm, url in urls.items()}
    for arm, log in logs.items():
        _read_log(args, arm, log, result, warmed[arm])


def _started_round(args: argparse.Namespace, number: int, found: dict[str, Any]) -> None:
    for arm in _order(number):
        log = args.out.with_name(f"{args.out.stem}-{arm}-{number}.log")
        with _running(args, {arm: (args.port, log)}) as urls:
            facts = _facts(args, urls[arm])
            if number < 0:
                found["num_errors"] += warm_prefill(args, urls[arm])
            for concurrency in args.concurrency:
                row = {"arm": arm, **facts, "round": number, "concurrency": concurrency}
                found["rows"].append(row | measure(args, urls[arm], number, concurrency, log))
                _say(found["rows"][-1])
            if args.profile and number == args.rounds - 1:
                found["profiles"][arm] = profiled(args, urls[arm], log)
        _read_log(args, arm, log, found)


@contextlib.contextmanager
def _running(args: argparse.Namespace, places: dict[str, tuple[int, Path]]) -> Iterator[dict[str, str]]:
    """Within, the arms' servers run; yields their URLs. places: each arm's port and log.

    Raises:
        ServerError: one did not come up, or is not healthy in the end.
    """
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        # In threads, for a start takes minutes, and there no signal comes between a process and its end.
        with ThreadPoolExecutor(len(places)) as pool:
            try:
                contexts = [_server(args, arm, port, log, stop) for arm, (port, log) in places.items()]
                for start in as_completed([pool.submit(stack.enter_context, context) for context in contexts]):
                    start.result()
            except BaseException:
                stop.set()  # the other starts need not come up
                raise
        urls = {arm: f"http://127.0.0.1:{port}" for arm, (port, _) in places.items()}
        yield urls
        for arm, url in urls.items():
            if not serving_server.healthy(url):
                raise ServerError(f"the {arm} server is not healthy after its load: see {places[arm][1]}")


def _server(
    args: argparse.Namespace, arm: str, port: int, log: Path, stop: threading.Event
) -> contextlib.AbstractContextManager:
    command = [part.replace("{port}", str(port)) for part in args.server]
    traces = args.profile_dir / arm
    traces.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "HEADFIT_BACKEND": "off" if arm == report.STOCK else args.backend,
        "SGLANG_TORCH_PROFILER_DIR": str(traces),
    }
    for name in (lone_rank.VARIABLE, "HEADFIT_CHECK"):  # the latter would be measured with the kernel
        environment.pop(name, None)
    if args.lone_rank is not None:
        plugin = args.profile_dir / "lone-rank"
        lone_rank.write_entry_points(plugin, {"headfit_lone_rank": "lone_rank:register"})
        path = [str(plugin), str(Path(__file__).resolve().parent), environment.get("PYTHONPATH", "")]
        environment |= {lone_rank.VARIABLE: args.lone_rank, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    environment |= {name: value for owner, name, value in args.env if owner == arm}
    url = f"http://127.0.0.1:{port}"
    return serving_server.started(command, environment, url=url, log=log, timeout_s=args.start_timeout, stop=stop)


def _read_log(args: argparse.Namespace, arm: str, log: Path, found: dict[str, Any], warmed: int = 0) -> None:
    """The decode steps of an ended server after the first `warmed` bytes of its log; that all ran as the rows state."""
    data = log.read_bytes()
    steps, text = (part.decode(errors="replace") for part in (data[warmed:], data))
    found["plugin"][arm] = _checked(args, arm, text, found["rows"])
    found["decode_step_ms"].setdefault(arm, []).append(report.decode_step_ms(steps))


def _checked(args: argparse.Namespace, arm: str, text: str, rows: Sequence[report.Row]) -> list[str]:
    """What the plugin said in a server's log.

    Raises:
        ServerError: it does not bear out the rows.
    """
    said = report.plugin_lines(text)
    is_lone_rank = args.lone_rank is not None
    if fault := report.log_fault(said, arm, rows, backend=args.backend, is_lone_rank=is_lone_rank):
        raise ServerError(fault)
    return said


def warm_prefill(args: argparse.Namespace, url: str) -> int:
    """One prompt of every size that a prefill batch of the load's whole prompts may have, and of the largest batch's.

    SGLang compiles some kernels for a range of sizes, 20 s each. How many requests share a prefill batch is chance, so
    a size may first come up in a round that counts. (Prompts that do not divide the chunk make batches of other sizes,
    too, when it cuts them.)

    Returns how many prompts failed, 0 or 1: it ends with the first that does.
    """
    info = get(url, "/server_info")
    chunk, longest = info.get("chunked_prefill_size"), info.get("max_req_input_len")
    limits = [args.prompt_tokens * max(args.concurrency)]
    limits += [chunk if isinstance(chunk, int) and chunk > 0 else info.get("max_prefill_tokens")]  # -1: no chunks
    limits += [longest - 1 if isinstance(longest, int) else None]  # SGLang refuses a prompt of that length
    most = min(limit for limit in limits if isinstance(limit, int))
    generator = random.Random(f"{args.seed}/prefill")
    for size in sorted({*range(args.prompt_tokens, most, args.prompt_tokens), most}):
        prompt = [generator.randrange(2, args.vocab_size) for _ in range(size)]
        (request,) = run_load(url, [prompt], concurrency=1, max_new_tokens=1)
        if request.error:
            print(f"  no warm-up with a prompt of {size} tokens or more: {request.error}", file=sys.stderr)
            return 1
    return 0


def measure(
    args: argparse.Namespace, url: str, number: int, concurrency: int, log: Path | None = None
) -> dict[str, Any]:
    """One cell of the table: warm-up, an empty prefix cache, then the load. With a failed request there is no time.

    log: the server's, if it is here: how often the load filled the KV cache, and how many requests waited for it.
    """
    load = {"concurrency": concurrency, "max_new_tokens": args.output_tokens}
    generator = random.Random(f"{args.seed}/{number}/{concurrency}")
    warm, prompts = (
        [[generator.randrange(2, args.vocab_size) for _ in range(args.prompt_tokens)] for _ in range(count)]
        for count in (concurrency, max(args.min_requests, concurrency * args.requests_per_slot))
    )
    run_load(url, warm, **load | {"max_new_tokens": min(16, args.output_tokens)})
    flush_cache(url)
    before = log.stat().st_size if log else 0
    requests = run_load(url, prompts, **load)
    row = report.metrics(requests)
    if log:
        said = log.read_bytes()[before:].decode(errors="replace")
        row |= {"num_retractions": report.num_retractions(said), "num_waiting": report.num_waiting(said)}
    if row["num_errors"]:
        print(f"  {row['num_errors']} failed: {next(r.error for r in requests if r.error)}", file=sys.stderr)
        row = {name: value if name.startswith("num_") else None for name, value in row.items()}
    return row


def profiled(args: argparse.Namespace, url: str, log: Path) -> dict[str, Any]:
    """`profile`, or its error: what was measured before counts without it."""
    try:
        return profile(args, url, log)
    except ServerError as error:
        print(f"serving.py: no profile: {error}", file=sys.stderr)
        return {"error": str(error)}


def profile(args: argparse.Namespace, url: str, log: Path) -> dict[str, Any]:
    """The kernels of some decode steps under load, from the profiler of attention-TP rank 0.

    Raises:
        ServerError: there is no trace, or not of decode steps alone, with as many requests as asked for.
    """
    generator = random.Random(f"{args.seed}/profile")
    prompts = [
        [generator.randrange(2, args.vocab_size) for _ in range(args.prompt_tokens)] for _ in range(args.profile)
    ]
    before = set(args.profile_dir.rglob("*.trace.json.gz"))
    load = {"concurrency": args.profile, "max_new_tokens": PROFILED_LENGTHS * args.output_tokens}
    requests: list[Request] = []
    thread = threading.Thread(target=lambda: requests.extend(run_load(url, prompts, **load)))
    thread.start()
    try:
        time.sleep(PREFILL_S)
        before_steps = log.stat().st_size
        post(url, "/start_profile", {"num_steps": PROFILED_STEPS, "activities": ["GPU"]})
        deadline = time.monotonic() + TRACE_S
        while not (traces := sorted(set(args.profile_dir.rglob("*TP-0*.trace.json.gz")) - before)):
            if time.monotonic() > deadline:
                raise ServerError(f"the profiler left no trace under {args.profile_dir}")
            time.sleep(0.25)
        is_loaded, end = thread.is_alive(), time.perf_counter()
        said = log.read_bytes()[before_steps:].decode(errors="replace")
        events = _trace_events(traces[-1], deadline)
    except ServerError:
        _end_load(url, thread)
        raise
    _end_load(url, thread)
    if failed := [request.error for request in requests if request.error and request.last < end]:
        raise ServerError(f"{len(failed)} of {args.profile} profiled requests failed: {failed[0]}")
    if not is_loaded:
        raise ServerError("the profiled load ended before its profile; give more --output-tokens")
    if "Prefill batch" in said:
        raise ServerError("the server computed a prompt while decode steps were profiled")
    found = report.kernel_shares(events, ATTENTION_KERNELS)
    launches = {name: kernel["launches"] for name, kernel in found["attention_kernels"].items()}
    if not launches or any(count % PROFILED_STEPS for count in launches.values()):
        what = ", ".join(f"{count} launches of {name}" for name, count in launches.items()) or "no attention kernel"
        raise ServerError(f"not all {PROFILED_STEPS} profiled steps were decode steps: {what}")
    return {"steps": PROFILED_STEPS, "concurrency": args.profile, **found}


def _end_load(url: str, thread: threading.Thread) -> None:
    """What the load was for is done; the other server is measured without it."""
    with contextlib.suppress(ServerError):
        post(url, "/abort_request", {"abort_all": True})
    thread.join()


def _trace_events(path: Path, deadline: float) -> list[dict[str, Any]]:
    """A trace's events, once it reads whole: it is there before all of it is written."""
    while True:
        try:
            with gzip.open(path, "rt") as stream:
                return json.load(stream)["traceEvents"]
        except (EOFError, OSError, ValueError, KeyError, TypeError, zlib.error) as error:
            if time.monotonic() > deadline:
                raise ServerError(f"the trace {path} does not read whole: {type(error).__name__}: {error}") from error
        time.sleep(0.25)


def _facts(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """What the server says of itself, and the heads that follow from it."""
    info = get(url, "/server_info")
    try:
        num_heads = args.num_heads or _configured_heads(info.get("model_path"))
        tp_size = int(info["tp_size"])
        dp_size, pp_size, attn_cp_size = (int(info.get(name) or 1) for name in ("dp_size", "pp_size", "attn_cp_size"))
        # With DP attention its groups share a model's TP ranks; 0.5.23 has their number in a field of its own.
        attn_dp_size = int(info.get("attn_dp_size") or (dp_size if info.get("enable_dp_attention") else 1))
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(f"{url}/server_info gives no sizes: {type(error).__name__}: {error}") from error
    attn_tp_size, rest = divmod(tp_size, attn_dp_size * attn_cp_size)
    if attn_tp_size < 1 or rest:
        sizes = f"tp_size {tp_size}, DP attention {attn_dp_size}, attn_cp_size {attn_cp_size}"
        raise ServerError(f"{url}/server_info: {sizes}, allowed: sizes whose product divides tp_size")
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
        "num_workers": tp_size * pp_size * (1 if info.get("enable_dp_attention") else dp_size),
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
    result["num_errors"] = sum(row["num_errors"] for row in result["rows"])
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
