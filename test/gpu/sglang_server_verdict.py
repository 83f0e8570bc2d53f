"""What the runs of `sglang_server_check.py` say: differences between arms, the checks with their limits, a table."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

MAX_ERROR_RATIO = 1.2  # ours over stock's, of one decode call's error against float64
MAX_LOGPROB_RATIO = 2.0  # over what padding to 128 instead of 64 changes
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
)

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
    """Every check that the arms that were asked for allow; one for each arm that failed."""
    arms = result["arms"]
    found = [
        _check(f"{arm}: no error", "; ".join(one["errors"]), "", False)
        for arm, one in arms.items()
        if one.get("errors")
    ]
    for arm, one in arms.items():
        if "workers" in one:
            found += _counters(arm, one["workers"], result)
    if "workers" in arms.get("eager", {}):
        found += _attention(arms["eager"]["workers"])
    found += _logprobs(
        {name: figures["mean"] for name, figures in result["differences"].items()}, result["attn_tp_size"]
    )
    if after := arms.get("bare", {}).get("after_kill"):
        ended = after["ended"] and not after["serves"]
        found.append(_check("bare: the server ends with its worker", after["seconds"], "an end", ended))
    if "restarted" in arms.get("bare", {}):
        started = arms["bare"]["restarted"]
        found.append(_check("bare: starts again", started, True, started))
    return found


def _counters(arm: str, workers: Iterable[dict[str, Any]], result: Mapping[str, Any]) -> list[Check]:
    """Calls as the device counted them, replays of captured graphs included."""
    workers = list(workers)
    found = [_check(f"{arm}: workers", len(workers), result["tp_size"], len(workers) == result["tp_size"])]
    least = 0 if arm == "dp" else result["steps"]
    size = 1 if arm == "dp" else result["attn_tp_size"]  # DP attention over all ranks leaves no TP
    ranks = range(size) if result["lone_rank"] is None else [int(result["lone_rank"].partition("/")[0])]
    wanted = [[rank, size, result["num_heads"] // size] for rank in ranks] * (len(workers) // len(ranks))
    layers = sorted(layer for worker in workers for layer in worker["layers"])
    whose = f"{arm}: [rank, size, heads] of each worker's attention layers"
    found.append(_check(whose, layers, wanted, layers == wanted))
    for rank, worker in enumerate(workers):
        calls, kernels, plugin = worker["decode_calls"], worker["stock_calls"], worker["plugin"]
        even = min(calls) == max(calls) and calls[0] > least
        found.append(_check(f"{arm}: worker {rank}, decode calls of all layers", calls, f"equal, over {least}", even))
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


def _attention(workers: Iterable[dict[str, Any]]) -> list[Check]:
    found = rows(workers)
    if not found:
        return [_check("attention: decode calls held against float64", 0, "some", False)]
    worst = max(row["ours"] / row["stock"] for row in found)
    least = min(row["fault"] / row["stock"] for row in found)
    what = f"of {len(found)} decode calls' errors against float64"
    return [
        _check(f"attention: largest ours / stock {what}", worst, MAX_ERROR_RATIO, worst <= MAX_ERROR_RATIO),
        _check(f"attention: smallest fault / stock {what}", least, MAX_ERROR_RATIO, least > MAX_ERROR_RATIO),
    ]


def _logprobs(mean: Mapping[str, float], attn_tp_size: int) -> list[Check]:
    if "padding" not in mean:
        return []
    limit = MAX_LOGPROB_RATIO * mean["padding"]
    same = ["plugin", "eager", "bare", "plugin after back", "eager after tensor", "eager after disk"]
    other = ["fault", "plugin after tensor", "plugin after disk"]
    # Stock copies a rank's sinks once; with one rank its copy is the parameter itself.
    stock = ["stock after tensor", "stock after disk"]
    (same if attn_tp_size > 1 else other).extend(stock)
    return [
        *(
            _check(f"logprobs: {name}", mean[name], f"<= {limit:.4g}", mean[name] <= limit)
            for name in same
            if name in mean
        ),
        *(
            _check(f"logprobs: {name}", mean[name], f"> {limit:.4g}", mean[name] > limit)
            for name in other
            if name in mean
        ),
    ]


def _check(name: str, value: Any, limit: Any, holds: bool) -> Check:
    return {"name": name, "value": value, "limit": limit, "holds": bool(holds)}


def table(result: Mapping[str, Any]) -> list[str]:
    """Errors by layer, differences by pair, and every check."""
    lines = [f"{'layer':>5} {'ratio':>5} {'calls':>5} {'ours':>9} {'stock':>9} {'fault':>9} {'largest ours/stock':>18}"]
    found = rows(result["arms"].get("eager", {}).get("workers", ()))
    for layer in sorted({row["layer"] for row in found}):
        some = [row for row in found if row["layer"] == layer]
        mean = [sum(row[name] for row in some) / len(some) for name in ("ours", "stock", "fault")]
        worst = max(row["ours"] / row["stock"] for row in some)
        figures = " ".join(f"{value:9.2e}" for value in mean)
        lines.append(f"{layer:>5} {some[0]['compress_ratio']:>5} {len(some):>5} {figures} {worst:>18.3f}")
    lines.append(f"{'|difference of log-probability|':<34}{'mean':>10}{'p99':>10}{'max':>10}")
    for name, figures in result["differences"].items():
        lines.append(f"{name:<34}" + "".join(f"{figures[key]:>10.4f}" for key in ("mean", "p99", "max")))
    for check in result["checks"]:
        value = f"{check['value']:.4g}" if isinstance(check["value"], float) else check["value"]
        lines.append(f"{'holds' if check['holds'] else 'FAILS':<6}{check['name']}: {value} ({check['limit']})")
    return lines
