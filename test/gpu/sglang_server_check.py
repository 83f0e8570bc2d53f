"""Real SGLang servers with and without the plugin, on the same random weights and the same forced tokens.

    python test/gpu/sglang_server_check.py --out RESULT.json --tp-size 2 --num-heads 16 [-- MORE SERVER FLAGS]

Needs as many Hopper GPUs as `--tp-size` (or `--one-gpu`), an SGLang that serves DeepSeek-V4, and headfit with its entry
point. Each arm is a server; all start at once and share the GPUs (`--side-by-side` starts fewer at a time), and one at
a time is asked:

    | arm      | what                                                                         |
    |----------|------------------------------------------------------------------------------|
    | stock    | `HEADFIT_BACKEND=off`: the server's kernel, padded as the server pads        |
    | padded   | the same, padded to 128 heads                                                |
    | plugin   | headfit                                                                      |
    | fault    | headfit, every decode call with a neighbour rank's sinks                     |
    | eager    | headfit without CUDA graphs, with `HEADFIT_CHECK=1`: outputs against float64 |
    | dp       | headfit with DP attention over the ranks (needs `--tp-size` 2 or more)       |
    | dp_eager | dp and eager in one: what `dp` is compared with                              |
    | bare     | headfit without a kernel cache to write to; later a worker is killed         |

On one GPU, `--lone-rank 3/8` stands for a rank of attention TP 8 whose other ranks are absent (`lone_rank`), and with
`--one-gpu` all ranks of a server share the GPU: NCCL takes each for another host's and sums over sockets. That is slow,
64 ms for the sums of a decode step of two ranks, and otherwise the server that two GPUs would run.

All sequences continue with given tokens, so that the arms stay comparable (`sglang_server_plugin`); the prefix cache is
off. Compared are log-probabilities of 64 tokens at each decode step, in batches of 8, 3 and 1. Then new sinks are
loaded into the running stock, plugin and eager servers, from tensors and from disk, and the first 8 sequences run
again.

The JSON holds `checks` (name, value, limit, holds), `rows` (a checked decode call each: layer, step, relative errors)
and what each server said; `complete` is false where the run was interrupted, by SIGINT, SIGTERM or SIGHUP. The exit
code is 1 where a check does not hold, an arm failed or the run was interrupted, 2 where nothing could be started.
"""

import argparse
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BENCHMARK = HERE.parents[1] / "benchmark"
sys.path[:0] = [str(HERE), str(BENCHMARK)]

import lone_rank  # noqa: E402
import sglang_server_model as model  # noqa: E402
import sglang_server_verdict as verdict  # noqa: E402
import torch  # noqa: E402
from measured_on import git_commit, gpu_name  # noqa: E402
from serving_report import plugin_lines  # noqa: E402
from serving_server import ServerError, flush_cache, get, healthy, post, signals_raised, started  # noqa: E402
from sglang_server_plugin import WRITE_EVERY_S, Wishes  # noqa: E402

from headfit.hosts.sglang.settings import BACKENDS  # noqa: E402

PORT_STEP = 20  # apart from one another, for what a server opens next to its own port
MAX_HEADS = 128  # that the server's kernel has
ONE_GPU_STEP = 2  # between two ranks' places in `one_gpu_environment`
END_S = 90.0  # in which a server with a dead worker must have ended, its other workers with it
STOCK_HEADS = (64, 128)  # that the server's kernel takes, and that one rank with all heads is not padded to


@dataclass(frozen=True, slots=True)
class Arm:
    """How one server differs from the others: what its workers are wished, its flags and its environment."""

    wishes: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    stock: bool = False


_EAGER = {"wishes": {"check_every": 8}, "environment": {"HEADFIT_CHECK": "1"}}
_EAGER_FLAGS = ("--disable-cuda-graph",)
_DP_FLAGS = ("--enable-dp-attention", "--dp-size", "{tp_size}")
ARMS = {
    "stock": Arm(stock=True),
    "padded": Arm(stock=True, wishes={"pad_to": 128}),
    "plugin": Arm(),
    "fault": Arm(wishes={"neighbour_sinks": True}),
    "eager": Arm(flags=_EAGER_FLAGS, **_EAGER),
    "dp": Arm(flags=_DP_FLAGS),
    "dp_eager": Arm(flags=(*_EAGER_FLAGS, *_DP_FLAGS), **_EAGER),
    # A folder that is yet to be made, and one that cannot be.
    "bare": Arm(environment={"TRITON_CACHE_DIR": "{folder}/missing/triton", "HEADFIT_CACHE_DIR": "/dev/null/headfit"}),
}
UPDATED = ("stock", "plugin", "eager")
NEEDS_STOCK_KERNEL = ("stock", "padded", "eager")


@dataclass(slots=True)
class Server:
    """A running arm. `process` is its launcher."""

    arm: str
    url: str
    folder: Path
    log: Path
    process: subprocess.Popen | None = None

    def logprobs(self, steps: int, prompt_sets: int = 1) -> torch.Tensor:
        """float64 [sequences, steps, watched tokens]: of every decode step, the prompt's own not among them.

        The sequences are those of the first `prompt_sets` sets of prompts, which run one set after the other.

        Raises:
            ServerError: other tokens came than those that were to be forced.
        """
        return torch.cat([self._logprobs(model.prompts(number), steps) for number in range(prompt_sets)])

    def _logprobs(self, prompts: Sequence[list[int]], steps: int) -> torch.Tensor:
        body = {
            "input_ids": prompts,
            "sampling_params": {"temperature": 0, "max_new_tokens": steps + 1, "ignore_eos": True},
            "return_logprob": True,
            "token_ids_logprob": [model.watched_tokens()] * len(prompts),
        }
        answers = post(self.url, "/generate", body, timeout_s=300)
        return logprobs_of(answers, prompts, steps)

    def settle(self) -> None:
        """Some tokens for every rank, so that the workers write what they have counted until now."""
        time.sleep(2 * WRITE_EVERY_S)
        few = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
        post(self.url, "/generate", {"input_ids": model.prompts()[-4:], "sampling_params": few})

    def workers(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("worker-*.json"))]

    def update_from_tensor(self, num_heads: int, seed: int, tp_size: int) -> None:
        payload = [model.sink_payload(num_heads, seed)] * tp_size
        self._updated("/update_weights_from_tensor", {"serialized_named_tensors": payload})

    def update_from_disk(self, folder: Path) -> None:
        self._updated("/update_weights_from_disk", {"model_path": str(folder), "load_format": "auto"})

    def _updated(self, path: str, body: dict[str, Any]) -> None:
        flush_cache(self.url)  # which waits for the server to be idle: in an update it would insist
        answer = post(self.url, path, body)
        if not answer or not answer.get("success"):
            raise ServerError(f"{path}: {answer}")


def logprobs_of(answers: Sequence[dict[str, Any]], prompts: Sequence[list[int]], steps: int) -> torch.Tensor:
    """See `Server.logprobs`, of the server's answers to it."""
    forced = model.forced_tokens()
    found = []
    for answer, prompt in zip(answers, prompts, strict=True):
        wanted = forced[len(prompt) - 1 : len(prompt) + steps].tolist()
        if answer["output_ids"][-steps - 1 :] != wanted:
            raise ServerError(f"tokens were not forced: {answer['output_ids'][:4]}, wanted {wanted[:4]}")
        rows = answer["meta_info"]["output_token_ids_logprobs"]
        if len(rows) != steps + 1 or any([entry[1] for entry in row] != model.watched_tokens() for row in rows):
            raise ServerError(f"log-probabilities of {len(rows)} steps or of other tokens, wanted {steps + 1}")
        found.append([[entry[0] for entry in row] for row in rows[1:]])
    return torch.tensor(found, dtype=torch.float64)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if reason := obstacle():
        print(f"no server can run: {reason}", file=sys.stderr)
        return 2
    with (
        signals_raised(),
        tempfile.TemporaryDirectory(prefix="headfit-servers-", ignore_cleanup_errors=True) as work,
    ):
        return run(args, Path(work))


def obstacle() -> str:
    """Why no server can run here; empty where one may."""
    found = find_spec("sglang")
    if found is None or found.origin is None:  # None of a folder that only has the name
        return f"{sys.executable} finds no sglang"
    return "" if torch.cuda.is_available() else "torch sees no GPU"


def run(args: argparse.Namespace, work: Path) -> int:
    """All arms and the verdict; an interrupted run's, too. `work` is an empty folder. Returns the exit code."""
    model.write_model(work / "model", args.num_heads)
    lone_rank.write_entry_points(
        work / "entry-point",
        {"headfit_lone_rank": "lone_rank:register", "headfit_server_check": "sglang_server_plugin:register"},
    )
    result: dict[str, Any] = {
        "check": "sglang_server",
        "command": sys.argv,
        "tp_size": args.tp_size,
        "num_heads": args.num_heads,
        "attn_tp_size": args.attn_tp_size,
        "num_local_heads": args.num_heads // args.attn_tp_size,
        "lone_rank": args.lone_rank,
        "one_gpu": args.one_gpu,
        "date": date.today().isoformat(),
        "gpu": gpu_name(),
        "torch": torch.__version__,
        "commit": args.commit or git_commit(),
        "steps": args.steps,
        "prompt_sets": args.prompt_sets,
        "complete": False,
        "arms": {},
        "differences": {},
    }
    found: dict[str, torch.Tensor] = {}
    try:
        for first in range(0, len(args.arms), args.side_by_side):
            run_group(args, args.arms[first : first + args.side_by_side], work, found, result)
        result["complete"] = True
    except KeyboardInterrupt as interrupt:
        result["interrupted"] = str(interrupt)
    finally:
        result["differences"] = verdict.differences(found)
        result["checks"] = verdict.checks(result)
        write(args.out, result)
    print("\n".join(verdict.table(result)))
    print(json.dumps({name: result[name] for name in ("num_local_heads", "tp_size", "sglang") if name in result}))
    return int(not all(check["holds"] for check in result["checks"]))


def run_group(
    args: argparse.Namespace, group: Sequence[str], work: Path, found: dict[str, torch.Tensor], result: dict[str, Any]
) -> None:
    """Arms whose servers run side by side: the first runs, the updates, the counts, and a worker's end."""
    with running(args, group, work, result) as servers:
        for server in servers.values():
            attempt(result, server.arm, lambda server=server: ask(args, server, found, result))
            write(args.out, result)
        for server in (servers[arm] for arm in UPDATED if arm in servers):
            attempt(result, server.arm, lambda server=server: update(args, server, work, found))
        for server in servers.values():
            attempt(result, server.arm, lambda server=server: close(server, result))
        if "bare" in servers:
            attempt(result, "bare", lambda: kill_a_worker(servers["bare"], result))
    if "bare" in group and args.restart:
        with running(args, ["bare"], work, result, suffix="-again") as again:
            result["arms"]["bare"]["restarted"] = "bare" in again


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what cannot be run ends it with a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON result; the servers' logs go beside it")
    parser.add_argument("--tp-size", type=int, default=2)
    parser.add_argument("--num-heads", type=int, default=16, help="the model's query heads, over all ranks")
    parser.add_argument(
        "--lone-rank",
        type=lone_rank.argument,
        metavar="R/N",
        help="with --tp-size 1: rank R of attention TP N, on its own",
    )
    parser.add_argument("--one-gpu", action="store_true", help="all ranks of a server on the first GPU")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[arm for arm in ARMS if arm not in verdict.DP])
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a run")
    parser.add_argument(
        "--prompt-sets", type=int, default=4, help="sets of prompts in the first run of each arm: 8, 3, 1, 8, ..."
    )
    backends = [name for name in BACKENDS if name != "off"]
    parser.add_argument(
        "--backend", choices=backends, default="auto", help="HEADFIT_BACKEND of headfit's arms (default: auto)"
    )
    parser.add_argument("--side-by-side", type=int, default=len(ARMS), help="servers that share the GPUs")
    parser.add_argument("--commit", help="recorded in the result; default: what git says")
    parser.add_argument("--restart", action="store_true", help="start the bare server once more after its end")
    parser.add_argument("--port", type=int, default=31_000)
    parser.add_argument("--start-timeout", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--memory-fraction", type=float, default=0.6, help="of what is free when a server starts")
    parser.add_argument("flags", nargs="*", help="after `--`: more flags for every server")
    args = parser.parse_args(arguments)
    for name in ("tp_size", "num_heads", "steps", "prompt_sets", "side_by_side"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: {getattr(args, name)}, allowed: at least 1")
    if not 0 < args.memory_fraction < 1:
        parser.error(f"--memory-fraction: {args.memory_fraction}, allowed: above 0 and below 1")
    if not 0 < args.start_timeout < math.inf:
        parser.error(f"--start-timeout: {args.start_timeout}, allowed: a finite number above 0")
    if not args.out.parent.is_dir() or args.out.is_dir():
        parser.error(f"--out: {args.out}, allowed: a file in a folder that exists")
    args.attn_tp_size = args.tp_size
    if args.lone_rank is not None:
        if args.tp_size > 1:
            parser.error(f"--lone-rank: {args.lone_rank}, allowed only with --tp-size 1, not {args.tp_size}")
        _, args.attn_tp_size = lone_rank.parse(args.lone_rank)
    if args.one_gpu and args.tp_size == 1:
        parser.error("--one-gpu needs --tp-size 2 or more")
    if args.num_heads % args.attn_tp_size:
        parser.error(f"--num-heads: {args.num_heads}, allowed: multiples of the attention TP, {args.attn_tp_size}")
    if (groups := model.CONFIG["o_groups"]) % args.attn_tp_size:
        parser.error(f"attention TP: {args.attn_tp_size}, allowed: divisors of the model's {groups} output groups")
    if args.num_heads % groups:
        parser.error(f"--num-heads: {args.num_heads}, allowed: multiples of the model's {groups} output groups")
    if args.num_heads // args.attn_tp_size > MAX_HEADS:
        parser.error(f"--num-heads: {args.num_heads // args.attn_tp_size} a rank, allowed: at most {MAX_HEADS}")
    if args.num_heads not in STOCK_HEADS:
        allowed = ", ".join(map(str, STOCK_HEADS))
        if args.attn_tp_size == 1 and set(NEEDS_STOCK_KERNEL) & set(args.arms):
            parser.error(
                f"--num-heads: {args.num_heads}, allowed with --tp-size 1: {allowed} (stock pads only beyond TP 1)"
            )
        if "dp_eager" in args.arms:
            parser.error(f"--num-heads: {args.num_heads}, allowed with --arms dp_eager: {allowed} (each rank has all)")
    for arm in verdict.DP:
        if arm in args.arms and args.tp_size == 1:
            parser.error(f"--arms {arm} needs --tp-size 2 or more")
    return args


def command(args: argparse.Namespace, arm: str, work: Path, port: int) -> list[str]:
    """The command line of an arm's server."""
    flags = [flag.format(tp_size=args.tp_size) for flag in ARMS[arm].flags]
    sizes = [str(size) for size in (1, 2, 4, len(model.PROMPT_TOKENS))]
    return [
        *(sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model-path", str(work / "model"), "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--tp-size", str(args.tp_size), "--disable-radix-cache", "--skip-server-warmup", "--random-seed", "1"),
        *("--mem-fraction-static", str(args.memory_fraction), "--max-total-tokens", "65536"),
        *("--max-running-requests", "16", "--chunked-prefill-size", "2048", "--cuda-graph-bs-decode", *sizes),
        *(("--gpu-id-step", str(ONE_GPU_STEP)) if args.one_gpu else ()),
        *flags,
        *args.flags,
    ]


def one_gpu_environment(tp_size: int) -> dict[str, str]:
    """With `--gpu-id-step`: every rank finds its place in this list of GPUs, and each place but -1 is the first GPU.

    CUDA itself reads the list to the first -1 only. NCCL needs the workers' own `NCCL_HOSTID` besides (`Wishes`).
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    return {
        "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "1",
        "CUDA_VISIBLE_DEVICES": ",-1,".join([first] * tp_size),
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def environment(args: argparse.Namespace, arm: str, work: Path, folder: Path) -> dict[str, str]:
    """The environment of an arm's server; this process's, and what the arm adds."""
    one = ARMS[arm]
    path = [str(work / "entry-point"), str(HERE), str(BENCHMARK), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **{name: value for name, value in os.environ.items() if name not in (lone_rank.VARIABLE, "HEADFIT_CHECK")},
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "HEADFIT_BACKEND": "off" if one.stock else args.backend,
        # Other servers take and give memory meanwhile.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        **({lone_rank.VARIABLE: args.lone_rank} if args.lone_rank is not None else {}),
        **(one_gpu_environment(args.tp_size) if args.one_gpu else {}),
        **Wishes(folder=str(folder), own_host=args.one_gpu, **one.wishes).as_environment(),
        **{name: value.format(folder=folder) for name, value in one.environment.items()},
    }


@contextlib.contextmanager
def running(
    args: argparse.Namespace, arms: Sequence[str], work: Path, result: dict[str, Any], suffix: str = ""
) -> Iterator[dict[str, Server]]:
    """Within, the arms' servers run that came up; the others' errors stand in `result`."""
    servers: dict[str, Server] = {}
    stop = threading.Event()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(arms)) as pool:

        def start(arm: str) -> None:
            port = args.port + PORT_STEP * list(ARMS).index(arm)
            folder = work / "arms" / f"{arm}{suffix}"
            folder.mkdir(parents=True)
            log = args.out.with_name(f"{args.out.stem}-{arm}{suffix}.log")
            server = Server(arm, f"http://127.0.0.1:{port}", folder, log)
            begin = time.monotonic()
            context = started(
                command(args, arm, work, port),
                environment(args, arm, work, folder),
                url=server.url,
                log=log,
                timeout_s=args.start_timeout,
                stop=stop,
            )
            server.process = context.__enter__()
            stack.push(context)
            servers[arm] = server
            result["arms"].setdefault(arm, {})[f"ready_s{suffix}"] = round(time.monotonic() - begin, 1)
            print(f"{arm}{suffix}: up after {time.monotonic() - begin:.0f} s", flush=True)

        try:
            list(pool.map(lambda arm: attempt(result, arm, lambda: start(arm)), arms))
            yield {arm: servers[arm] for arm in arms if arm in servers}
        finally:  # all at once; the stack waits for one after the other
            stop.set()
            for server in list(servers.values()):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.process.pid, signal.SIGTERM)
                text = server.log.read_text(errors="replace")
                result["arms"][server.arm][f"said{suffix}"] = plugin_lines(text)


def attempt(result: dict[str, Any], arm: str, what: Callable[[], None]) -> None:
    """One arm's failure must not cost the others' results."""
    try:
        what()
    except (ServerError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        message = f"{type(error).__name__}: {error}"
        result["arms"].setdefault(arm, {}).setdefault("errors", []).append(message)
        print(f"{arm}: {message}", file=sys.stderr, flush=True)


def ask(args: argparse.Namespace, server: Server, found: dict[str, torch.Tensor], result: dict[str, Any]) -> None:
    """The first runs; of stock and plugin twice, for what changes from run to run alone."""
    result["sglang"] = get(server.url, "/server_info").get("version", "unknown")
    begin = time.monotonic()
    found[server.arm] = server.logprobs(args.steps, args.prompt_sets)
    print(f"{server.arm}: {args.prompt_sets} x {args.steps} forced steps, {time.monotonic() - begin:.1f} s", flush=True)
    if server.arm in UPDATED:
        found[f"{server.arm} again"] = server.logprobs(args.steps)


def update(args: argparse.Namespace, server: Server, work: Path, found: dict[str, torch.Tensor]) -> None:
    """New sinks by tensors, others from disk, and the first ones again; a run after each."""
    server.update_from_tensor(args.num_heads, 1, args.tp_size)
    found[f"{server.arm} tensor"] = server.logprobs(args.steps)
    if not (work / "sinks").exists():
        model.write_sinks(work / "sinks", args.num_heads, 2)
    server.update_from_disk(work / "sinks")
    found[f"{server.arm} disk"] = server.logprobs(args.steps)
    server.update_from_tensor(args.num_heads, 0, args.tp_size)
    found[f"{server.arm} back"] = server.logprobs(args.steps)


def close(server: Server, result: dict[str, Any]) -> None:
    server.settle()
    arm = result["arms"].setdefault(server.arm, {})
    arm["workers"] = server.workers()


def kill_a_worker(server: Server, result: dict[str, Any]) -> None:
    """SIGKILL to one worker: the server and its other workers must end, not hang, and its log says why."""
    pids = [worker["pid"] for worker in server.workers()]
    os.kill(pids[-1], signal.SIGKILL)
    begin = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(END_S)
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < begin + END_S:
        time.sleep(0.2)
    said = [
        line for line in server.log.read_text(errors="replace").splitlines() if re.search("(?i)kill|exit|dead", line)
    ]
    result["arms"]["bare"]["after_kill"] = {
        "ended": server.process.poll() is not None,
        "seconds": round(time.monotonic() - begin, 1),
        "left": left,
        "serves": healthy(server.url),
        "said": said[-5:],
    }


def runs(pid: int) -> bool:
    """False of a process that has ended, although nobody may have asked for its exit status yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def write(path: Path, result: dict[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
