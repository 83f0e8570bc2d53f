"""What the rows of `serving.py` say: metrics of a run, its table, the ratio with its bound, and the plot. No GPU."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import lone_rank
from serving_client import Request

STOCK, PLUGIN = "stock", "plugin"
FACTS = ("sglang", "tp_size", "num_heads", "num_local_heads")  # what a row says of its server
FIGURES = ("output_tokens_per_s", "ttft_ms_p50", "tpot_ms_p50", "tpot_ms_p99")  # the table's
KERNEL_SAID = "decode kernel: "  # in a worker's one line, before what it runs
OWN_KERNEL = "the server's own"
NOT_OURS = ("stands down", "headfit leaves a ", "could not be prepared")  # each a warning
# One-sided 95% quantiles of Student's t by degrees of freedom 1..15; beyond, the last one is an upper bound.
_T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)
_DECODE_LINE = re.compile(
    r"Decode batch.*#running-req: (\d+),(?:.* accept len: ([\d.]+),)?"
    r".*cuda graph: (\w+).*gen throughput \(token/s\): ([\d.]+)"
)
_WAITING = re.compile(r"Decode batch.*#queue-req: (\d+)")

Row = dict[str, Any]


def metrics(requests: Sequence[Request]) -> Row:
    """Output tokens a second over the whole run, TTFT and TPOT in ms (mean, p50, p99), and how requests ended."""
    good = [request for request in requests if not request.error]
    row: Row = {
        "num_requests": len(requests),
        "num_errors": len(requests) - len(good),
        "num_length_stops": sum(request.finish_reason == "length" for request in good),
        "num_output_tokens": sum(request.num_tokens for request in good),
    }
    wall = max((r.last for r in requests), default=0.0) - min((r.start for r in requests), default=0.0)
    row["output_tokens_per_s"] = row["num_output_tokens"] / wall if wall > 0 else None
    for name in ("ttft_ms", "tpot_ms"):
        values = sorted(value for request in good if (value := getattr(request, name)) is not None)
        row[f"{name}_mean"] = mean(values) if values else None
        row[f"{name}_p50"] = percentile(values, 50)
        row[f"{name}_p99"] = percentile(values, 99)
    return row


def percentile(ascending: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest ranks; None of nothing."""
    if not ascending:
        return None
    place = (len(ascending) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (place - low)


def decode_step_ms(log: str) -> dict[str, float]:
    """Median milliseconds of a decode step by the number of running requests, of steps that replayed a CUDA graph.

    With speculative decoding a step yields `accept len` tokens a request.
    """
    found: dict[int, list[float]] = {}
    for match in _DECODE_LINE.finditer(log):
        running, accepted, graph, rate = int(match[1]), float(match[2] or 1), match[3], float(match[4])
        if graph == "True" and running and rate > 0:
            found.setdefault(running, []).append(1e3 * running * accepted / rate)
    return {str(running): median(times) for running, times in sorted(found.items())}


def num_retractions(log: str) -> int:
    """How often the KV cache was full, so that the server took requests back and computed them again later.

    All attention-TP ranks of a DP rank log the same event.
    """
    times: dict[str, Counter[str]] = {}
    for line in log.splitlines():
        if "Retract requests" in line:
            stamp = line.partition("]")[0]  # [2026-12-01 13:12:33 DP1 TP3]
            dp, tp = (" ".join(re.findall(rf"\b{kind}\d+\b", stamp)) for kind in ("DP", "TP"))
            times.setdefault(dp, Counter())[tp] += 1
    return sum(max(of_ranks.values()) for of_ranks in times.values())


def num_waiting(log: str) -> int:
    """The most requests that waited for room while others decoded."""
    return max((int(match[1]) for match in _WAITING.finditer(log)), default=0)


def plugin_lines(log: str) -> list[str]:
    """What the plugin said in a server's log: which kernel runs and why, and that it answered calls; each once."""
    marks = (KERNEL_SAID, "headfit answered ", *NOT_OURS, lone_rank.SAID)
    found = [line[line.index("headfit") :] for line in log.splitlines() if "headfit" in line]
    return list(dict.fromkeys(line for line in found if any(mark in line for mark in marks)))


def log_fault(said: Sequence[str], arm: str, rows: Sequence[Row], *, backend: str, is_lone_rank: bool) -> str:
    """Why a server's `plugin_lines` do not bear out its arm and its rows' facts; empty where they do.

    backend: the plugin arm's HEADFIT_BACKEND. All workers must have said that they run it and have answered calls, and
    none may have left one to the server's kernel; with `flashmla` that kernel runs.
    """
    if arm == PLUGIN and (line := next((line for line in said if any(mark in line for mark in NOT_OURS)), "")):
        return f"the plugin server does not run as told: {line}"
    own = backend == "flashmla"
    answered = any(line.startswith("headfit answered") for line in said)
    if answered != (arm == PLUGIN and not own):
        return f"the {arm} server's log {'shows' if answered else 'lacks'} calls answered by headfit: {said}"
    if arm == STOCK and (line := next((line for line in said if KERNEL_SAID in line), "")):
        return f"the stock server runs with headfit: {line}"
    lone = any(line.startswith(lone_rank.SAID) for line in said)
    if lone != is_lone_rank:
        return f"the {arm} server's layers are {'' if lone else 'not '}one rank's: {said}"
    stated = {(row["num_local_heads"], row["num_heads"]) for row in rows}
    for line in said:
        for heads in re.findall(r"(\d+) of (\d+) heads", line):
            if stated and tuple(map(int, heads)) not in stated:
                return f"the {arm} server has other heads than the rows' {stated}: {line}"
    num_workers = max((row["num_workers"] for row in rows if row["arm"] == arm), default=1)
    return _workers_fault(said, num_workers, own=own) if arm == PLUGIN else ""


def _workers_fault(said: Sequence[str], num_workers: int, *, own: bool) -> str:
    lines = [line for line in said if KERNEL_SAID in line]
    processes, answered = (
        {match[1] for line in some if (match := re.search(r"process (\d+)\b", line))}
        for some in (lines, [line for line in said if line.startswith("headfit answered")])
    )
    if len(processes) < num_workers:
        return f"{len(processes)} of the plugin server's {num_workers} workers said which kernel decodes: {said}"
    for line in lines:
        if line.partition(KERNEL_SAID)[2].startswith(OWN_KERNEL) != own:
            return f"the plugin server runs {'another kernel than ' if own else ''}{OWN_KERNEL}: {line}"
    if not own and (silent := processes - answered):
        return f"headfit answered no call in the plugin server's worker, process {', '.join(sorted(silent))}"
    return ""


def kernel_shares(events: Iterable[dict[str, Any]], attention: str) -> Row:
    """GPU time of a profiler trace's kernels by name; and of those whose name matches `attention`, with launches."""
    times: dict[str, float] = {}
    launches: dict[str, int] = {}
    for event in events:
        if event.get("cat") == "kernel" and "dur" in event:
            times[event["name"]] = times.get(event["name"], 0.0) + event["dur"]
            launches[event["name"]] = launches.get(event["name"], 0) + 1
    ours = [name for name in times if re.search(attention, name)]
    return {
        "total_us": sum(times.values()),
        "attention_us": sum(times[name] for name in ours),
        "attention_kernels": {name: {"launches": launches[name], "us": times[name]} for name in ours},
        "kernels_us": dict(sorted(times.items(), key=lambda item: -item[1])[:20]),
    }


def ratios(rows: Iterable[Row]) -> dict[int, list[float]]:
    """By concurrency: the plugin's output tokens a second over stock's, one number a round that has both."""
    pairs: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        if row["output_tokens_per_s"]:
            pairs.setdefault((row["concurrency"], row["round"]), {})[row["arm"]] = row["output_tokens_per_s"]
    found: dict[int, list[float]] = {}
    for (concurrency, _), arms in sorted(pairs.items()):
        if {STOCK, PLUGIN} <= set(arms):
            found.setdefault(concurrency, []).append(arms[PLUGIN] / arms[STOCK])
    return found


def lower_bound(values: Sequence[float]) -> float | None:
    """One-sided 95% bound of the mean ratio, from the logarithms; None of fewer than two."""
    if len(values) < 2:
        return None
    logs = [math.log(value) for value in values]
    return math.exp(mean(logs) - _T95[min(len(logs) - 1, len(_T95)) - 1] * stdev(logs) / math.sqrt(len(logs)))


def summarise(rows: Sequence[Row]) -> dict[str, Row]:
    """By concurrency: median ratio, its lower bound and how many pairs stand behind it."""
    return {
        str(concurrency): {"ratio_median": median(values), "ratio_lower_95": lower_bound(values), "pairs": len(values)}
        for concurrency, values in ratios(rows).items()
    }


def table(rows: Sequence[Row]) -> list[str]:
    """Medians over the rounds, a line a concurrency and arm; then errors a arm, which are never left out."""
    lines = [
        f"{'concurrency':>11} {'arm':<7}{'tokens/s':>10}{'TTFT p50':>10}{'TPOT p50':>10}{'TPOT p99':>10}{'errors':>8}"
    ]
    summary = summarise(rows)
    for concurrency in sorted({row["concurrency"] for row in rows}):
        for arm in (STOCK, PLUGIN):
            some = [row for row in rows if (row["concurrency"], row["arm"]) == (concurrency, arm)]
            if some:
                figures = "".join(f"{_median(some, name):>10}" for name in FIGURES)
                errors = f"{sum(row['num_errors'] for row in some)}/{sum(row['num_requests'] for row in some)}"
                lines.append(f"{concurrency:>11} {arm:<7}{figures}{errors:>8}")
        if found := summary.get(str(concurrency)):
            bound = "" if found["ratio_lower_95"] is None else f", at least {found['ratio_lower_95']:.3f} (95%)"
            lines.append(f"{'':>11} plugin/stock {found['ratio_median']:.3f}{bound}, {found['pairs']} pairs")
    return lines


def notes(result: Row) -> list[str]:
    """What a reader of the table must know besides, a line each."""
    lines = []
    if result.get("complete") is False:
        lines.append(f"incomplete: {result.get('error', 'the run has not ended')}")
    if result.get("verified") is False:
        lines.append("not verified: nothing shows which kernel ran, for no server's log was read")
    for concurrency, arm in sorted({(row["concurrency"], row["arm"]) for row in result["rows"]}):
        some = [row for row in result["rows"] if (row["concurrency"], row["arm"]) == (concurrency, arm)]
        if times := sum(row.get("num_retractions") or 0 for row in some):
            what = f"{arm} at concurrency {concurrency}: the KV cache was full {times} times in {len(some)} rounds"
            lines.append(f"{what}, and requests were computed again; the server needs a larger one")
        if most := max(row.get("num_waiting") or 0 for row in some):
            lines.append(f"{arm} at concurrency {concurrency}: up to {most} requests waited for room while others ran")
    for arm, profile in result.get("profiles", {}).items():
        if "error" in profile:
            lines.append(f"no profile of {arm}: {profile['error']}")
    return lines


def is_result(found: Any) -> bool:
    """Whether a file's JSON is a result of this benchmark, with all that `table` and `plot` read."""
    if not isinstance(found, dict) or found.get("benchmark") != "serving" or not isinstance(found.get("rows"), list):
        return False
    wanted = {"arm", "round", "concurrency", "num_errors", "num_requests", *FIGURES, *FACTS}
    return all(isinstance(row, dict) and wanted <= set(row) for row in found["rows"])


def _median(rows: Sequence[Row], name: str) -> str:
    values = [row[name] for row in rows if row[name] is not None]
    return f"{median(values):.2f}" if values else "-"


def plot(result: Row, path: Path) -> None:
    """Tokens a second against concurrency, and the pairs' ratios, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, ratio) = pyplot.subplots(1, 2, figsize=(10, 4))
    for arm, style in ((STOCK, "o--"), (PLUGIN, "o-")):
        rows = [row for row in result["rows"] if row["arm"] == arm and row["output_tokens_per_s"]]
        counts = sorted({row["concurrency"] for row in rows})
        medians = [median(r["output_tokens_per_s"] for r in rows if r["concurrency"] == count) for count in counts]
        speed.plot(counts, medians, style, label=arm)
    for concurrency, values in ratios(result["rows"]).items():
        ratio.plot([concurrency] * len(values), values, "k.")
    ratio.axhline(1.0, color="0.6")
    all_counts = sorted({row["concurrency"] for row in result["rows"]})
    for axes, label in ((speed, "output tokens/s"), (ratio, "plugin / stock, a point a pair")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(all_counts, [str(count) for count in all_counts])
        axes.set_xlabel("concurrency")
        axes.set_ylabel(label)
    speed.legend()
    rank = "TP {tp_size}" if result.get("lone_rank") is None else f"lone rank {result['lone_rank']}"
    facts = "{num_local_heads} of {num_heads} heads a rank, " + rank + ", SGLang {sglang}"
    title = facts.format(**result["rows"][0]) if result["rows"] else "no rows"
    figure.suptitle(title + (", incomplete" if result.get("complete") is False else ""))
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
