"""benchmark/decode_kernel_report.py: the benchmark's figures, table and plot, on hand-made rows."""

import importlib
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))
bench = importlib.import_module("decode_kernel")
report = importlib.import_module("decode_kernel_report")

ROW_FIELDS = (
    *report.CELL_FIELDS,
    "backend",
    "kernel_num_heads",
    "us_median",
    "us_min",
    "us_max",
    "floor_us",
    "rel_err",
)


def row(backend, us, *, keys=(128, 512, 4), batch=8, heads=8, kernel_heads=None, floor=1.0):
    window, extra, ratio = keys
    values = (window, extra, ratio, batch, heads, backend, kernel_heads or heads, us, us, us, floor, 2e-3)
    return dict(zip(ROW_FIELDS, values, strict=True))


def cell(ours, peer64, peer128, **fields):
    return [
        row("sparse_mqa_cuda", ours, **fields),
        row("flashmla", peer64, kernel_heads=64, **fields),
        row("flashmla", peer128, kernel_heads=128, **fields),
    ]


# Speed-ups 4, 1 and 0.5 over 64 padded heads, 2, 4 and 0.25 over the faster padding where it is the wider one.
ROWS = [
    *cell(4.0, 16.0, 8.0),
    *cell(4.0, 4.0, 20.0, batch=64),
    *cell(8.0, 4.0, 16.0, keys=(128, 0, 0)),
    *cell(None, 4.0, 16.0, keys=(128, 1024, 128)),
    *cell(10.0, 11.0, 9.0, heads=64),
]


# --- figures


def test_summary_has_exact_means_and_lists_the_slower_shapes():
    summary = report.summarise(ROWS)
    assert list(summary) == ["sparse_mqa_cuda"] and list(summary["sparse_mqa_cuda"]) == ["8", "64"]
    eight, sixty_four = summary["sparse_mqa_cuda"].values()
    assert (eight["shapes"], eight["red"]) == (3, 1)
    assert eight["geomean"] == pytest.approx((4 * 1 * 0.5) ** (1 / 3), rel=1e-12)
    assert eight["geomean_fastest_peer"] == pytest.approx((2 * 1 * 0.5) ** (1 / 3), rel=1e-12)
    assert eight["slower"] == eight["slower_than_fastest_peer"] == ["128 batch 8"]
    assert sixty_four["geomean"] == pytest.approx(1.1) and sixty_four["geomean_fastest_peer"] == pytest.approx(0.9)
    assert (sixty_four["slower"], sixty_four["slower_than_fastest_peer"]) == ([], ["128+512@4 batch 8"])


def test_summary_names_no_mean_without_a_peer():
    figures = report.summarise([row("unified_kv_triton", 4.0)])["unified_kv_triton"]["8"]
    assert (figures["shapes"], figures["geomean"], figures["slower"]) == (0, None, [])
    (line,) = report.summary_lines({"unified_kv_triton": {"8": figures}})
    assert "geometric mean -x" in line and "over 0 shapes" in line


def test_summary_lines_tell_both_kinds_of_slower_apart():
    lines = report.summary_lines(report.summarise(ROWS))
    assert lines[0].startswith("sparse_mqa_cuda, 8 heads: geometric mean 1.26x the least padded peer (1.00x its")
    assert lines[0].endswith("over 3 shapes, slower on 1 (1); red: 1")
    assert lines[1] == "  slower than the least padded: 128 batch 8"
    assert lines[2].endswith("slower on 0 (1); red: 0")
    assert lines[3:] == ["  slower than another padding: 128+512@4 batch 8"]


def test_cells_keep_compress_ratios_apart():
    rows = [row("flashmla", 1.0, keys=(128, 1024, ratio)) for ratio in (4, 128, 4)]
    assert [len(group) for group in report.cells(rows)] == [2, 1]


def test_floor_reads_every_key_once():
    # 640 keys of 584 bytes for each of 128 tokens at 4300 GB/s.
    assert report.floor_us(num_keys=640, batch=128, copy_gb_per_s=4300.0) == pytest.approx(11.1258, abs=1e-4)


@pytest.mark.parametrize(
    ("keys", "us", "share"),
    [((128, 512, 4), 4.0, 0.25), ((128, 0, 0), 4.0, 0.5), ((128, 0, 0), 2.0, None), ((128, 512, 4), None, None)],
)
def test_share_of_floor_takes_the_null_kernel_off_window_only_rows(keys, us, share):
    assert report.share_of_floor(row("sparse_mqa_cuda", us, keys=keys), null_us=2.0) == share


# --- table


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ((4.0, 16.0, 8.0), ["16.00", "8.00", "4.00", "25%", "4.00", "2.00"]),
        ((4.0, 4.0, 4.0), ["4.00", "4.00", "4.00", "25%", "1.00", "1.00"]),
        ((8.0, 4.0, 16.0), ["4.00", "16.00", "8.00*", "12%", "0.50", "2.00"]),
        ((8.0, 16.0, 4.0), ["16.00", "4.00", "8.00~", "12%", "2.00", "0.50"]),
        ((None, 16.0, 4.0), ["16.00", "4.00", "RED", "-", "-", "-"]),
        ((4.0, None, 4.0), ["-", "4.00", "4.00", "25%", "-", "1.00"]),
    ],
)
def test_table_line(times, text):
    line = report.table_line(cell(*times), ["sparse_mqa_cuda"], [64, 128], null_us=1.0)
    assert line.split() == ["128+512@4", "8", "8", "1.00", *text]


def test_table_without_our_row_or_a_peer():
    assert report.table_line([row("flashmla", 4.0, kernel_heads=64)], ["sparse_mqa_cuda"], [64], null_us=0).split() == [
        *("128+512@4", "8", "8", "1.00", "4.00", "-", "-", "-")
    ]
    assert report.table_line([row("sparse_mqa_cuda", 4.0)], ["sparse_mqa_cuda"], [], null_us=0).split()[-2:] == [
        *("4.00", "25%")
    ]


def test_table_columns_stand_under_their_header():
    backends, padded = ["sparse_mqa_cuda", "unified_kv_triton"], [64, 128]
    header, note = report.table_header(backends, padded).splitlines()
    line = report.table_line(cell(4.0, 16.0, 8.0), backends, padded, null_us=0)
    assert len(header) == len(line.rstrip(" ")) and "RED" in note
    assert header.index("sparse_mqa_cuda us") + len("sparse_mqa_cuda us") == line.index("4.00 ") + len("4.00 ")


# --- plot


def test_plot_writes_a_png_beside_the_result(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "decode.json"
    triton = [row("unified_kv_triton", 6.0, batch=batch) for batch in (8, 64)]
    path.write_text(
        json.dumps({"benchmark": "decode_kernel", "gpu": "GPU", "commit": None, "null_us": 1.0, "rows": ROWS + triton})
    )
    assert bench.main(["--plot", str(path)]) == 0
    image = path.with_suffix(".png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 10_000
    assert str(path.with_suffix(".png")) in capsys.readouterr().out


def test_plot_needs_a_row_of_ours(tmp_path):
    pytest.importorskip("matplotlib")
    result = {"rows": [row("flashmla", 1.0)], "gpu": "GPU", "commit": None, "null_us": 0.0}
    with pytest.raises(ValueError, match=r"rows: backends \['flashmla'\], allowed: one of"):
        report.plot(result, tmp_path / "plot.png")
