"""The command line of `serving.py`."""

import argparse
import json
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import lone_rank
import serving_report as report

CONCURRENCIES = (1, 8, 32, 64, 128)
ARMS = (report.STOCK, report.PLUGIN)
MAX_PORT = 65_535
PORT_STEP = 20  # between the ports of two servers, for what each opens next to its own
TP_SIZE = ("--tp-size", "--tp", "--tensor-parallel-size")  # SGLang's names of it


def parse(arguments: Sequence[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """The command line; what cannot be run ends it with a message."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON result, written after every round")
    parser.add_argument("--plot", type=Path, metavar="RESULT", help="draw an earlier result and stop")
    parser.add_argument("--attach", action="append", default=[], metavar="ARM=URL")
    parser.add_argument("--side-by-side", action="store_true", help="start both arms once, on the same GPUs")
    parser.add_argument(
        "--env", action="append", default=[], metavar="ARM:NAME=VALUE", help="a variable of one arm's server"
    )
    parser.add_argument(
        "--num-heads", type=_whole(1), help="the model's query heads; read from a local config.json if left out"
    )
    parser.add_argument(
        "--lone-rank",
        type=lone_rank.argument,
        metavar="R/N",
        help="servers of TP 1 become rank R of attention TP N, on its own",
    )
    parser.add_argument("--backend", default="auto", help="HEADFIT_BACKEND of the plugin arm (default: auto)")
    parser.add_argument("--rounds", type=_whole(1), default=5, help="pairs of arms (default: 5)")
    parser.add_argument("--warm-up-rounds", type=_whole(0), default=1, help="pairs before them, not kept (default: 1)")
    parser.add_argument("--stop-after", type=_seconds, metavar="SECONDS", help="start no round that would end later")
    parser.add_argument("--concurrency", type=_whole(1), nargs="+", default=list(CONCURRENCIES))
    parser.add_argument(
        "--requests-per-slot", type=_whole(1), default=4, help="requests a measurement, times concurrency"
    )
    parser.add_argument("--min-requests", type=_whole(1), default=1, help="at least as many a measurement (default: 1)")
    parser.add_argument("--prompt-tokens", type=_whole(1), default=1024)
    parser.add_argument("--output-tokens", type=_whole(1), default=256)
    parser.add_argument("--vocab-size", type=_whole(3), default=32_768, help="prompts are ids from 2 to this")
    parser.add_argument("--port", type=_whole(1, MAX_PORT), default=30_000)
    parser.add_argument("--start-timeout", type=_seconds, default=600.0, metavar="SECONDS")
    parser.add_argument(
        "--profile", type=_whole(1), metavar="CONCURRENCY", help="profile one decode there, in the last round"
    )
    parser.add_argument("--profile-dir", type=Path, default=Path("/tmp/headfit-profile"))
    parser.add_argument("--commit", help="recorded in the result; default: what git says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("server", nargs="*", help="after `--`: the command that starts a server on {port}")
    args = parser.parse_args(arguments)
    if args.plot:
        args.plotted = _plotted(parser, args.plot)
        return args
    args.env = [_arm_and_variable(parser, text) for text in args.env]
    if args.out is None:
        parser.error("--out is needed")
    if not args.out.parent.is_dir() or args.out.is_dir():
        parser.error(f"--out: {str(args.out)!r}, allowed: a file in a folder that exists")
    if bool(args.attach) == bool(args.server):
        parser.error("give either a server command after `--` or --attach")
    if args.attach and (args.profile or args.env or args.side_by_side or args.lone_rank is not None):
        parser.error("--profile, --env, --side-by-side and --lone-rank need servers that this program starts")
    args.attach = _attached(parser, args.attach)
    if args.side_by_side and args.port + PORT_STEP > MAX_PORT:
        parser.error(f"--port: {args.port}, allowed with --side-by-side: at most {MAX_PORT - PORT_STEP}")
    if args.backend != parser.get_default("backend"):
        _check_backend(parser, args.backend)
    if args.server:
        _check_server(parser, args.server)
    if args.lone_rank is not None:
        _check_lone_rank(parser, args)
    return args


def _whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: whole numbers from `low` to `high`, or without an end."""
    allowed = f"at least {low}" if high is None else f"{low} to {high}"

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}, allowed: a whole number, {allowed}") from error
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{value}, allowed: {allowed}")
        return value

    return number


def _seconds(text: str) -> float:
    """An argparse type: finite numbers above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}, allowed: a finite number above 0")
    return value


def _plotted(parser: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--plot: {str(path)!r}: {error}, allowed: a result of this benchmark")
    if not report.is_result(found):
        parser.error(f"--plot: {str(path)!r} is another file, allowed: a result of this benchmark")
    return found


def _check_backend(parser: argparse.ArgumentParser, backend: str) -> None:
    try:
        from headfit.hosts.sglang.settings import BACKENDS
    except ImportError:  # headfit is where the server command runs
        return
    allowed = [name for name in BACKENDS if name != "off"]
    if backend not in allowed:
        parser.error(f"--backend: {backend!r}, allowed: {', '.join(allowed)}")


def _check_server(parser: argparse.ArgumentParser, server: Sequence[str]) -> None:
    if not any("{port}" in part for part in server):
        command = shlex.join(server)
        parser.error(f"server: {command!r}, allowed: a command with {{port}} where the port goes")


def _check_lone_rank(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    _, size = lone_rank.parse(args.lone_rank)
    if args.num_heads is not None and args.num_heads % size:
        parser.error(f"--num-heads: {args.num_heads}, allowed with --lone-rank {args.lone_rank}: multiples of {size}")
    option, tp_size = _tp_size(args.server)
    if tp_size != "1":
        parser.error(f"the server command's {option}: {tp_size!r}, allowed with --lone-rank {args.lone_rank}: 1")


def _tp_size(server: Sequence[str]) -> tuple[str, str]:
    """The option that gives the server its TP size, and its value: the last one, as the server takes it."""
    found = TP_SIZE[0], "1"
    for part, after in zip(server, [*server[1:], ""], strict=True):
        option, equals, value = part.partition("=")
        if option in TP_SIZE:
            found = option, value if equals else after
    return found


def _attached(parser: argparse.ArgumentParser, texts: Sequence[str]) -> dict[str, str]:
    """The arms' URLs; none where there is no `--attach`."""
    pairs = [_arm_and_url(parser, text) for text in texts]
    arms = sorted(arm for arm, _ in pairs)
    if arms and arms != sorted(ARMS):
        parser.error(f"--attach: {', '.join(arms)}, allowed: one URL each for {' and '.join(ARMS)}")
    if pairs and len({url for _, url in pairs}) < len(ARMS):
        parser.error(f"--attach: {pairs[0][1]} for both arms, allowed: a server each")
    return dict(pairs)


def _arm_and_url(parser: argparse.ArgumentParser, text: str) -> tuple[str, str]:
    arm, _, url = text.partition("=")
    try:
        parts = urlsplit(url.rstrip("/"))
        port = 80 if parts.port is None else parts.port  # a ValueError where it is no port
        named = (parts.scheme, parts.path, parts.query, parts.fragment, parts.username) == ("http", "", "", "", None)
        named = named and bool(parts.hostname) and port > 0
    except ValueError:
        named = False
    if arm not in ARMS or not named:
        parser.error(f"--attach: {text!r}, allowed: {' or '.join(f'{arm}=http://HOST:PORT' for arm in ARMS)}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return arm, f"http://{host}:{port}"


def _arm_and_variable(parser: argparse.ArgumentParser, text: str) -> tuple[str, str, str]:
    arm, _, setting = text.partition(":")
    name, equals, value = setting.partition("=")
    if arm not in ARMS or not name or not equals:
        parser.error(f"--env: {text!r}, allowed: {' or '.join(f'{arm}:NAME=VALUE' for arm in ARMS)}")
    return arm, name, value
