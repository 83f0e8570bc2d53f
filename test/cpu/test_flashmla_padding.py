"""benchmark/flashmla_padding.py: the padding table out of a measurement."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from headfit import backends

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))
script = importlib.import_module("flashmla_padding")

RECORDED = Path(script.__file__).parent / "results" / "decode_kernel-h200.json"
PROVENANCE = {
    "gpu": "GPU",
    "torch": "2",
    "flash_mla": "1",
    "commit": "abc",
    "date": "2026-01-01",
    "command": "python x",
}


def row(kernel_heads, us, *, batch=8, num_heads=16, backend="flashmla"):
    shape = {"keys_window": 128, "keys_extra": 0, "compress_ratio": 0, "batch": batch}
    return shape | {
        "num_heads": num_heads,
        "backend": backend,
        "kernel_num_heads": kernel_heads,
        "us_median": us,
        "rel_err": 2e-3,
    }


RESULT = PROVENANCE | {
    "benchmark": "decode_kernel",
    "rows": [row(64, 12.0), row(128, 11.0), row(64, 12.0, num_heads=32), row(16, 7.0, backend="sparse_mqa_cuda")],
}


@pytest.fixture
def files(tmp_path):
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"architectures": {"sm90": {"rows": []}, "sm100": {"kept": True}}}))
    return tmp_path / "result.json", table


def run(files, result):
    source, table = files
    source.write_text(json.dumps(result))
    return script.main([str(source), "--architecture", "sm90", "--table", str(table)])


def test_one_architecture_is_replaced(files):
    assert run(files, RESULT) == 0
    table = json.loads(files[1].read_text())["architectures"]
    assert table["sm100"] == {"kept": True}
    assert {name: table["sm90"][name] for name in PROVENANCE} == PROVENANCE
    assert [(entry["batch"], entry["us"]) for entry in table["sm90"]["rows"]] == [(8, {"64": 12.0, "128": 11.0})]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"benchmark": "mqa_layer"}, "benchmark: 'mqa_layer', allowed: 'decode_kernel'"),
        ({"rows": [row(64, 12.0)]}, "allowed: a time of each head count"),
        ({"rows": [row(64, 12.0), row(128, None)]}, "allowed: a time of each head count"),
        ({"rows": [row(64, 12.0), row(128, "9")]}, "allowed: a time of each head count"),
        ({"rows": [row(64, 12.0), row(128, 0)]}, "allowed: a time of each head count"),
        ({"rows": [row(16, 7.0, backend="sparse_mqa_cuda")]}, "rows: none of flashmla"),
        ({"gpu": "NVIDIA B200"}, "--architecture: sm90, allowed for NVIDIA B200: sm100"),
        ({"gpu": "NVIDIA B300 SXM6 AC"}, "--architecture: sm90, allowed for NVIDIA B300 SXM6 AC: none, it is sm103"),
        ({"rows": 5}, "TypeError: 'int' object is not iterable, allowed: a decode_kernel result and a padding table"),
        ({"rows": [{}]}, "result.json"),
    ],
    ids=["benchmark", "missing", "red", "text", "zero", "none", "architecture", "another one", "no list", "no fields"],
)
def test_what_is_no_measurement_is_refused(files, capsys, change, message):
    before = files[1].read_text()
    assert run(files, RESULT | change) == 2
    assert message in capsys.readouterr().err and files[1].read_text() == before


@pytest.mark.parametrize("table", ["[]", "{}"])
def test_a_table_of_another_form_is_refused(files, capsys, table):
    files[1].write_text(table)
    assert run(files, RESULT) == 2
    assert "table.json" in capsys.readouterr().err and files[1].read_text() == table


def test_a_table_that_cannot_be_written_is_one_line(files, capsys):
    files[0].write_text(json.dumps(RESULT))
    absent = files[1].parent / "absent" / "table.json"
    assert script.main([str(files[0]), "--architecture", "sm90", "--table", str(absent)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(absent) in line


def test_the_packaged_table_is_what_the_script_makes_of_the_recorded_result():
    packaged = json.loads(script.TABLE.read_text())["architectures"]["sm90"]
    assert packaged == script.table_of(json.loads(RECORDED.read_text()))


def test_row_29_auto_on_hopper_is_within_5_percent_of_the_best(monkeypatch):
    """Its choice, made before the batch is known, against every backend on every recorded shape."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backends, "_installed", lambda module: True)
    monkeypatch.setattr(backends.sparse_mqa_cuda, "obstacle", lambda: None)
    chosen, _ = backends.choose("auto", "cuda")
    times = {}
    for entry in json.loads(RECORDED.read_text())["rows"]:
        shape = tuple(entry[name] for name in (*script.SHAPE, "num_heads"))
        best = times.setdefault(shape, {})
        best[entry["backend"]] = min(entry["us_median"], best.get(entry["backend"], float("inf")))
    assert len(times) >= 96
    slow = {shape: us for shape, us in times.items() if us[chosen] > 1.05 * min(us.values())}
    assert not slow
