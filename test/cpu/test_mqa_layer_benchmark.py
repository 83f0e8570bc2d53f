"""benchmark/mqa_layer.py without a GPU: shapes, arms, checks and rows at tiny sizes, its table, summary and plot."""

import importlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from headfit.backends.reference import ReferenceBackend
from headfit.testing.timing import Timing

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))
bench = importlib.import_module("mqa_layer")
report = importlib.import_module("mqa_layer_report")

SMALL = {"hidden_size": 64, "q_lora_rank": 32, "o_lora_rank": 16, "index_n_heads": 4, "index_topk": 8}


class Named(ReferenceBackend):
    """The reference under another backend's name, and wrong where asked."""

    def __init__(self, name, supported=None, wrong=False):
        super().__init__(supported_num_heads=supported)
        self.name, self.wrong = name, wrong

    def decode(self, **arguments):
        o, lse = super().decode(**arguments)
        return (1.5 * o if self.wrong else o), lse


class FakeMeter:
    """Runs each step once."""

    def __init__(self):
        self.steps = 0

    def time(self, step):
        self.steps += step() is None
        return Timing(us_median=40.0, us_min=30.0, us_max=50.0)

    def launches(self, step):
        return 25

    def temporary_bytes(self, step):
        return step().nbytes


def measured(arms, *, model="flash", size=8, ratio=4, meter=None, batch=2, context=256):
    shape = bench.Shape(model, size, ratio, context, batch)
    config = bench.make_config(model, ratio, 2, **SMALL)
    with torch.inference_mode():
        return list(bench.measure_shape(shape, make_step(shape, config), arms, meter or FakeMeter()))


def make_step(shape, config):
    cache = bench.random_cache(config, context=shape.context, batch=shape.batch, device="cpu")
    return bench.DecodeStep(bench.random_layers(config, shape.attn_tp_size, "cpu"), cache)


@pytest.mark.parametrize(("model", "heads", "groups", "topk"), [("flash", 64, 8, 512), ("pro", 128, 16, 1024)])
def test_configs_have_the_released_widths(model, heads, groups, topk):
    config = bench.make_config(model, 4, bench.NUM_LAYERS)
    assert (config.num_heads, config.o_groups, config.index_topk) == (heads, groups, topk)
    assert config.hidden_size == {"flash": 4096, "pro": 7168}[model] and config.head_dim == 512
    assert config.q_lora_rank == {"flash": 1024, "pro": 1536}[model] and config.o_lora_rank == 1024
    assert set(config.compress_ratios) == {4} and config.sliding_window == 128
    assert config.max_position_embeddings >= max(bench.CONTEXTS)


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("model", ["flash", "pro"])
def test_rows_of_a_shape(model, ratio):
    num_heads, meter = bench.MODELS[model]["num_attention_heads"], FakeMeter()
    arms = [Named("flashmla", (64,)), Named("flashmla", (num_heads,)), Named("sparse_mqa_cuda")]
    rows = measured(arms, model=model, ratio=ratio, meter=meter)
    local = num_heads // 8
    assert [row["kernel_num_heads"] for row in rows] == [64, num_heads, local] and meter.steps == 3
    for row in rows:
        assert {name: row[name] for name in report.SHAPE_FIELDS} == {
            "model": model,
            "attn_tp_size": 8,
            "compress_ratio": ratio,
            "context": 256,
            "batch": 2,
        }
        assert row["num_local_heads"] == local and row["rel_err"] < 1e-2
        assert (row["us_median"], row["us_min"], row["us_max"], row["launches"]) == (20.0, 15.0, 25.0, 12.5)
        assert row["temporary_bytes"] == 2 * 64 * 2
    json.dumps(rows, allow_nan=False)


def test_arms_that_cannot_hold_the_heads_are_left_out():
    rows = measured([Named("flashmla", (64,)), Named("sparse_mqa_cuda")], model="pro", size=1, ratio=0)
    assert [row["backend"] for row in rows] == ["sparse_mqa_cuda"]


def test_a_wrong_arm_gets_no_time(capsys):
    meter = FakeMeter()
    rows = measured([Named("sparse_mqa_cuda", wrong=True)], ratio=0, meter=meter)
    assert rows[0]["us_median"] is None and rows[0]["launches"] is None and rows[0]["rel_err"] > 0.1
    assert meter.steps == 0 and "RED" in capsys.readouterr().out


def test_a_step_may_run_any_number_of_times():
    """It writes the same bytes again, so that what is timed is what was checked."""
    shape, config = bench.Shape("flash", 8, 4, 256, 2), bench.make_config("flash", 4, 2, **SMALL)
    with torch.inference_mode():
        step = make_step(shape, config)
        first = step.one_layer()
        step.all_layers()
        assert first.isfinite().all() and torch.equal(step.one_layer(), first)


def test_layers_are_one_step_of_the_backend():
    entered = []

    class Stepping(Named):
        def step(self):
            entered.append(1)
            return nullcontext()

    measured([Stepping("flashmla", (64,))], ratio=0)
    assert entered == [1]


def row(backend, us, kernel_heads, *, size=8, batch=32, num_heads=128, ratio=4):
    shape = dict(zip(report.SHAPE_FIELDS, ("pro", size, ratio, 4096, batch), strict=True))
    measured = {"us_median": us, "us_min": us, "us_max": us, "launches": 20.0, "temporary_bytes": 2**20}
    return (
        shape | {"num_local_heads": num_heads // size, "backend": backend, "kernel_num_heads": kernel_heads} | measured
    )


ROWS = [
    row("flashmla", 60.0, 64),
    row("flashmla", 80.0, 128),
    row("sparse_mqa_cuda", 40.0, 16),
    row("flashmla", 120.0, 64, batch=64),
    row("flashmla", 90.0, 128, batch=64),
    row("sparse_mqa_cuda", None, 16, batch=64),
]


def test_table_and_summary():
    lines = report.table_lines(ROWS)
    assert lines[2].split() == [
        "pro", "8", "4", "4096", "32", "sparse_mqa_cuda", "16", "in", "16", "40.00", "20.0", "1.0", "2.00", "1.50",
    ]  # fmt: skip
    assert lines[3].split()[-2:] == ["0.75", "1.00"] and "RED" in lines[5]
    summary = report.summarise(ROWS)["pro TP 8"]
    assert summary["sparse_mqa_cuda"] == {"red": 1, "geomean_before": 2.0, "geomean_least": 1.5}
    assert summary["flashmla-64"]["geomean_before"] == pytest.approx((80 / 60 * 90 / 120) ** 0.5)
    assert any(
        "2.00x FlashMLA given all heads, 1.50x FlashMLA padded least" in line for line in report.summary_lines(ROWS)
    )
    assert len(report.table_header()) >= len(lines[0]) - 1


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    source = tmp_path / "result.json"
    source.write_text(json.dumps({"benchmark": "mqa_layer", "gpu": "GPU", "commit": None, "command": "", "rows": ROWS}))
    assert bench.main(["--plot", str(source)]) == 0
    assert (tmp_path / "result.png").stat().st_size > 10_000


def test_bad_input(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text('{"benchmark": "decode_kernel"}')
    assert bench.main(["--plot", str(other)]) == 2
    assert "is not a result of this benchmark" in capsys.readouterr().err
    for text, message in (
        ("{", "other.json: Expecting"),
        ('{"benchmark": "mqa_layer", "rows": [{}]}', "other.json: rows without "),
        ('{"benchmark": "mqa_layer", "rows": []}', "other.json: has no command, commit, gpu"),
    ):
        other.write_text(text)
        assert bench.main(["--plot", str(other)]) == 2
        assert message in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert bench.main(["--quick"]) == 2
        assert "a run needs a CUDA GPU" in capsys.readouterr().err
        with pytest.raises(ValueError, match="--backends: "):
            bench.load_arms(64, ["flashmla"])


def test_arms(monkeypatch, capsys):
    monkeypatch.setattr(bench, "FlashMLABackend", lambda num_heads: Named("flashmla", num_heads))
    monkeypatch.setattr(bench.backends, "create", lambda name, device: Named(name))
    arms = {heads: bench.load_arms(heads, None) for heads in (64, 128)}
    assert [arm.supported_num_heads for arm in arms[64]] == [(64,), None, None]
    assert [arm.supported_num_heads for arm in arms[128]] == [(64,), (128,), None, None]

    def absent(name, device):
        raise ValueError(f"backend {name}: not installed")

    monkeypatch.setattr(bench.backends, "create", absent)
    assert [arm.name for arm in bench.load_arms(64, None)] == ["flashmla"]
    assert "left out: sparse_mqa_cuda: backend sparse_mqa_cuda: not installed" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--backends: backend unified_kv_triton: not installed"):
        bench.load_arms(64, ["unified_kv_triton"])


def test_shapes_that_are_asked_for():
    args = bench.parse_arguments([])
    assert args.whole and len(bench.shapes_of(args)) == 2 * 4 * 3 * 2 * 6
    quick = bench.parse_arguments(["--quick", "--model", "pro"])
    assert not quick.whole and len(bench.shapes_of(quick)) == 2 * 3 * 1 * 3
    assert bench.default_path("NVIDIA H200").name == "mqa_layer-h200.json"


def test_a_run_shares_layers_and_caches_and_saves_on_the_way(monkeypatch, capsys):
    made, saved = [], []
    config = bench.make_config

    def counting(name):
        real = getattr(bench, name)
        monkeypatch.setattr(bench, name, lambda *args, **kwargs: made.append(name) or real(*args, **kwargs))

    monkeypatch.setattr(bench, "make_config", lambda model, ratio, layers: config(model, ratio, 2, **SMALL))
    counting("random_layers")
    counting("random_cache")
    shapes = [bench.Shape("flash", size, 0, 256, batch) for size in (4, 8) for batch in (1, 2)]
    arms = {"flash": [Named("flashmla", (64,)), Named("sparse_mqa_cuda")]}
    rows = bench.run(shapes, arms, FakeMeter(), lambda rows: saved.append(len(rows)), device="cpu")
    assert [(row["batch"], row["attn_tp_size"]) for row in rows[::2]] == [(1, 4), (1, 8), (2, 4), (2, 8)]
    assert saved == [4, 8] and sorted(made) == ["random_cache"] * 2 + ["random_layers"] * 2
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_results_are_joined_and_need_no_gpu(tmp_path, capsys):
    conditions = {"benchmark": "mqa_layer", "gpu": "NVIDIA H200", "torch": "2", "triton": "3", "flash_mla": "1"}
    conditions |= {"commit": "abc", "num_layers": 8, "date": "2026-11-30", "seed": 1}
    shapes = [shape.fields for shape in bench.shapes_of(bench.parse_arguments(["--model", "pro", "--ratio", "4"]))]
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for part, file in enumerate(files):
        rows = [row("sparse_mqa_cuda", 5.0, 16) | shape for shape in shapes[part::2]]
        report.write(conditions | {"command": f"part {part}", "rows": rows}, file)
    out = tmp_path / "new" / "all.json"
    argv = ["--model", "pro", "--ratio", "4", "--keep", *map(str, files), "--out", str(out)]
    if not torch.cuda.is_available():  # a shape lacks arms that were asked for
        assert bench.main(argv) == 2 and not out.exists()
        assert "a run needs a CUDA GPU" in capsys.readouterr().err
    argv += ["--backends", "sparse_mqa_cuda"]
    assert bench.main(argv) == 0
    result = json.loads(out.read_text())
    assert result["command"] == "part 0 && part 1" and len(result["rows"]) == len(shapes)
    again = [old | {"us_median": 4.0} for old in rows]
    report.write(conditions | {"command": "again", "rows": again}, files[1])
    assert bench.main([*argv[:6], str(files[1]), *argv[6:]]) == 0
    kept = json.loads(out.read_text())["rows"]
    assert len(kept) == len(shapes) and sum(old["us_median"] == 4.0 for old in kept) == len(again)
    report.write(conditions | {"command": "b", "commit": "def", "rows": rows}, files[1])
    assert bench.main(argv) == 2
    assert "--keep: commit 'abc' and 'def', allowed: equal ones" in capsys.readouterr().err
