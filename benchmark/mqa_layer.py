"""One `MQALayer` decode step at the released models' widths: padded to all heads, padded least, and exact.

    python benchmark/mqa_layer.py --out benchmark/results/mqa_layer-h200.json
    python benchmark/mqa_layer.py --plot benchmark/results/mqa_layer-h200.json

or in parts, where --keep takes the rows of earlier ones, and needs no GPU once no shape lacks an arm that is asked for
(a shape that does is measured whole, and of a row that is there twice the last counts):

    python benchmark/mqa_layer.py --model flash --out flash.json
    python benchmark/mqa_layer.py --keep flash.json --out benchmark/results/mqa_layer-h200.json

Any rank of an attention-TP group is built on one GPU, without its all-reduce. Shapes: every model, group size, compress
ratio, context and batch below; weights are random bfloat16, caches packed fp8 and random, all sequences as long as the
context. Arms: FlashMLA padded to the model's `num_heads` (before), FlashMLA padded least, and the exact-head kernels.

Each arm's output is first compared with the reference backend's; an arm that is wrong gets no time and the exit code is
1. Timed is a CUDA graph of one step over `NUM_LAYERS` layers with weights and caches of their own, L2 flushed before
each replay; microseconds, launches (kernels, copies and fills) and temporary memory are of one layer. What layers of a
step share (FlashMLA's scheduling metadata) is in them by its share. Prints a table, and last one JSON line; --out is
written anew after every batch, so that an interrupted run leaves what it has measured.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import mqa_layer_report as report
import torch
from decode_kernel import default_path as kernel_path
from decode_kernel import provenance
from mqa_layer_inputs import MODELS, DecodeStep, Shape, make_config, random_cache, random_layers

from headfit import backends
from headfit.backends.base import AttentionBackend
from headfit.backends.flashmla import FlashMLABackend
from headfit.backends.reference import ReferenceBackend
from headfit.testing.measure import relative_norm
from headfit.testing.timing import ColdTimer, Timing, capture, count_launches

SIZES, RATIOS, CONTEXTS, BATCHES = (1, 2, 4, 8), (0, 4, 128), (4096, 65536), (1, 8, 32, 64, 128, 256)
QUICK = {"attn_tp": [1, 8], "context": [4096], "batch": [1, 32, 128]}
NUM_LAYERS = 8
MOST_MS = 100.0  # of the timed replays of a row; long steps, whose times spread little, have fewer of them
ERROR_LIMIT = 1e-2  # relative norm: bfloat16 attention outputs through the output projections
EXACT = ("sparse_mqa_cuda", "unified_kv_triton")


class Meter(Protocol):
    """Measures a step; its time first, before which it runs once unmeasured."""

    def time(self, step: Callable[[], object]) -> Timing:
        """Microseconds of a captured step."""

    def launches(self, step: Callable[[], object]) -> int:
        """Kernels, copies and fills of a step."""

    def temporary_bytes(self, step: Callable[[], object]) -> int:
        """Memory that a step takes and gives back, at its highest."""


class GpuMeter:
    """Measures on the current GPU."""

    def __init__(self, *, replays: int) -> None:
        self._timer = ColdTimer(replays=replays, most_ms=MOST_MS)

    def time(self, step: Callable[[], object]) -> Timing:
        return self._timer([step])

    def launches(self, step: Callable[[], object]) -> int:
        return count_launches(capture(step))

    def temporary_bytes(self, step: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def measure_shape(
    shape: Shape, step: DecodeStep, arms: Sequence[AttentionBackend], meter: Meter
) -> Iterator[report.Row]:
    """A row an arm whose kernel holds the rank's heads. A red row has no time, and no error where it is NaN."""
    step.use(ReferenceBackend())
    expected = step.one_layer()
    num_local_heads = step.config.num_heads // shape.attn_tp_size
    for backend in arms:
        if backend.supported_num_heads is not None and max(backend.supported_num_heads) < num_local_heads:
            continue
        kernel_heads = step.use(backend)
        error = relative_norm(step.one_layer(), expected)
        row = shape.fields | {"num_local_heads": num_local_heads, "backend": backend.name}
        row |= {"kernel_num_heads": kernel_heads} | dict.fromkeys(report.MEASURED_FIELDS)
        if error <= ERROR_LIMIT:
            timing, layers = meter.time(step.all_layers), len(step.layers)
            for name in ("us_median", "us_min", "us_max"):
                row[name] = round(getattr(timing, name) / layers, 3)
            row["launches"] = round(meter.launches(step.all_layers) / layers, 3)
            row["temporary_bytes"] = meter.temporary_bytes(step.one_layer)
        else:
            print(f"RED: {row}: relative error {error:.3g}, allowed {ERROR_LIMIT:.3g}", flush=True)
        yield row | {"rel_err": error if error < float("inf") else None}


def load_arms(num_heads: int, asked: Sequence[str] | None) -> list[AttentionBackend]:
    """The asked backends on this GPU; for None all that run here, saying which do not.

    FlashMLA comes once a head count: those that hold the fewest heads, and the model's `num_heads`.

    Raises:
        ValueError: an asked backend does not run here, or none does.
    """
    arms: list[AttentionBackend] = []
    for name in asked or ("flashmla", *EXACT):
        try:
            if name == "flashmla":
                counts = sorted({min(backends.support(name).num_heads), num_heads})
                arms += [FlashMLABackend(num_heads=(count,)) for count in counts]
            else:
                arms.append(backends.create(name, device="cuda"))
        except (ValueError, ImportError) as error:
            if asked:
                raise ValueError(f"--backends: {error}") from error
            print(f"left out: {name}: {error}")
    if not arms:
        raise ValueError(f"no backend runs here, allowed: flashmla, {', '.join(EXACT)}")
    return arms


def shapes_of(args: argparse.Namespace) -> list[Shape]:
    """Every asked shape."""
    return [
        Shape(model, size, ratio, context, batch)
        for model in args.model
        for size in args.attn_tp
        for ratio in args.ratio
        for context in args.context
        for batch in args.batch
    ]


def grouped(shapes: Sequence[Shape], *names: str) -> dict[tuple, list[Shape]]:
    """Shapes by their values of the fields `names`, in the order of their first one."""
    found: dict[tuple, list[Shape]] = {}
    for shape in shapes:
        found.setdefault(tuple(getattr(shape, name) for name in names), []).append(shape)
    return found


@torch.inference_mode()
def run(
    shapes: Sequence[Shape],
    arms: dict[str, list[AttentionBackend]],
    meter: Meter,
    save: Callable[[list[report.Row]], None],
    *,
    device: str = "cuda",
) -> list[report.Row]:
    """Measure the shapes and print the table on the way.

    Layers are made once a model, compress ratio and group size, caches once a batch and context.

    Args:
        arms: of each model.
        save: called with the rows so far after every batch.
    """
    print(report.table_header(), flush=True)
    rows: list[report.Row] = []
    for (model, ratio), alike in grouped(shapes, "model", "compress_ratio").items():
        config, layers = make_config(model, ratio, NUM_LAYERS), {}
        for (context, batch), ranks in grouped(alike, "context", "batch").items():
            cache = None  # the one before goes first
            for shape in ranks:
                try:
                    cache = cache or random_cache(config, context=context, batch=batch, device=device)
                    size = shape.attn_tp_size
                    layers[size] = layers.get(size) or random_layers(config, size, device)
                    measured = list(measure_shape(shape, DecodeStep(layers[size], cache), arms[model], meter))
                except torch.cuda.OutOfMemoryError:
                    print(f"left out: {shape.fields}: does not fit this GPU's memory", flush=True)
                    continue
                for line in report.table_lines(measured):
                    print(line, flush=True)
                rows += measured
            save(rows)
    return rows


def measure(args: argparse.Namespace, kept: list[report.Result], shapes: Sequence[Shape]) -> report.Result:
    """Run `shapes` on this GPU and write the file on the way; the result, with the rows of `kept`.

    Raises:
        ValueError, ImportError: there is no GPU, no backend runs, or a kept result comes from elsewhere.
    """
    if not torch.cuda.is_available():
        raise ValueError("a run needs a CUDA GPU, and torch finds none; --plot needs none")
    gpu = torch.cuda.get_device_name()
    here = provenance("mqa_layer", gpu, args) | {"num_layers": NUM_LAYERS, "rows": []}
    report.joined([*kept, here])  # refuses before anything runs
    models = dict.fromkeys(shape.model for shape in shapes)
    arms = {model: load_arms(MODELS[model]["num_attention_heads"], args.backends) for model in models}
    torch.manual_seed(args.seed)
    print(f"{gpu}; seed {args.seed}")
    path = path_of(args, gpu)

    def save(rows: list[report.Row]) -> None:
        if path:
            report.write(report.joined([*kept, here | {"rows": rows}]), path)

    return report.joined([*kept, here | {"rows": run(shapes, arms, GpuMeter(replays=args.replays), save)}])


def path_of(args: argparse.Namespace, gpu: str) -> Path | None:
    """Where the result goes."""
    return args.out or (default_path(gpu) if args.whole else None)


def default_path(gpu: str) -> Path:
    """benchmark/results/mqa_layer-<gpu>.json."""
    path = kernel_path(gpu)
    return path.with_name(path.name.replace("decode_kernel", "mqa_layer"))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `args.whole` says that nothing restricts the run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=list(MODELS))
    parser.add_argument("--attn-tp", nargs="+", type=int, choices=SIZES)
    parser.add_argument("--ratio", nargs="+", type=int, choices=RATIOS, help="compress ratio, 0: window only")
    parser.add_argument("--context", nargs="+", type=int, choices=CONTEXTS)
    parser.add_argument("--batch", nargs="+", type=int, choices=BATCHES)
    parser.add_argument("--backends", nargs="+", choices=("flashmla", *EXACT), help="default: all that run here")
    parser.add_argument("--quick", action="store_true", help="a few shapes; the options above still count")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--commit", help="recorded in the result; default: what git says")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32, help="default: from the clock")
    parser.add_argument("--out", type=Path, help="default: results/mqa_layer-<gpu>.json, for a whole run")
    parser.add_argument("--keep", nargs="+", type=Path, default=[], metavar="JSON", help="results to add to")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only plot this result, beside it or to --out")
    args = parser.parse_args(argv)
    everything = {"model": MODELS, "attn_tp": SIZES, "ratio": RATIOS, "context": CONTEXTS, "batch": BATCHES}
    args.whole = not (args.quick or args.backends or any(getattr(args, name) for name in everything))
    for name, values in everything.items():
        chosen = getattr(args, name) or (QUICK.get(name) if args.quick else None) or list(values)
        setattr(args, name, list(dict.fromkeys(chosen)))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run or plot; exit code 0, 1 where a check was red, 2 for bad input."""
    args = parse_arguments(argv)
    start = time.perf_counter()
    try:
        if args.plot:
            print(f"wrote {report.plot_file(args.plot, args.out)}")
            return 0
        kept = [report.load(file) for file in args.keep]
        asked, done = set(args.backends or ("flashmla", *EXACT)), report.backends_of(kept)
        shapes = [shape for shape in shapes_of(args) if not asked <= done.get(tuple(shape.fields.values()), set())]
        result = measure(args, kept, shapes) if shapes else report.joined(kept)
    except (ValueError, OSError, ImportError) as error:
        print(f"mqa_layer: {error}", file=sys.stderr)
        return 2
    print("\n".join([*report.summary_lines(result["rows"]), f"{time.perf_counter() - start:.0f} s"]))
    if path := path_of(args, result["gpu"]):
        report.write(result, path)
    print(f"wrote {path}" if path else "not written: only a whole run is, without --out")
    summary = report.summarise(result["rows"])
    print(json.dumps({name: value for name, value in result.items() if name != "rows"} | {"summary": summary}))
    return int(any(row["us_median"] is None for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
