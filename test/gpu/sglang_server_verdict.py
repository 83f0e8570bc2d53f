"""What the runs of `sglang_server_check.py` say: differences between arms, the checks with their limits, a table."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

MAX_ERROR_RATIO = 1.2  # ours over stock's, of one decode call's error against float64
MAX_LOGPROB_RATIO = 2.0  # over what padding to 128 instead of 64 changes
# Of the worst sequence, over padding's worst: on an H200 at most 2 times; a neighbour's sinks 2.9 times and more.
MAX_WORST_RATIO = 2.5
EAGER = ("eager", "dp_eager")  # arms whose decode calls are held against float64
DP = ("dp", "dp_eager")
# (name, arm, arm): whose log-probabilities are compared.
PAIRS = (
    ("padding", "padded", "stock"),
    ("plugin", "plugin", "stock"),
    ("fault", "fault", "stock"),
    ("eager", "eager", "plugin"),
    *((f"{arm} twice", f"{arm} again", arm) for arm in ("stock", "plugin", "eager")),
    *((f"{arm} after {how}", f"{arm} {how}", arm) for arm in ("stock", "plugin") for how in ("tensor", "disk", "back")),
    *((f"eager after {how}", f"eager {how}", f"plugin {how}") for how in ("tensor", "disk")),
    ("bare", "bare", "plugin"),
    ("dp", "dp", "dp_eager"),
)
# Pairs without a change of sinks, and those with one.
SAME = ("plugin", "eager", "bare", "dp", "plugin after back", "eager after tensor", "eager after disk")
OTHER = ("fault", "plugin after tensor", "plugin after disk")
STOCK = ("stock after tensor", "stock after disk")

Check = dict[str, Any]


def differences(found: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """|Difference of log-probability| for each of `PAIRS` that was run: mean, 99th percentile, maximum, and the mean of
    each sequence.

    Over the sequences that both ran: a run of fewer sets of prompts has the first ones.
    """
    result = {}
    for name, one, other in PAIRS:
        if one in found and other in found:
            both = min(len(found[one]), len(found[other]))
            values = (found[one][:both] - found[other][:both]).abs()
            figures = {"mean": values.mean(), "p99": values.quantile(0.99), "max": values.max()}
            result[name] = {key: float(value) for key, value in figures.items()}
            result[name]["sequences"] = [float(f"{mean:.3g}") for mean in values.flatten(1).mean(dim=1)]
    return result


def checks(result: Mapping[str, Any]) -> list[Check]:
    """Every check that the arms that were asked for allow; one for each arm that failed, one for an interrupted run."""
    arms = result["arms"]
    found = []
    if not result["complete"]:
        found.append(_check("the run was not interrupted", result.get("interrupted", "by an error"), "", False))
    found += [
        _check(f"{arm}: no error", "; ".join(one["errors"]), "", False)
        for arm, one in arms.items()
        if one.get("errors")
    ]
    for arm, one in arms.items():
        if "workers" in one:
            found += _counters(arm, one["workers"], result)
    for arm in EAGER:
        if "workers" in arms.get(arm, {}):
            found += _attention(arm, arms[arm]["workers"])
    shapes = {worker["plugin"].get("shape") for worker in arms.get("plugin", {}).get("workers", ())}
    found += _logprobs(
        result["differences"],
        attn_tp_size=result["attn_tp_size"],
        shape=shapes.pop() if len(shapes) == 1 else None,
    )
    if after := arms.get("bare", {}).get("after_kill"):
        ended = after["ended"] and not after["serves"]
        found.append(_check("bare: the server ends with its worker", after["seconds"], "an end", ended))
        found.append(_check("bare: the other workers end with it", after["left"], "none left", not after["left"]))
    if "restarted" in arms.get("bare", {}):
        started = arms["bare"]["restarted"]
        found.append(_check("bare: starts again", started, True, started))
    return found


def _counters(arm: str, workers: Iterable[dict[str, Any]], result: Mapping[str, Any]) -> list[Check]:
    """Calls as the device counted them, replays of captured graphs included."""
    workers = list(workers)
    found = [_check(f"{arm}: workers", len(workers), result["tp_size"], len(workers) == result["tp_size"])]
    least = 0 if arm in DP else result["steps"]
    size = 1 if arm in DP else result["attn_tp_size"]  # DP attention over all ranks leaves no TP
    ranks = range(size) if result["lone_rank"] is None else [int(result["lone_rank"].partition("/")[0])]
    wanted = [[rank, size, result["num_heads"] // size] for rank in ranks] * (len(workers) // len(ranks))
    layers = sorted(layer for worker in workers for layer in worker["layers"])
    whose = f"{arm}: [rank, size, heads] of each worker's attention layers"
    found.append(_check(whose, layers, wanted, layers == wanted))
    for rank, worker in enumerate(workers):
        calls, kernels, plugin = worker["decode_calls"], worker["stock_calls"], worker["plugin"]
        even = min(calls) == max(calls) and calls[0] > least
        found.append(_check(f"{arm}: worker {rank}, decode calls of all layers", calls, f"equal, over {least}", even))
        outside = worker["outside_calls"]
        found.append(_check(f"{arm}: worker {rank}, decode calls of no layer", outside, "none", not any(outside)))
        if plugin["active"]:
            quiet = not any(kernels)
            found.append(_check(f"{arm}: worker {rank}, calls left to the server's kernel", kernels, "none", quiet))
            facts = [plugin["served_layers"], plugin["num_layers"], plugin["passed_on"]]
            whole = facts == [len(calls), len(calls), {}]
            found.append(_check(f"{arm}: worker {rank}, layers served and passed on", facts, "all, none", whole))
        else:
            found.append(_check(f"{arm}: worker {rank}, the server's kernel ran", kernels, calls, kernels == calls))
    if arm not in ("stock", "padded"):
        active = all(worker["plugin"]["active"] for worker in workers)
        found.append(_check(f"{arm}: the plugin is active", active, True, active))
    return found


def rows(workers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"worker": rank, **row} for rank, worker in enumerate(workers) for row in worker["rows"]]


def _ratio(row: Mapping[str, Any], name: str) -> float:
    """The error `name` of a checked call over stock's; NaN where that is no finite number."""
    ratio = row[name] / row["stock"] if row["stock"] else math.nan
    return ratio if math.isfinite(ratio) else math.nan


def _extreme(which: Callable[[Iterable[float]], float], values: Sequence[float]) -> float:
    """`which` is max or min; NaN, which no limit allows, where one of the values is."""
    return math.nan if any(math.isnan(value) for value in values) else which(values)


def _attention(arm: str, workers: Iterable[dict[str, Any]]) -> list[Check]:
    """Of an eager arm: some decode calls of every layer of every worker, each within the limit."""
    workers = list(workers)
    found = rows(workers)
    counts = [[0] * len(worker["decode_calls"]) for worker in workers]
    for row in found:
        counts[row["worker"]][row["layer"]] += 1
    least = min((count for layers in counts for count in layers), default=0)
    name = f"attention of {arm}: decode calls of each worker's layer held against float64"
    checked = [_check(name, least, "at least 1", least > 0)]
    if not found:
        return checked
    ours = _extreme(max, [_ratio(row, "ours") for row in found])
    fault = _extreme(min, [_ratio(row, "fault") for row in found])
    what = f"of {len(found)} decode calls' errors against float64"
    refused = sum(row["refused"] for row in found)
    name = f"attention of {arm}: calls with a neighbour's sinks that HEADFIT_CHECK refused"
    return [
        *checked,
        _check(f"attention of {arm}: largest ours / stock {what}", ours, MAX_ERROR_RATIO, ours <= MAX_ERROR_RATIO),
        _check(f"attention of {arm}: smallest fault / stock {what}", fault, MAX_ERROR_RATIO, fault > MAX_ERROR_RATIO),
        _check(name, refused, len(found), refused == len(found)),
    ]


def _logprobs(found: Mapping[str, dict[str, Any]], *, attn_tp_size: int, shape: str | None) -> list[Check]:
    """Of the `differences` that were found. `shape` is SGLang's, as headfit read it (`hosts.sglang.capabilities`).

    What an update does to stock is known of shape `cached`: it copies a rank's sinks once, and with one rank its copy
    is the parameter itself.
    """
    same, other = SAME, OTHER
    if shape == "cached" and attn_tp_size > 1:
        same += STOCK
    elif shape == "cached":
        other += STOCK
    held = [name for name in same + other if name in found]
    if "padding" not in found:
        name = "logprobs: the arms stock and padded, whose difference is the measure of others"
        return [_check(name, "absent", f"for {', '.join(held)}", False)] if held else []
    limit = MAX_LOGPROB_RATIO * found["padding"]["mean"]
    checked = []
    for name in held:
        mean = found[name]["mean"]
        sign, holds = ("<=", mean <= limit) if name in same else (">", mean > limit)
        checked.append(_check(f"logprobs: {name}", mean, f"{sign} {limit:.4g}", holds))
    worst_limit = MAX_WORST_RATIO * _extreme(max, found["padding"]["sequences"])
    for name in [name for name in held if name in SAME]:
        worst = _extreme(max, found[name]["sequences"])
        what = f"logprobs: {name}, the worst sequence"
        checked.append(_check(what, worst, f"<= {worst_limit:.4g}", worst <= worst_limit))
    return checked


def _check(name: str, value: Any, limit: Any, holds: bool) -> Check:
    return {"name": name, "value": value, "limit": limit, "holds": bool(holds)}


def table(result: Mapping[str, Any]) -> list[str]:
    """Errors by layer, differences by pair, and every check."""
    lines = []
    for arm in EAGER:
        lines += _layers(arm, rows(result["arms"].get(arm, {}).get("workers", ())))
    lines.append(f"{'|difference of log-probability|':<34}{'mean':>10}{'p99':>10}{'max':>10}")
    for name, figures in result["differences"].items():
        lines.append(f"{name:<34}" + "".join(f"{figures[key]:>10.4f}" for key in ("mean", "p99", "max")))
    for check in result["checks"]:
        value = f"{check['value']:.4g}" if isinstance(check["value"], float) else check["value"]
        lines.append(f"{'holds' if check['holds'] else 'FAILS':<6}{check['name']}: {value} ({check['limit']})")
    return lines


def _layers(arm: str, found: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each layer of the checked calls, over all workers."""
    if not found:
        return []
    head = f"{'layer':>5} {'ratio':>5} {'calls':>5} {'ours':>9} {'stock':>9} {'fault':>9} {'largest ours/stock':>18}"
    lines = [f"{head}  {arm}"]
    for layer in sorted({row["layer"] for row in found}):
        some = [row for row in found if row["layer"] == layer]
        mean = [sum(row[name] for row in some) / len(some) for name in ("ours", "stock", "fault")]
        worst = _extreme(max, [_ratio(row, "ours") for row in some])
        figures = " ".join(f"{value:9.2e}" for value in mean)
        lines.append(f"{layer:>5} {some[0]['compress_ratio']!s:>5} {len(some):>5} {figures} {worst:>18.3f}")
    return lines
