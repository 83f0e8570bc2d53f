"""Sparse MQA decode over the packed fp8 cache: our kernels, the padded peer and the memory floor, on one GPU.

    python benchmark/decode_kernel.py --out benchmark/results/decode_kernel-h200.json
    python benchmark/decode_kernel.py --plot benchmark/results/decode_kernel-h200.json

Shapes: every key set, batch and head count below. Correctness first: a call with uneven lengths and absent keys, and
after the timing the graph's last launch, against float64 over the dequantised cache, on fresh random inputs; a kernel
that is wrong gets no time, and the exit code is 1.

Timed: one CUDA graph of many launches, each with its own queries and indices, no slot read twice by one graph, L2
flushed before each replay, all lengths full; microseconds of a launch. The peer (`flashmla`: the legacy kernels of
sgl-flash-mla) is given queries of its padded head count, of which any may be padding: its time does not depend on how
many are, so it is measured once per keys, batch and padding, and the row written for each head count. Timed of it are
its decode and combine kernels; the scheduling metadata, which the first call after `get_mla_metadata()` makes and every
later one reuses (as the layers of a captured server step do), is not.

Prints the roofline, a table and a summary, and last one JSON line: the result without its rows, with the summary.
"""

import argparse
import inspect
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import decode_kernel_report as report
import torch
from decode_kernel_inputs import (
    KEYS,
    MAX_BATCH,
    MAX_HEADS,
    MAX_LAUNCHES,
    POOL_SLOTS,
    Keys,
    Problem,
    make_problem,
    random_packed_pool,
)
from measured_on import git_commit
from torch import Tensor

from headfit.backends import flashmla
from headfit.kv_cache import HEAD_DIM, TOKEN_BYTES
from headfit.testing.timing import ColdTimer, Launch, Timing, copy_bandwidth, null_launch

BATCHES = (1, 8, 32, 64, 128, 256)
HEADS = (8, 16, 32, 64)
QUICK = {"keys": ["128", "128+512@4"], "batch": [1, 32, 128], "heads": [16]}

ERROR_LIMIT = 3e-3  # relative norm: probabilities and outputs rounded to bfloat16 give about 2e-3

Operator = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A backend to measure.

    make: gives the operator for one shape and one set of lengths; lse is None where it is not ours to check.
    num_heads: the query head counts it is padded to, or None where it runs any exactly.
    pdl: programmatic dependent launch, None where the kernel has no such choice.
    """

    backend: str
    make: Callable[[], Operator]
    num_heads: tuple[int, ...] | None = None
    pdl: bool | None = None


def load_sparse_mqa(backend: str, module: str, pdl: bool | None) -> Kernel:
    """Our operator `headfit.kernels.<module>.<module>`; `pdl` reaches it where its signature has it."""
    operator = getattr(import_module(f"headfit.kernels.{module}"), module)
    parameter = inspect.signature(operator).parameters.get("pdl")
    if parameter is None:
        return Kernel(backend, lambda: operator)
    pdl = parameter.default if pdl is None else pdl
    return Kernel(backend, lambda: lambda **inputs: operator(**inputs, pdl=pdl), pdl=pdl)


def load_flashmla() -> Kernel:
    """The peer. Its metadata holds for one shape and one set of lengths, so each operator has its own."""
    import flash_mla

    def make() -> Operator:
        metadata, _ = flash_mla.get_mla_metadata()

        def operator(*, q, regions, attn_sink, softmax_scale) -> tuple[Tensor, None]:
            arguments: dict[str, Any] = {}
            names = (("k_cache", "indices", "topk_length"),)
            names += (("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"),)
            for region, (cache, indices, length) in zip(regions, names, strict=False):
                arguments[cache] = region.pool.kernel_view().view(torch.float8_e4m3fn)
                arguments[indices], arguments[length] = region.indices[:, None], region.lengths
            o, _ = flash_mla.flash_mla_with_kvcache(
                q=q[:, None],
                block_table=None,
                cache_seqlens=None,
                head_dim_v=HEAD_DIM,
                tile_scheduler_metadata=metadata,
                softmax_scale=softmax_scale,
                is_fp8_kvcache=True,
                attn_sink=attn_sink,
                use_legacy=True,
                **arguments,
            )
            return o[:, 0], None

        return operator

    return Kernel(report.PEER, make, num_heads=flashmla.SUPPORT.num_heads)


BACKENDS: dict[str, Callable[[bool | None], Kernel]] = {
    "sparse_mqa_cuda": lambda pdl: load_sparse_mqa("sparse_mqa_cuda", "sparse_mqa_cuda", pdl),
    "unified_kv_triton": lambda pdl: load_sparse_mqa("unified_kv_triton", "sparse_mqa_triton", None),
    report.PEER: lambda pdl: load_flashmla(),
}


def load_kernels(asked: Sequence[str] | None, pdl: bool | None) -> list[Kernel]:
    """The asked backends; for None all that can be imported, saying which cannot.

    Raises:
        ValueError: an asked backend cannot be imported, none can, or `pdl` is set and reaches none.
    """
    kernels = []
    for name in dict.fromkeys(asked or BACKENDS):
        try:
            kernels.append(BACKENDS[name](pdl))
        except (ImportError, OSError) as error:  # OSError: a shared library that does not load
            if asked:
                raise ValueError(f"--backends: {name!r} cannot be imported here: {error}") from error
            print(f"left out: {name}: {error}")
    if not kernels:
        raise ValueError(f"no backend can be imported here, allowed: {', '.join(BACKENDS)}")
    if pdl is not None and all(kernel.pdl is None for kernel in kernels):
        raise ValueError(f"--pdl, --no-pdl: none of {[kernel.backend for kernel in kernels]} has the choice")
    return kernels


def measure_kernel(
    kernel: Kernel, problem: Problem, heads: Sequence[int], timer: Callable[[Sequence[Launch]], Timing]
) -> Iterator[tuple[int, int, Timing | None, float]]:
    """Check and time one backend on one shape: (head count, kernel's head count, timing, relative error) of each row.

    The error is the larger one of the checked call and of the last launch in the timed graph: back to back, launches
    may disturb each other as one call alone cannot. No timing where the first is red.
    """
    for kernel_heads in kernel.num_heads or heads:
        served = [n for n in heads if n <= kernel_heads] if kernel.num_heads else [kernel_heads]
        sink = problem.attn_sink[:kernel_heads].contiguous()
        errors = problem.errors_of(kernel.make()(**problem.checked.arguments(sink)), problem.expected, served)
        timing = None
        if any(error <= ERROR_LIMIT for error in errors.values()):
            timing, last = time_kernel(kernel.make(), [inputs.arguments(sink) for inputs in problem.timed], timer)
            again = problem.errors_of(last, problem.expected_last, served)
            errors = {n: max(error, again[n]) for n, error in errors.items()}
        yield from ((n, kernel_heads, timing, error) for n, error in errors.items())


def time_kernel(
    operator: Operator, arguments: list[dict[str, Any]], timer: Callable[[Sequence[Launch]], Timing]
) -> tuple[Timing, tuple[Tensor, Tensor | None]]:
    """One launch an entry of `arguments`; the timing, and what the last launch wrote."""
    last = []

    def launch(inputs: dict[str, Any]) -> None:
        last[:] = operator(**inputs)  # earlier outputs are freed: a server reuses its buffers too

    timing = timer([partial(launch, inputs) for inputs in arguments])
    return timing, (last[0], last[1])


def measure_shape(
    keys: Keys, *, batch: int, kernels: Sequence[Kernel], problem: Problem, copy_gb_per_s: float, **how: Any
) -> list[report.Row]:
    """The rows of one shape; `how` goes to `measure_kernel`. A red row has no time, and no error where it is NaN."""
    floor = report.floor_us(num_keys=keys.window + keys.extra, batch=batch, copy_gb_per_s=copy_gb_per_s)
    rows = []
    for kernel in kernels:
        for num_heads, kernel_heads, timing, error in measure_kernel(kernel, problem, **how):
            green = timing is not None and error <= ERROR_LIMIT
            row = keys.fields | {"batch": batch, "num_heads": num_heads, "backend": kernel.backend}
            row["kernel_num_heads"] = kernel_heads
            if not green:
                print(f"RED: {row}: relative error {error:.3g}, allowed {ERROR_LIMIT:.3g}", flush=True)
            for name in ("us_median", "us_min", "us_max"):
                row[name] = round(getattr(timing, name), 3) if green else None
            rows.append(row | {"floor_us": round(floor, 4), "rel_err": error if math.isfinite(error) else None})
    return rows


def run(args: argparse.Namespace, kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Measure every asked shape, print the table on the way, and return the result."""
    copy_gb_per_s, timer = round(copy_bandwidth(), 1), ColdTimer()
    null_us = round(timer([null_launch()] * MAX_LAUNCHES).us_median, 3)
    page_sizes = {page_size for name in args.keys for _, page_size in KEYS[name].regions}
    pools = {page_size: random_packed_pool(POOL_SLOTS[page_size], page_size, "cuda") for page_size in page_sizes}
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}: copies {copy_gb_per_s} GB/s read and written; a null kernel takes {null_us} us; seed {args.seed}")
    print(f"floor: keys x {TOKEN_BYTES} bytes at that rate; its share in window-only rows is less the null kernel")
    own = [kernel.backend for kernel in kernels if kernel.backend in report.OWN_BACKENDS]
    padded = [n for kernel in kernels for n in kernel.num_heads or ()]
    print(report.table_header(own, padded), flush=True)
    rows: list[report.Row] = []
    for name in args.keys:
        for batch in args.batch:
            measured = measure_shape(
                KEYS[name],
                batch=batch,
                kernels=kernels,
                problem=make_problem(KEYS[name], batch=batch, pools=pools),
                copy_gb_per_s=copy_gb_per_s,
                heads=args.heads,
                timer=timer,
            )
            for cell in report.cells(sorted(measured, key=lambda row: row["num_heads"])):
                print(report.table_line(cell, own, padded, null_us), flush=True)
            rows += measured
    return {
        **provenance("decode_kernel", gpu, args),
        "pdl": next((kernel.pdl for kernel in kernels if kernel.pdl is not None), None),
        "copy_gb_per_s": copy_gb_per_s,
        "null_us": null_us,
        "rows": rows,
    }


def provenance(benchmark: str, gpu: str, args: argparse.Namespace) -> dict[str, Any]:
    """The fields that say where a benchmark's rows come from."""
    return {
        "benchmark": benchmark,
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "flash_mla": version_of("flash_mla"),
        "commit": args.commit or git_commit(),
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "seed": args.seed,
    }


def version_of(module: str) -> str | None:
    """The `__version__` of a module, None where it cannot be imported."""
    try:
        return import_module(module).__version__
    except (ImportError, OSError):
        return None


def default_path(gpu: str) -> Path:
    """benchmark/results/decode_kernel-<gpu>.json, the GPU as `h200`."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")
    return Path(__file__).parent / "results" / f"decode_kernel-{slug}.json"


def count(limit: int) -> Callable[[str], int]:
    """An argparse type: an integer from 1 to `limit`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= limit:
            raise argparse.ArgumentTypeError(f"{text!r}, allowed: an integer from 1 to {limit}")
        return int(text)

    return parse


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `args.whole` says that nothing restricts the run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", nargs="+", choices=list(KEYS), help="window+compressed@ratio")
    parser.add_argument("--batch", nargs="+", type=count(MAX_BATCH))
    parser.add_argument("--heads", nargs="+", type=count(MAX_HEADS), help="query heads of a rank")
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), help="default: all that are installed")
    parser.add_argument("--quick", action="store_true", help="a few shapes; --keys, --batch and --heads still count")
    parser.add_argument("--pdl", action=argparse.BooleanOptionalAction, help="default: the kernel's own")
    parser.add_argument("--commit", help="recorded in the result; default: what git says")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32, help="default: from the clock")
    parser.add_argument("--out", type=Path, help="default: results/decode_kernel-<gpu>.json, for a whole run")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only plot this result, beside it or to --out")
    args = parser.parse_args(argv)
    restrictions = args.quick, args.keys, args.batch, args.heads, args.backends, args.pdl is not None
    args.whole = not any(restrictions)
    for name, everything in (("keys", list(KEYS)), ("batch", list(BATCHES)), ("heads", list(HEADS))):
        chosen = getattr(args, name) or (QUICK[name] if args.quick else everything)
        setattr(args, name, list(dict.fromkeys(chosen)))
    return args


def plot(args: argparse.Namespace) -> None:
    """Plot the result `args.plot` beside it, or to `args.out`."""
    result = json.loads(args.plot.read_text())
    if not report.is_result(result):
        raise ValueError(f"--plot: {args.plot} is not a result of this benchmark")
    path = args.out or args.plot.with_suffix(".png")
    report.plot(result, path)
    print(f"wrote {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run or plot; exit code 0, 1 where a check was red, 2 for bad input."""
    args = parse_arguments(argv)
    try:
        if args.plot:
            plot(args)
            return 0
        if not torch.cuda.is_available():
            raise ValueError("a run needs a CUDA GPU, and torch finds none; --plot needs none")
        kernels = load_kernels(args.backends, args.pdl)
        if args.out:  # not only after the measurement
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.open("a").close()
    except (ValueError, OSError, ImportError) as error:
        print(f"decode_kernel: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(args.seed)
    start = time.perf_counter()
    result = run(args, kernels)
    summary = report.summarise(result["rows"])
    print("\n".join([*report.summary_lines(summary), f"{time.perf_counter() - start:.0f} s"]))
    whole = args.whole and len(kernels) == len(BACKENDS)
    path = args.out or (default_path(result["gpu"]) if whole else None)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    print(f"wrote {path}" if path else "not written: only a whole run of all backends is, without --out")
    line = {name: value for name, value in result.items() if name != "rows"} | {"summary": summary}
    print(json.dumps(line, allow_nan=False))
    return int(any(row["us_median"] is None for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
