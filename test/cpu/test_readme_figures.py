"""The README's measured figures are those of `benchmark/results/`."""

import importlib
import json
import re
import sys
from pathlib import Path
from statistics import mean, median

import pytest

from headfit.evals.statistics import detectable_drop

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmark"), str(ROOT / "test/gpu")]
report = importlib.import_module("decode_kernel_report")
layer_report = importlib.import_module("mqa_layer_report")
serving_report = importlib.import_module("serving_report")
verdict = importlib.import_module("sglang_server_verdict")

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULT, LAYER, EVAL = (
    json.loads((ROOT / f"benchmark/results/{name}-h200.json").read_text(encoding="utf-8"))
    for name in ("decode_kernel", "mqa_layer", "eval_tiny")
)
LAYER_US = {
    tuple(row[name] for name in (*layer_report.SHAPE_FIELDS, "backend", "kernel_num_heads")): row["us_median"]
    for row in LAYER["rows"]
}
CELLS = {
    (cell[0]["keys_extra"], cell[0]["compress_ratio"], cell[0]["batch"], cell[0]["num_heads"]): cell
    for cell in report.cells(RESULT["rows"])
}
OURS = "sparse_mqa_cuda"


def test_decode_table():
    rows = re.findall(r"^\| (\d+) \|((?: [\d.]+ \|){6})$", README, re.MULTILINE)
    assert [int(batch) for batch, _ in rows] == [1, 8, 32, 64, 128, 256]
    for batch, cells in rows:
        ours = [CELLS[512, 4, int(batch), heads] for heads in (8, 16, 32, 64)]
        expected = [report.own_row(cell, OURS)["us_median"] for cell in ours] + [*report.peer_times(ours[0]).values()]
        assert [float(cell) for cell in cells.split("|")[:-1]] == [round(value, 1) for value in expected]


def test_padding_table():
    rows = re.findall(r"^\| (\d+) \|((?: \*{0,2}[\d.]+\*{0,2} \|){5})$", README, re.MULTILINE)
    assert [int(batch) for batch, _ in rows] == [1, 8, 32, 64, 128, 256]
    for batch, cells in rows:
        window, both = (report.peer_times(CELLS[(*keys, int(batch), 16)]) for keys in ((0, 0), (512, 4)))
        expected = [*window.values(), *both.values(), both[64] / both[128]]
        assert [float(cell.strip(" *")) for cell in cells.split("|")[:-1]] == [round(value, 2) for value in expected]


def test_what_one_question_of_gsm8k_says():
    same, noisy = (100 * detectable_drop(noise=noise, total=1319) for noise in (0.0, 0.01))
    assert f"of {same:.1f} points is the smallest" in " ".join(README.split())
    assert f"{noisy:.1f} points where 1% of the answers differ by chance" in " ".join(README.split())


def test_decode_sentences():
    summary = report.summarise(RESULT["rows"])
    text = " ".join(README.split())
    means = [summary[OURS][heads]["geomean"] for heads in ("8", "16", "32", "64")]
    assert "{:.2f} times faster with 8 heads, {:.2f} with 16, {:.2f} with 32, {:.2f} with 64".format(*means) in text
    assert "slower on no shape" in text and not any(summary[OURS][heads]["slower"] for heads in summary[OURS])
    triton = [summary["unified_kv_triton"][heads]["geomean"] for heads in ("8", "16", "32", "64")]
    assert "{:.2f}, {:.2f}, {:.2f} and {:.2f} times FlashMLA's speed".format(*triton) in text
    worst = max(row["rel_err"] for row in RESULT["rows"] if row["backend"] == OURS)
    assert f"at most {worst:.1e}".replace("e-0", "e-") in text

    def share(extra: int, batch: int, heads: int) -> str:
        row = report.own_row(CELLS[extra, 4, batch, heads], OURS)
        return f"{report.share_of_floor(row, RESULT['null_us']):.0%}"

    assert f"runs at {share(1024, 256, 8)} (8 heads) and {share(1024, 256, 16)} (16) of the speed" in text
    assert f"with 128 + 512 keys at {share(512, 128, 8)} and {share(512, 128, 16)}" in text


def test_layer_table():
    rows = re.findall(r"^\| ([48]): (\d+) heads \| (\w+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", README, re.MULTILINE)
    assert len(rows) == 12
    for tp, own, ratio, batch, *cells in rows:
        arms = (("flashmla", 128), ("flashmla", 64), (OURS, int(own)))
        shape = ("pro", int(tp), 0 if ratio == "window" else int(ratio), 4096, int(batch))
        expected = [LAYER_US[(*shape, *arm)] for arm in arms]
        assert [int(cell) for cell in cells] == [round(value) for value in expected]


def test_layer_sentences():
    summary, text = layer_report.summarise(LAYER["rows"]), " ".join(README.split())
    flash, pro = (
        [summary[f"{model} TP {tp}"][OURS]["geomean_before"] for tp in (1, 2, 4, 8)] for model in ("flash", "pro")
    )
    assert "{:.2f}, {:.2f}, {:.2f} and {:.2f} times faster at TP 1, 2, 4 and 8 of Flash".format(*flash) in text
    assert "{:.2f}, {:.2f}, {:.2f} and {:.2f} times of Pro".format(*pro) in text
    padded = [summary[f"pro TP {tp}"]["flashmla-64"]["geomean_before"] for tp in (4, 8)]
    assert "gains Pro {:.2f} times at TP 4 and {:.2f} at TP 8".format(*padded) in text


def test_eval_table():
    arms = {row["arm"]: row for row in EVAL["rows"] if "score" in row}
    first, *others = arms
    assert f"| {first} | {arms[first]['score']['extractors']['marked']['right']} |  |" in README
    for name in others:
        found, right = arms[name]["differences"]["marked"], arms[name]["score"]["extractors"]["marked"]["right"]
        words = f"no drop shown; a drop over {-100 * found['interval'][0]:.2f} points is excluded"
        if arms[name]["verdict"] == "drop":
            words = f"drop, p = {found['mcnemar_p']:.0e}"
        assert f"| {name} | {right} | {words} |" in README
    control = EVAL["negative_control"]
    sentence = (
        f"Of {len(control['p'])} pairs of sampled arms that differ in their seed alone, {control['significant']} have"
    )
    assert sentence in " ".join(README.split())
    on_cpu = json.loads((ROOT / "benchmark/results/eval_tiny-cpu.json").read_text(encoding="utf-8"))["rows"]
    right = {row["arm"]: row["score"]["extractors"]["marked"]["right"] for row in on_cpu}
    assert right["exact heads"] == right["attention TP 4"] == 500
    assert "Attention TP 4, on a CPU: 500 of 500 as with exact heads" in " ".join(README.split())


def result_of(name: str) -> dict:
    return json.loads((ROOT / f"benchmark/results/{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_server_check(heads):
    result = result_of(f"sglang_server_check-h200-tp2-{heads}")
    assert all(check["holds"] for check in result["checks"])
    facts = [result[name] for name in ("num_local_heads", "tp_size", "one_gpu", "sglang")]
    assert facts == [heads, 2, True, "0.5.16"]
    captured = {arm: [w["plugin"]["captured"] for w in result["arms"][arm]["workers"]] for arm in ("eager", "plugin")}
    assert captured["eager"] == [0, 0] and min(captured["plugin"]) > 0
    calls = [row for worker in result["arms"]["eager"]["workers"] for row in worker["rows"]]
    errors = [f"{mean(row[arm] for row in calls):.1e}".replace("e-0", "e-") for arm in ("ours", "stock")]
    largest = max(row["ours"] / row["stock"] for row in calls)
    means = {name: figures["mean"] for name, figures in result["differences"].items()}
    means["allowed"] = verdict.MAX_LOGPROB_RATIO * means["padding"]
    differences = " | ".join(f"{means[name]:.3f}" for name in ("plugin", "allowed", "padding", "stock twice"))
    assert f"| {heads} | {errors[0]} | {errors[1]} | {largest:.2f} | {differences} | {means['fault']:.2f} |" in README
    assert f"mean of {len(calls)} calls" in " ".join(README.split())


def test_server_check_of_updates_and_dp_attention():
    text = " ".join(README.split())
    results = [result_of(f"sglang_server_check-h200-tp2-{heads}") for heads in (8, 16, 32)]
    means = [{name: figures["mean"] for name, figures in result["differences"].items()} for result in results]
    changed = [mean[f"plugin after {how}"] for mean in means for how in ("tensor", "disk")]
    back = max(mean["plugin after back"] for mean in means)
    assert (
        f"captured graphs give by {min(changed):.3f} to {max(changed):.3f} in the mean, "
        f"and with the old ones it is back within {back:.3f}"
    ) in text
    # Stock goes on with its first sinks: new ones change no more than running again does.
    assert all(mean[f"stock after {how}"] < 1.2 * mean["stock twice"] for mean in means for how in ("tensor", "disk"))
    workers = results[-1]["arms"]["dp"]["workers"]
    assert [worker["layers"] for worker in workers] == [[[0, 1, 64]]] * 2
    assert not any(sum(worker["stock_calls"]) for worker in workers)
    rows = [row for worker in results[-1]["arms"]["dp_eager"]["workers"] for row in worker["rows"]]
    assert f"{len(rows)} calls as close to float64" in text and max(row["ours"] / row["stock"] for row in rows) < 1
    assert f"a mean difference of {means[-1]['dp']:.3f} between log-probabilities with and without CUDA graphs" in text
    calls = [row for result in results for worker in result["arms"]["eager"]["workers"] for row in worker["rows"]]
    assert all(row["refused"] for row in calls)
    assert sum(row["ours"] > row["stock"] for row in calls) == 1 and f"all calls but one of {len(calls)}" in text


LONE_RANKS = {8: "8 of 64 heads", 16: "16 of 128 heads", 32: "32 of 128 heads"}
KERNEL_PARTS = ("splitkv", "mla_combine", "mla_metadata")


def attention_us(profile: dict) -> list[float]:
    """FlashMLA's kernels of a step: attention, combining its parts, planning them."""
    kernels = profile["attention_kernels"].items()
    return [sum(kernel["us"] for name, kernel in kernels if part in name) / profile["steps"] for part in KERNEL_PARTS]


def medians(result: dict, concurrency: str, name: str) -> list[float]:
    """Of a figure of stock's rows and of the plugin's."""
    rows = [row for row in result["rows"] if str(row["concurrency"]) == concurrency]
    return [median(row[name] for row in rows if row["arm"] == arm) for arm in ("stock", "plugin")]


@pytest.mark.parametrize("heads", LONE_RANKS)
def test_server_throughput(heads):
    result = result_of(f"serving-h200-lone-rank-{heads}")
    facts = ("lone_rank", "verified", "prompt_tokens", "output_tokens", "num_errors")
    assert [result[name] for name in facts] == ["1/4" if heads == 32 else "3/8", True, 512, 512, 0]
    assert any(LONE_RANKS[heads] in line and "18 layers" in line for line in result["plugin"]["plugin"])
    assert not any(row["num_retractions"] for row in result["rows"])
    for concurrency, found in serving_report.summarise(result["rows"]).items():
        names = ("output_tokens_per_s", "ttft_ms_p50", "tpot_ms_p50")
        speeds, ttfts, tpots = (medians(result, concurrency, name) for name in names)
        assert found["pairs"] == 5
        cells = [str(heads), concurrency, *(f"{speed:,.0f}" for speed in speeds)]
        cells += [f"{found['ratio_median']:.3f}x", f"{found['ratio_lower_95']:.3f}x"]
        cells += [" → ".join(f"{ttft:.0f}" for ttft in ttfts), " → ".join(f"{tpot:.2f}" for tpot in tpots)]
        assert f"| {' | '.join(cells)} |" in README
        assert (found["ratio_lower_95"] > 1) == ((heads, concurrency) not in ((16, "64"), (32, "64")))


def test_server_throughput_sentences():
    text = " ".join(README.split())
    assert "prompts of 512 tokens, 512 output tokens" in text
    results = {heads: result_of(f"serving-h200-lone-rank-{heads}") for heads in LONE_RANKS}
    assert [heads for heads, result in results.items() if not (result["complete"] and result["profiles"])] == [32]
    pairs = {heads: serving_report.ratios(result["rows"]) for heads, result in results.items()}
    every = [ratio for of_heads in pairs.values() for ratios in of_heads.values() for ratio in ratios]
    assert (min(every), max(every)) == (min(pairs[32][64]), max(pairs[8][128]))
    lowest, highest = f"lowest ratio, {min(every):.2f} (32 heads at 64)", f"highest, {max(every):.2f} (8 heads at 128)"
    assert lowest in text and highest in text
    ttfts = [medians(result, c, "ttft_ms_p50") for result in results.values() for c in result["summary"]]
    ttft_ratios = [plugin / stock for stock, plugin in ttfts]
    assert f"TTFT is {min(ttft_ratios):.2f} to {max(ttft_ratios):.2f} times stock's" in text


def test_server_profile():
    without_planning, benchmark = [], []
    for heads in (8, 16):
        profiles = result_of(f"serving-h200-lone-rank-{heads}")["profiles"]
        (ours, all_ours), (stock, all_stock) = (
            [profiles[arm][name] / profiles[arm]["steps"] for name in ("attention_us", "total_us")]
            for arm in ("plugin", "stock")
        )
        parts = attention_us(profiles["stock"])
        assert abs(sum(parts) - stock) < 0.001 * stock and profiles["plugin"]["concurrency"] == 64
        assert list(profiles["plugin"]["attention_kernels"]) == ["sparse_mqa"]
        cells = [str(heads), *(f"{part:.0f}" for part in parts), f"{ours:.0f}", f"{stock / ours:.2f}x"]
        assert f"| {' | '.join(cells)} | {stock / all_stock:.0%} | {ours / all_ours:.0%} |" in README
        without_planning.append(f"{sum(parts[:2]) / ours:.2f}x")
        layers = [(12, CELLS[0, 0, 64, heads]), (6, CELLS[512, 4, 64, heads])]
        padded = sum(count * report.peer_times(cell)[64] for count, cell in layers)
        exact = sum(count * report.own_row(cell, OURS)["us_median"] for count, cell in layers)
        benchmark.append(f"{padded / exact:.2f}x")
    text = " ".join(README.split())
    assert "without planning, give {} with 8 heads and {} with 16;".format(*benchmark) in text
    assert "the servers {} and {} without it".format(*without_planning) in text


def test_server_of_six_layers():
    text = " ".join(README.split())
    result = result_of("serving-h200-lone-rank-16-six-layers")
    ratios = [found["ratio_median"] for found in serving_report.summarise(result["rows"]).values()]
    assert f"the median ratio is {min(ratios):.2f} to {max(ratios):.2f}, below 1 at 8, 32 and 64" in text
    assert [ratio < 1 for ratio in ratios] == [False, True, True, True, False]
    steps = [result["decode_step_ms"][arm][0]["64"] for arm in ("stock", "plugin")]
    profiles = result["profiles"]
    kernels = [profiles[arm]["total_us"] / profiles[arm]["steps"] / 1e3 for arm in ("stock", "plugin")]
    wanted = "takes {:.2f} ms there as stock and {:.2f} with the plugin by the servers' logs, longer than its kernels, "
    assert (wanted + "{:.2f} and {:.2f}").format(*steps, *kernels) in text
    assert result["output_tokens"] == 128 and "an earlier commit, 128 output tokens" in text
