"""What the rows of `mqa_layer.py` say: its table, its summary and its plot. Needs no GPU.

A group is the rows of one shape. "Before" is FlashMLA given all of the model's heads, "least" FlashMLA padded least.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SHAPE_FIELDS = ("model", "attn_tp_size", "compress_ratio", "context", "batch")
MEASURED_FIELDS = ("us_median", "us_min", "us_max", "launches", "temporary_bytes")
PADDED = "flashmla"

# What a result's parts must share.
CONDITIONS = ("gpu", "torch", "triton", "flash_mla", "commit", "num_layers")

Row = dict[str, Any]
Result = dict[str, Any]


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of one shape together, in the order of their first row."""
    grouped: dict[tuple, list[Row]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[name] for name in SHAPE_FIELDS), []).append(row)
    return list(grouped.values())


def before(group: list[Row]) -> Row | None:
    """The row padded to all of the model's heads, if it has a time."""
    return next((row for row in group if row["backend"] == PADDED and _num_heads(row) == row["kernel_num_heads"]), None)


def least(group: list[Row]) -> Row | None:
    """The row padded least."""
    padded = [row for row in group if row["backend"] == PADDED]
    return min(padded, key=lambda row: row["kernel_num_heads"], default=None)


def exact(group: list[Row]) -> list[Row]:
    """The rows of kernels that run a rank's heads exactly."""
    return [row for row in group if row["backend"] != PADDED]


def speed_up(reference: Row | None, row: Row | None) -> float | None:
    """How many times faster `row` is, None where either has no time."""
    if not (reference and row and reference["us_median"] and row["us_median"]):
        return None
    return reference["us_median"] / row["us_median"]


def _num_heads(row: Row) -> int:
    return row["num_local_heads"] * row["attn_tp_size"]


def table_header() -> str:
    return (
        f"{'model':<7}{'TP':>3}{'ratio':>6}{'context':>8}{'batch':>6}  {'backend':<18}{'heads':>10}"
        f"{'us':>10}{'launches':>10}{'temp MiB':>10}{'x before':>10}{'x least':>9}"
    )


def table_lines(rows: Iterable[Row]) -> list[str]:
    """One line a row; the last columns are times faster than FlashMLA given all heads, and padded least."""
    lines = []
    for group in groups(rows):
        for row in group:
            shape = f"{row['model']:<7}{row['attn_tp_size']:>3}{row['compress_ratio']:>6}"
            shape += f"{row['context']:>8}{row['batch']:>6}"
            heads = f"{row['num_local_heads']} in {row['kernel_num_heads']}"
            us = "RED" if row["us_median"] is None else f"{row['us_median']:.2f}"
            memory = row["temporary_bytes"]
            cells = [us, _number(row["launches"], ".1f"), _number(memory and memory / 2**20, ".1f")]
            ratios = [_number(speed_up(reference(group), row), ".2f") for reference in (before, least)]
            lines.append(
                f"{shape}  {row['backend']:<18}{heads:>10}"
                + "".join(f"{c:>10}" for c in cells)
                + f"{ratios[0]:>10}{ratios[1]:>9}"
            )
    return lines


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def summarise(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """ "model TP n" -> backend -> geometric means of the speed-ups over the shapes with both times, and red rows."""
    summary: dict[str, dict[str, Any]] = {}
    for group in groups(rows):
        key = f"{group[0]['model']} TP {group[0]['attn_tp_size']}"
        arms = [(f"{PADDED}-{row['kernel_num_heads']}", row) for row in group if row["backend"] == PADDED]
        for name, row in arms + [(row["backend"], row) for row in exact(group)]:
            figures = summary.setdefault(key, {}).setdefault(name, {"before": [], "least": [], "red": 0})
            figures["red"] += row["us_median"] is None
            for kind, reference in (("before", before(group)), ("least", least(group))):
                if (ratio := speed_up(reference, row)) is not None:
                    figures[kind].append(ratio)
    for arms in summary.values():
        for figures in arms.values():
            for kind in ("before", "least"):
                figures[f"geomean_{kind}"] = _geomean(figures.pop(kind))
    return summary


def _geomean(ratios: list[float]) -> float | None:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None


def summary_lines(rows: list[Row]) -> list[str]:
    """The summary as text, a line a model, group size and backend."""
    return [
        f"{key}, {backend}: {_number(figures['geomean_before'], '.2f')}x FlashMLA given all heads, "
        f"{_number(figures['geomean_least'], '.2f')}x FlashMLA padded least (geometric means); red: {figures['red']}"
        for key, arms in summarise(rows).items()
        for backend, figures in arms.items()
    ]


def load(file: Path) -> Result:
    """A result of this benchmark.

    Raises:
        ValueError: another file.
    """
    try:
        result = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(result, dict) or result.get("benchmark") != "mqa_layer":
        raise ValueError(f"{file} is not a result of this benchmark")
    needed = {*SHAPE_FIELDS, *MEASURED_FIELDS, "backend", "kernel_num_heads", "num_local_heads"}
    rows = result.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and needed <= set(row) for row in rows):
        raise ValueError(f"{file}: rows without {', '.join(sorted(needed))}")
    if missing := {"command", "gpu", "commit"} - set(result):
        raise ValueError(f"{file}: has no {', '.join(sorted(missing))}")
    return result


def write(result: Result, file: Path) -> None:
    """Write a result whole: what is interrupted leaves the file as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    new.replace(file)


def joined(results: list[Result]) -> Result:
    """One result with the rows and commands of all, else as the last; of a row that is there twice the last counts.

    Raises:
        ValueError: they were measured under different conditions.
    """
    for result in results[1:]:
        for name in CONDITIONS:
            if (here := result.get(name)) != (first := results[0].get(name)):
                raise ValueError(f"--keep: {name} {first!r} and {here!r}, allowed: equal ones")
    rows = {_identity(row): row for result in results for row in result["rows"]}
    return results[-1] | {
        "command": " && ".join(dict.fromkeys(result["command"] for result in results)),
        "rows": list(rows.values()),
    }


def backends_of(results: Iterable[Result]) -> dict[tuple, set[str]]:
    """The backends that each shape has rows of."""
    found: dict[tuple, set[str]] = {}
    for result in results:
        for row in result["rows"]:
            found.setdefault(tuple(row[name] for name in SHAPE_FIELDS), set()).add(row["backend"])
    return found


def _identity(row: Row) -> tuple:
    return tuple(row[name] for name in (*SHAPE_FIELDS, "backend", "kernel_num_heads"))


def plot_file(source: Path, target: Path | None) -> Path:
    """Plot the result in `source` beside it, or to `target`.

    Raises:
        ValueError: not a result of this benchmark.
    """
    result = load(source)
    path = target or source.with_suffix(".png")
    plot(result, path)
    return path


def plot(result: dict[str, Any], path: Path) -> None:
    """Write a PNG: a row a model and context, a column a compress ratio; speed-up over "before" by batch.

    A colour a group size; the first exact kernel is drawn solid, FlashMLA padded least dashed.

    Raises:
        ImportError: there is no matplotlib (the extra `bench`).
        ValueError: `result` holds no rows.
    """
    from matplotlib.figure import Figure

    rows = result["rows"]
    if not rows:
        raise ValueError("rows: none, allowed: one or more")
    panels = list(dict.fromkeys((row["model"], row["context"]) for row in rows))
    ratios = sorted({row["compress_ratio"] for row in rows})
    figure = Figure(figsize=(4 * len(ratios), 3.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), len(ratios), sharex=True, squeeze=False)
    batches = sorted({row["batch"] for row in rows})
    for line, (model, context) in enumerate(panels):
        for column, ratio in enumerate(ratios):
            ax = axes[line, column]
            _draw(
                ax,
                [
                    row
                    for row in rows
                    if (row["model"], row["context"], row["compress_ratio"]) == (model, context, ratio)
                ],
            )
            ax.set_title(f"{model}, {context} tokens, ratio {ratio}")
            ax.axhline(1, color="grey", linewidth=0.8)
            ax.set_xscale("log", base=2)
            ax.set_xticks(batches, [str(batch) for batch in batches])
        axes[line, 0].set_ylabel("times faster than\nFlashMLA given all heads")
    for ax in axes[-1]:
        ax.set_xlabel("batch")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.suptitle(f"One MQALayer decode step on {result['gpu']}, headfit {result['commit'] or ''}".rstrip(" ,"))
    figure.savefig(path, dpi=120)


def _draw(ax, rows: list[Row]) -> None:
    for index, size in enumerate(sorted({row["attn_tp_size"] for row in rows})):
        ours = [group for group in groups(rows) if group[0]["attn_tp_size"] == size]
        ours.sort(key=lambda group: group[0]["batch"])
        batches = [group[0]["batch"] for group in ours]
        arms = {"exact": [(exact(group) or [None])[0] for group in ours], "padded least": [least(g) for g in ours]}
        for (name, chosen), style in zip(arms.items(), ("-", "--"), strict=True):
            ratios = [speed_up(before(group), row) for group, row in zip(ours, chosen, strict=True)]
            look = {"color": f"C{index}", "linestyle": style, "marker": "o", "label": f"TP {size}, {name}"}
            ax.plot(batches, [math.nan if ratio is None else ratio for ratio in ratios], **look)
