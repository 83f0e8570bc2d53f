"""What the rows of `decode_kernel.py` say: its table, its summary and its plot. Needs no GPU.

A cell is the rows of one shape and head count. Speed-ups and shares are over the forced kernels of `OWN_BACKENDS` only.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headfit.kv_cache import TOKEN_BYTES

OWN_BACKENDS = ("sparse_mqa_cuda", "unified_kv_triton")
PEER = "flashmla"
CELL_FIELDS = ("keys_window", "keys_extra", "compress_ratio", "batch", "num_heads")
ROW_FIELDS = (*CELL_FIELDS, "backend", "kernel_num_heads", "us_median", "us_min", "us_max", "floor_us", "rel_err")

Row = dict[str, Any]


def floor_us(*, num_keys: int, batch: int, copy_gb_per_s: float) -> float:
    """Microseconds to read every key's packed bytes once at the measured copy bandwidth."""
    return num_keys * TOKEN_BYTES * batch / (copy_gb_per_s * 1e3)


def is_result(found: Any) -> bool:
    """Whether a file's JSON is a result of this benchmark."""
    if not isinstance(found, dict) or found.get("benchmark") != "decode_kernel":
        return False
    if not {"gpu", "commit", "null_us"} <= set(found) or not isinstance(found.get("rows"), list):
        return False
    return all(isinstance(row, dict) and set(ROW_FIELDS) <= set(row) for row in found["rows"])


def keys_name(row: Row) -> str:
    """`128`, or `128+512@4`: window keys, compressed keys, compress ratio."""
    extra = f"+{row['keys_extra']}@{row['compress_ratio']}" if row["keys_extra"] else ""
    return f"{row['keys_window']}{extra}"


def cells(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of one shape and head count together, in the order of their first row."""
    grouped: dict[tuple, list[Row]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[field] for field in CELL_FIELDS), []).append(row)
    return list(grouped.values())


def own_row(cell: list[Row], backend: str) -> Row | None:
    """The cell's row of one of our backends, if it ran."""
    return next((row for row in cell if row["backend"] == backend), None)


def peer_times(cell: list[Row]) -> dict[int, float]:
    """Kernel head count -> microseconds of the peer's rows that hold a time, the least padded first."""
    times = {row["kernel_num_heads"]: row["us_median"] for row in cell if row["backend"] == PEER}
    return {heads: us for heads, us in sorted(times.items()) if us is not None}


def share_of_floor(row: Row, null_us: float) -> float | None:
    """floor / time; window-only rows are so short that a null launch's time is taken off. None without a time."""
    if row["us_median"] is None:
        return None
    us = row["us_median"] - (null_us if row["keys_extra"] == 0 else 0.0)
    return row["floor_us"] / us if us > 0 else None


def speed_ups(cell: list[Row], backend: str) -> tuple[float, float] | None:
    """(against the least padded peer, against the fastest padding), or None where either side has no time."""
    row, peers = own_row(cell, backend), peer_times(cell)
    if row is None or row["us_median"] is None or not peers:
        return None
    return next(iter(peers.values())) / row["us_median"], min(peers.values()) / row["us_median"]


def summarise(rows: list[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """backend -> head count -> its figures, over the shapes where both our kernel and the peer have a time.

    `shapes` counts them, `red` the rows of ours without a time. `geomean` and `slower` (the shapes' names) are against
    the peer padded least; `geomean_fastest_peer` and `slower_than_fastest_peer` against its fastest padding.
    """
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for backend in OWN_BACKENDS:
        for num_heads in sorted({row["num_heads"] for row in rows if row["backend"] == backend}):
            ours = [cell for cell in cells(rows) if cell[0]["num_heads"] == num_heads and own_row(cell, backend)]
            summary.setdefault(backend, {})[str(num_heads)] = _figures(ours, backend)
    return summary


def _figures(ours: list[list[Row]], backend: str) -> dict[str, Any]:
    compared = [(cell[0], ratios) for cell in ours if (ratios := speed_ups(cell, backend)) is not None]
    least, fastest = ([ratios[i] for _, ratios in compared] for i in (0, 1))
    names = [f"{keys_name(row)} batch {row['batch']}" for row, _ in compared]
    return {
        "shapes": len(compared),
        "red": sum(own_row(cell, backend)["us_median"] is None for cell in ours),
        "geomean": _geomean(least),
        "geomean_fastest_peer": _geomean(fastest),
        "slower": [name for name, ratio in zip(names, least, strict=True) if ratio < 1],
        "slower_than_fastest_peer": [name for name, ratio in zip(names, fastest, strict=True) if ratio < 1],
    }


def _geomean(ratios: list[float]) -> float | None:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None


def table_header(backends: Iterable[str], peer_heads: Iterable[int]) -> str:
    """Two lines; the second one explains the marks."""
    peers = "".join(f"{f'peer {heads}':>10}" for heads in peer_heads)
    groups = "".join(
        f"  {backend:>17} us{'floor':>7}" + "".join(f"{f'/{heads}':>7}" for heads in peer_heads) for backend in backends
    )
    note = "/N: times faster than the peer padded to N; * slower than its least padding, ~ than another; RED: wrong"
    return f"{'keys':<13}{'batch':>6}{'heads':>6}{'floor us':>10}{peers}{groups}\n({note})"


def table_line(cell: list[Row], backends: Iterable[str], peer_heads: Iterable[int], null_us: float) -> str:
    """One shape and head count: the floor, the peer at each padding, and ours with its share of the floor."""
    first, peers = cell[0], peer_times(cell)
    line = f"{keys_name(first):<13}{first['batch']:>6}{first['num_heads']:>6}{first['floor_us']:>10.2f}"
    line += "".join(f"{_number(peers.get(heads), '.2f'):>10}" for heads in peer_heads)
    for backend in backends:
        row = own_row(cell, backend)
        us = row and row["us_median"]
        text = "RED" if row and us is None else _number(us, ".2f") + _mark(speed_ups(cell, backend))
        share = row and share_of_floor(row, null_us)
        line += f"  {text:>20}{_number(share, '.0%'):>7}"
        line += "".join(f"{_number(peers[n] / us if us and n in peers else None, '.2f'):>7}" for n in peer_heads)
    return line


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _mark(ratios: tuple[float, float] | None) -> str:
    if ratios is None or ratios[1] >= 1:
        return " "
    return "*" if ratios[0] < 1 else "~"


def summary_lines(summary: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """The summary as text: a line a backend and head count, and one more where some shapes are slower."""
    lines = []
    for backend, by_heads in summary.items():
        for num_heads, figures in by_heads.items():
            means = [_number(figures[name], ".2f") for name in ("geomean", "geomean_fastest_peer")]
            slower = [len(figures[name]) for name in ("slower", "slower_than_fastest_peer")]
            against = f"{means[0]}x the least padded peer ({means[1]}x its fastest padding)"
            lines.append(
                f"{backend}, {num_heads} heads: geometric mean {against} over {figures['shapes']} shapes, "
                f"slower on {slower[0]} ({slower[1]}); red: {figures['red']}"
            )
            lines += [f"  slower than the least padded: {', '.join(figures['slower'])}"] * bool(figures["slower"])
            others = [name for name in figures["slower_than_fastest_peer"] if name not in figures["slower"]]
            lines += [f"  slower than another padding: {', '.join(others)}"] * bool(others)
    return lines


def plot(result: dict[str, Any], path: Path) -> None:
    """Write a PNG: a column a key shape; above, speed-up over the least padded peer, below, share of the floor.

    Over the batch, a colour a head count; the first of `OWN_BACKENDS` that ran is drawn solid, the other one dashed.

    Raises:
        ImportError: there is no matplotlib (the extra `bench`).
        ValueError: `result` holds no row of ours.
    """
    from matplotlib.figure import Figure

    rows = result["rows"]
    backends = [name for name in OWN_BACKENDS if any(row["backend"] == name for row in rows)]
    if not backends:
        raise ValueError(f"rows: backends {sorted({row['backend'] for row in rows})}, allowed: one of {OWN_BACKENDS}")
    names = list(dict.fromkeys(keys_name(row) for row in rows))
    figure = Figure(figsize=(4 * len(names), 7), layout="constrained")
    axes = figure.subplots(2, len(names), sharex=True, sharey="row", squeeze=False)
    for column, name in enumerate(names):
        panel = [cell for cell in cells(rows) if keys_name(cell[0]) == name]
        for backend, style in zip(backends, ("-", "--"), strict=False):
            _draw(axes[:, column], panel, backend, style, result["null_us"])
        axes[0, column].set_title(f"keys {name}")
        axes[0, column].axhline(1, color="grey", linewidth=0.8)
        axes[1, column].set_xlabel("batch")
    axes[0, 0].set_ylabel("times faster than FlashMLA\nwith the least padding")
    axes[1, 0].set_ylabel("share of the memory floor\n(window only: less the null kernel)")
    axes[1, 0].set_ylim(0, 1)
    axes[1, 0].set_xscale("log", base=2)
    batches = sorted({row["batch"] for row in rows})
    axes[1, 0].set_xticks(batches, [str(batch) for batch in batches])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.suptitle(f"Sparse MQA decode on {result['gpu']}, headfit {result['commit'] or ''}".rstrip(" ,"))
    figure.savefig(path, dpi=120)


def _draw(axes, panel: list[list[Row]], backend: str, style: str, null_us: float) -> None:
    for index, num_heads in enumerate(sorted({cell[0]["num_heads"] for cell in panel})):
        ours = [cell for cell in panel if cell[0]["num_heads"] == num_heads and own_row(cell, backend)]
        ours.sort(key=lambda cell: cell[0]["batch"])
        batches = [cell[0]["batch"] for cell in ours]
        ratios = [speed_ups(cell, backend) for cell in ours]
        shares = [share_of_floor(own_row(cell, backend), null_us) for cell in ours]
        look = {"color": f"C{index}", "linestyle": style, "marker": "o", "label": f"{backend}, {num_heads} heads"}
        # NaN leaves a gap in the line.
        axes[0].plot(batches, [math.nan if ratio is None else ratio[0] for ratio in ratios], **look)
        axes[1].plot(batches, [math.nan if share is None else share for share in shares], **look)
