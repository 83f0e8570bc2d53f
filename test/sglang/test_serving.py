"""The serving benchmark against a small server of our own: what it measures, writes and refuses."""

import contextlib
import functools
import gzip
import inspect
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmark"
FAKE = Path(__file__).parent / "fake_server.py"
sys.path.insert(0, str(BENCHMARK))

import serving  # noqa: E402
import serving_report as report  # noqa: E402
import serving_server  # noqa: E402
from serving_client import Request, run_load  # noqa: E402

SMALL = ["--num-heads", "64", "--concurrency", "1", "4", "--prompt-tokens", "8", "--output-tokens", "12"]
ANSWERED = "headfit answered 1 decode calls of 1 layers in process 100"
SMALL += ["--requests-per-slot", "2", "--start-timeout", "30", "--warm-up-rounds", "0"]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def server():
    """start(*arguments, **environment) -> URL"""
    processes = []

    def start(*arguments, **environment):
        port = free_port()
        command = [sys.executable, str(FAKE), str(port), *arguments]
        processes.append(subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL))
        url = f"http://127.0.0.1:{port}"
        while not serving_server.healthy(url):
            assert processes[-1].poll() is None
        return url

    yield start
    for process in processes:
        process.kill()
        process.wait()


def run(out, port, *arguments, fake=()):
    return serving.main(command_line(out, port, *arguments, fake=fake))


def command_line(out, port, *arguments, fake=()):
    options = ["--out", str(out), "--port", str(port), *SMALL, *arguments]
    return [*options, "--", sys.executable, str(FAKE), "{port}", *fake]


def attached(server):
    return [f"--attach={arm}={server()}" for arm in serving.ARMS]


def test_arms_alternate_and_the_faster_one_wins(tmp_path, port, capsys):
    assert run(tmp_path / "result.json", port, "--rounds", "2") == 0
    result = json.loads((tmp_path / "result.json").read_text())
    rows = result["rows"]
    assert [(row["round"], row["arm"]) for row in rows[::2]] == [
        (0, "stock"),
        (0, "plugin"),
        (1, "plugin"),
        (1, "stock"),
    ]
    wanted = {"arm", "sglang", "tp_size", "num_heads", "num_local_heads", "concurrency", "output_tokens_per_s"}
    assert wanted | {"ttft_ms_p50", "tpot_ms_p50", "tpot_ms_mean", "tpot_ms_p99"} <= set(rows[0])
    assert {"gpu", "headfit", "commit"} <= set(result) and result["torch"].startswith("2.")
    # DP attention: TP 4 in two groups is attention TP 2.
    assert (rows[0]["sglang"], rows[0]["tp_size"], rows[0]["num_local_heads"]) == ("0.0.1", 4, 32)
    for row in rows:
        count = 2 * row["concurrency"]
        assert (row["num_requests"], row["num_errors"], row["num_length_stops"]) == (count, 0, count)
        assert row["num_output_tokens"] == 12 * count
        step = 20.0 if row["arm"] == "stock" else 10.0
        assert 0.9 * step <= row["tpot_ms_p50"] < 4 * step and row["ttft_ms_p50"] >= 5 * step
    summary = result["summary"]["4"]
    assert summary["pairs"] == 2 and summary["ratio_median"] > 1.1
    assert result["decode_step_ms"]["stock"][0]["2"] == pytest.approx(20.0)
    assert result["decode_step_ms"]["plugin"][1]["2"] == pytest.approx(10.0)
    assert result["plugin"]["stock"] == [] and ANSWERED in result["plugin"]["plugin"]
    assert result["complete"] and result["verified"] and result["num_errors"] == 0 and "error" not in result
    printed = capsys.readouterr().out.splitlines()
    assert "verified" not in "".join(printed[:-1]) and json.loads(printed[-1])["complete"]
    assert json.loads(printed[-1])["summary"] == result["summary"] and "plugin/stock" in "".join(printed)
    assert not serving_server.healthy(f"http://127.0.0.1:{port}"), "the last server still runs"
    assert "/flush_cache" in (tmp_path / "result-stock-0.log").read_text()


def written_result(path, **others):
    facts = {"sglang": "0", "tp_size": 8, "num_heads": 128, "num_local_heads": 16, "num_errors": 0, "num_requests": 1}
    figures = {"ttft_ms_p50": 1.0, "tpot_ms_p50": 2.0, "tpot_ms_p99": None}
    rows = [
        {**facts, **figures, "arm": arm, "round": number, "concurrency": count, "output_tokens_per_s": speed * count}
        for arm, speed in (("stock", 100), ("plugin", 120))
        for number in range(2)
        for count in (1, 8)
    ]
    path.write_text(json.dumps({"benchmark": "serving", "rows": rows} | others))
    return path


def test_plot_of_a_written_result(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = written_result(tmp_path / "result.json")
    assert serving.main(["--plot", str(path)]) == 0
    assert (tmp_path / "result.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "plugin/stock 1.200, at least 1.200 (95%), 2 pairs" in printed and " 960.00" in printed
    assert "verified" not in printed and "incomplete" not in printed


def test_the_table_needs_no_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = written_result(tmp_path / "result.json", complete=False, error="ended by SIGTERM", verified=False)
    assert serving.main(["--plot", str(path)]) == 1
    printed = capsys.readouterr()
    assert "plugin/stock 1.200" in printed.out and "incomplete: ended by SIGTERM" in printed.out
    assert "nothing shows which kernel ran" in printed.out
    (line,) = printed.err.splitlines()
    assert "matplotlib is needed" in line and not (tmp_path / "result.png").exists()


@pytest.mark.parametrize(
    "text", [None, "no JSON", "[]", '{"benchmark": "mqa_layer", "rows": []}', '{"benchmark": "serving", "rows": [{}]}']
)
def test_only_a_result_of_this_benchmark_is_plotted(tmp_path, capsys, text):
    path = tmp_path / "result.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        serving.main(["--plot", str(path)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"--plot: '{path}'" in said and "allowed: a result of this benchmark" in said


def test_attached_servers_alternate_within_a_concurrency(tmp_path, server, capsys):
    out = tmp_path / "result.json"
    attach = ["--attach", f"stock={server()}", "--attach", f"plugin={server()}/"]
    assert serving.main(["--out", str(out), *SMALL, "--rounds", "1", *attach]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["concurrency"], row["arm"]) for row in rows] == [
        (1, "stock"),
        (1, "plugin"),
        (4, "stock"),
        (4, "plugin"),
    ]
    result = json.loads(out.read_text())
    assert "gpu" not in result  # the servers may run anywhere
    assert (result["complete"], result["verified"]) == (True, False)
    assert "nothing shows which kernel ran" in capsys.readouterr().out


def test_the_first_round_is_left_out(tmp_path, server, capsys):
    out, attach = tmp_path / "result.json", attached(server)
    assert serving.main(["--out", str(out), *SMALL, "--rounds", "1", "--warm-up-rounds", "1", *attach]) == 0
    assert [row["round"] for row in json.loads(out.read_text())["rows"]] == [0] * 4
    said = capsys.readouterr().out
    assert said.count("warm-up ") == 4 and said.count("round 0 ") == 4


def test_the_warm_up_round_is_not_all_that_a_short_run_does(tmp_path, server, monkeypatch):
    measured = []

    def measure(args, url, number, concurrency, log):
        measured.append(number)
        return {"num_errors": int(number < 0), "output_tokens_per_s": None if number < 0 else 1.0, "tpot_ms_p50": 1.0}

    monkeypatch.setattr(serving, "measure", measure)
    monkeypatch.setattr(serving, "warm_prefill", lambda args, url: measured.append("prefill") or 1)
    out, attach = tmp_path / "result.json", attached(server)
    options = ["--rounds", "5", "--warm-up-rounds", "1", "--stop-after", "1e-6"]
    monkeypatch.setattr(report, "table", lambda rows: [])
    monkeypatch.setattr(report, "summarise", lambda rows: {})
    assert serving.main(["--out", str(out), *SMALL, *options, *attach]) == 1  # the warm-up's requests failed
    assert measured == ["prefill"] * 2 + [-1] * 4 + [0] * 4
    result = json.loads(out.read_text())
    assert len(result["rows"]) == 4 and result["num_warm_up_errors"] == 2 + 4


@pytest.mark.parametrize(
    "info, sizes",
    [
        ({}, [8, 16, 24, 32]),
        ({"chunked_prefill_size": 24, "max_prefill_tokens": 16}, [8, 16, 24]),
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 16}, [8, 16]),
        ({"chunked_prefill_size": 28}, [8, 16, 24, 28]),
        ({"chunked_prefill_size": 24, "max_req_input_len": 24}, [8, 16, 23]),
        ({"chunked_prefill_size": 7}, [7]),
    ],
)
def test_the_warm_up_computes_every_size_of_a_prefill_batch_once(monkeypatch, info, sizes):
    sent, refused = [], []

    def load(url, prompts, *, concurrency, max_new_tokens):
        ((prompt,), refusal) = prompts, "too long" if len(prompts[0]) in refused else ""
        sent.append((len(prompt), tuple(prompt[:2]), max_new_tokens))
        return [Request(0.0, 1.0, 1.0, 1, error=refusal)]

    monkeypatch.setattr(serving, "get", lambda url, path: info)
    monkeypatch.setattr(serving, "run_load", load)
    args = serving.parse(["--out", "x", *SMALL, "--", "python", "{port}"])
    assert serving.warm_prefill(args, "http://server") == 0
    assert [(size, tokens) for size, _, tokens in sent] == [(size, 1) for size in sizes]
    assert len({prefix for _, prefix, _ in sent}) == len(sizes), "a prompt begins as another: it would be cached"
    refused += sizes[-2:]
    sent.clear()
    assert serving.warm_prefill(args, "http://server") == 1
    assert [size for size, _, _ in sent] == (sizes[:-1] or sizes), "after a refused prompt longer ones were sent"


@pytest.mark.parametrize(
    "fake, message",
    [((), ""), (("--whole",), "layers are not one rank's"), (("--other-heads",), "has other heads than the rows'")],
)
def test_a_lone_rank(tmp_path, port, monkeypatch, capsys, fake, message):
    monkeypatch.setenv("FAKE_TP_SIZE", "1")
    options = ["--rounds", "1", "--lone-rank", "3/8", "--profile-dir", str(tmp_path / "profile")]
    assert run(tmp_path / "result.json", port, *options, fake=fake) == int(bool(message))
    assert message in capsys.readouterr().err
    if not message:
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["lone_rank"] == "3/8" and {row["num_local_heads"] for row in result["rows"]} == {8}
        assert all("rank 3 of 8" in " ".join(result["plugin"][arm]) for arm in serving.ARMS)


def test_a_lone_rank_needs_tp_1(tmp_path, port, capsys):
    options = ["--rounds", "1", "--lone-rank", "3/8", "--profile-dir", str(tmp_path / "profile")]
    assert run(tmp_path / "result.json", port, *options) == 1
    assert "the server's tp_size is 4, allowed: 1" in capsys.readouterr().err


def test_decode_steps_of_the_warm_up_are_left_out(tmp_path):
    line = "Decode batch, #running-req: 8, #token: 9, cuda graph: True, gen throughput (token/s): {}\n"
    log = tmp_path / "log"
    log.write_text(line.format(8.0) + line.format(800.0))
    args = serving.parse(["--out", "x", "--", "python", "{port}"])
    result = {"decode_step_ms": {}, "plugin": {}, "rows": []}
    serving._read_log(args, "stock", log, result, warmed=len(line.format(8.0)))
    assert result["decode_step_ms"]["stock"] == [{"8": 10.0}]


def test_side_by_side_each_server_starts_once(tmp_path, port, monkeypatch):
    monkeypatch.setattr(serving, "PREFILL_S", 0.1)
    options = ["--rounds", "2", "--side-by-side", "--profile", "2", "--profile-dir", str(tmp_path / "profile")]
    assert run(tmp_path / "result.json", port, *options, "--env", "stock:FAKE_STEP=0.03") == 0
    result = json.loads((tmp_path / "result.json").read_text())
    order = [(row["round"], row["concurrency"], row["arm"]) for row in result["rows"]]
    assert order[:4] == [(0, 1, "stock"), (0, 1, "plugin"), (0, 4, "stock"), (0, 4, "plugin")]
    assert order[4:6] == [(1, 1, "plugin"), (1, 1, "stock")] and len(order) == 8
    assert result["summary"]["4"]["pairs"] == 2 and result["decode_step_ms"]["stock"][0]["2"] == pytest.approx(30.0)
    kernels = {"sparse_mqa": {"launches": 10, "us": 25.0}}
    assert [result["profiles"][arm]["attention_kernels"] for arm in ("stock", "plugin")] == [kernels] * 2
    assert ANSWERED in result["plugin"]["plugin"] and not result["plugin"]["stock"]
    for number in (0, 1):
        assert not serving_server.healthy(f"http://127.0.0.1:{port + number * serving.PORT_STEP}")


@pytest.mark.parametrize("options", [[], ["--side-by-side"]], ids=["in turn", "side by side"])
def test_requests_that_the_cache_had_no_room_for_are_counted(tmp_path, port, capsys, options):
    """One a request of the measured load; those of the warm-up before it do not count."""
    options = ["--rounds", "2", "--concurrency", "2", *options]
    assert run(tmp_path / "result.json", port, *options, fake=["--retract"]) == 0
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["num_retractions"] for row in rows] == [
        row["num_requests"] if row["arm"] == "stock" else 0 for row in rows
    ]
    assert {row["num_waiting"] for row in rows if row["arm"] == "stock"} == {7}
    times = sum(row["num_retractions"] for row in rows)
    said = capsys.readouterr().out
    assert said.count("the KV cache was full") == said.count("waited for room") == 1
    assert f"stock at concurrency 2: the KV cache was full {times} times in 2 rounds" in said
    assert "stock at concurrency 2: up to 7 requests waited for room" in said


def test_no_round_starts_that_would_end_too_late(tmp_path, port, capsys):
    options = ["--rounds", "9", "--concurrency", "1", "--stop-after", "0.1", "--min-requests", "3"]
    assert run(tmp_path / "result.json", port, *options) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["summary"]["1"]["pairs"] == 1 and [row["num_requests"] for row in result["rows"]] == [3, 3]
    assert "stopped after 1 of 9 rounds" in capsys.readouterr().err


def test_a_failed_request_is_counted_and_gets_no_time(tmp_path, port, capsys):
    assert run(tmp_path / "result.json", port, "--rounds", "1", fake=["--fail-every", "6"]) == 1
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    failed = [row for row in rows if row["num_errors"]]
    assert failed and all(row["output_tokens_per_s"] is row["tpot_ms_p50"] is None for row in failed)
    assert "HTTP 400" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fault, message",
    [
        ("abort", "ended after 1 of 5 tokens by"),
        ("shorten", "ended after 4 of 5 tokens by"),
        ("garble", "no HTTP status line: 'HTTP/1.1'"),
    ],
)
def test_a_request_that_ends_otherwise_is_that_requests_error(server, fault, message):
    requests = run_load(server(f"--{fault}-every", "3"), [[1, 2]] * 6, concurrency=2, max_new_tokens=5)
    failed = [request for request in requests if request.error]
    assert len(failed) == 2 and all(message in request.error for request in failed)
    assert all("planted {abort}" in request.error for request in failed) == (fault == "abort")
    row = report.metrics(requests)
    assert (row["num_errors"], row["num_length_stops"], row["num_output_tokens"]) == (2, 4, 20)


@pytest.mark.parametrize("mode", [[], ["--side-by-side"]])
@pytest.mark.parametrize(
    "fake, message",
    [
        (["--say", "WARNING headfit 0 stands down, SGLang 0 runs as stock: planted"], "headfit 0 stands down, SGLang"),
        (["--say", "headfit leaves a decode call to the server's kernel: planted"], "headfit leaves a decode call to"),
        (["--say", "headfit: x could not be prepared for 8 heads: planted"], "x could not be prepared for 8 heads"),
        (["--workers", "3"], "3 of the plugin server's 4 workers said which kernel decodes"),
        (["--answering", "3"], "headfit answered no call in the plugin server's worker, process 103"),
    ],
)
def test_a_plugin_that_does_not_run_as_told_is_an_error(tmp_path, port, capsys, mode, fake, message):
    out = tmp_path / "result.json"
    out.write_text("an earlier result")
    options = ["--rounds", "1", "--warm-up-rounds", "1", "--concurrency", "1", *mode]
    assert run(out, port, *options, fake=fake) == 1
    printed = capsys.readouterr()
    assert message in printed.err and "round 0" not in printed.out
    assert out.read_text() == "an earlier result"


def worker_lines(*kernels):
    line = "headfit 0 in SGLang 0, process {} on sm90: 32 of 64 heads, 6 layers; decode kernel: {}; sinks: views"
    return [line.format(100 + number, kernel) for number, kernel in enumerate(kernels)]


@pytest.mark.parametrize(
    "said, backend, fault",
    [
        ([*worker_lines("a (auto)", "a (auto)"), ANSWERED, ANSWERED.replace("100", "101")], "auto", ""),
        (
            [*worker_lines("a (auto)", "a (auto)"), ANSWERED],
            "auto",
            "answered no call in the plugin server's worker, process 101",
        ),
        ([*worker_lines("a (auto)")[:1] * 2, ANSWERED], "auto", "1 of the plugin server's 2"),
        ([ANSWERED], "auto", "0 of the plugin server's 2 workers"),
        (
            [*worker_lines("a", "the server's own (no compiler)"), ANSWERED],
            "auto",
            "runs the server's own: headfit 0 in SGLang 0, process 101",
        ),
        (
            [*worker_lines("a", "a"), ANSWERED, "headfit leaves a layer to the server: x"],
            "auto",
            "does not run as told: headfit leaves a layer",
        ),
        (worker_lines("the server's own", "the server's own"), "flashmla", ""),
        (worker_lines("the server's own", "a"), "flashmla", "runs another kernel than the server's own"),
    ],
)
def test_what_the_workers_must_have_said(said, backend, fault):
    rows = [{"arm": arm, "num_workers": 2, "num_heads": 64, "num_local_heads": 32} for arm in serving.ARMS]
    found = report.log_fault(said, "plugin", rows, backend=backend, is_lone_rank=False)
    assert fault in found and bool(fault) == bool(found)


def test_stock_must_not_have_said_which_kernel_decodes():
    rows = [{"arm": "stock", "num_workers": 2, "num_heads": 64, "num_local_heads": 32}]
    said = worker_lines("the server's own (HEADFIT_BACKEND=flashmla)")
    found = report.log_fault(said, "stock", rows, backend="auto", is_lone_rank=False)
    assert "the stock server runs with headfit" in found
    assert report.log_fault([], "stock", rows, backend="auto", is_lone_rank=False) == ""


@pytest.mark.parametrize(
    "info, heads, workers",
    [
        ({"tp_size": 8}, 16, 8),
        ({"tp_size": 8, "dp_size": 2, "enable_dp_attention": True}, 32, 8),
        # SGLang 0.5.23 with the same two arguments.
        ({"tp_size": 8, "dp_size": 1, "attn_dp_size": 2, "enable_dp_attention": True}, 32, 8),
        ({"tp_size": 8, "attn_dp_size": 1, "attn_cp_size": 2}, 32, 8),
        ({"tp_size": 4, "dp_size": 2, "pp_size": 2}, 32, 16),  # two replicas
        ({"tp_size": 4, "attn_cp_size": 3}, None, None),
        ({"tp_size": 1, "dp_size": 2, "enable_dp_attention": True}, None, None),
    ],
)
def test_heads_and_workers_follow_from_what_the_server_says(monkeypatch, info, heads, workers):
    monkeypatch.setattr(serving, "get", lambda url, path: info)
    args = serving.parse(["--out", "x", "--num-heads", "128", "--", "python", "{port}"])
    if heads is None:
        with pytest.raises(serving_server.ServerError, match="allowed: sizes whose product divides tp_size"):
            serving._facts(args, "http://server")
    else:
        facts = serving._facts(args, "http://server")
        assert (facts["num_local_heads"], facts["num_workers"]) == (heads, workers)


def test_a_fault_after_the_last_round_leaves_an_incomplete_result(tmp_path, port, capsys, monkeypatch):
    monkeypatch.setattr(serving, "PREFILL_S", 0.1)
    options = ["--rounds", "1", "--side-by-side", "--concurrency", "1", "--profile", "2"]
    fake = ["--say-late", "headfit leaves a decode call to the server's kernel: planted"]
    out = tmp_path / "result.json"
    assert run(out, port, *options, "--profile-dir", str(tmp_path / "profile"), fake=fake) == 1
    result = json.loads(out.read_text())
    assert result["complete"] is False and "planted" in result["error"] and len(result["rows"]) == 2


def test_a_server_that_ends_in_a_round_leaves_the_rounds_before(tmp_path, port, capsys):
    out = tmp_path / "result.json"
    # Of the plugin's server: one request warms, two are measured, a round; the first of the next round is its last.
    options = ["--rounds", "3", "--side-by-side", "--concurrency", "1"]
    assert run(out, port, *options, fake=["--die-at", "4"]) == 1
    result = json.loads(out.read_text())
    assert [row["round"] for row in result["rows"]] == [0, 0] and result["num_errors"] == 0
    assert result["complete"] is False and "/flush_cache" in result["error"] and result["summary"]["1"]["pairs"] == 1


def test_a_server_that_ends_in_its_last_measurement_is_an_error(tmp_path, port, capsys):
    out = tmp_path / "result.json"
    assert run(out, port, "--rounds", "1", "--concurrency", "1", fake=["--die-at", "3"]) == 1
    assert "the plugin server is not healthy after its load" in capsys.readouterr().err and not out.exists()


def interrupted(out, port, number, until, *arguments, fake=()):
    """(exit code, seconds to its end) of a process that runs the benchmark and gets a signal once `until()`."""
    command = [sys.executable, str(BENCHMARK / "serving.py"), *command_line(out, port, *arguments, fake=fake)]
    # What a shell starts in the background ignores SIGINT, and so do all its children.
    default = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=default) as process:
        while not until():
            assert process.poll() is None
            time.sleep(0.05)
        begin = time.monotonic()
        process.send_signal(number)
        time.sleep(0.1)
        process.send_signal(number)  # which does not cut the end short
        process.wait(60)
        return process.returncode, time.monotonic() - begin


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_ends_the_servers_and_leaves_the_rounds_before(tmp_path, port, number, code):
    out = tmp_path / "result.json"
    options = ["--rounds", "99", "--concurrency", "1", "--side-by-side"]
    found, _ = interrupted(out, port, number, out.exists, *options)
    assert found == code
    result = json.loads(out.read_text())
    assert result["complete"] is False and result["error"] == f"ended by {number.name}"
    assert result["rows"] and len(result["rows"]) % 2 == 0
    for other in (port, port + serving.PORT_STEP):
        assert not serving_server.healthy(f"http://127.0.0.1:{other}")


@pytest.mark.parametrize("mode", [[], ["--side-by-side"]])
def test_a_signal_ends_servers_that_still_start(tmp_path, port, mode):
    def starts():
        logs = list(tmp_path.glob("*.log"))
        return len(logs) == 1 + bool(mode) and all("starts" in log.read_text() for log in logs)

    out = tmp_path / "result.json"
    found, seconds = interrupted(out, port, signal.SIGINT, starts, *mode, fake=["--slow-start", "25"])
    assert found == 130 and seconds < 12 and not out.exists()


def test_a_start_is_not_awaited_once_another_failed(tmp_path, port, capsys):
    begin = time.monotonic()
    shell = ["sh", "-c", 'test "$HEADFIT_BACKEND" = off && exit 7; sleep 25']
    options = ["--out", str(tmp_path / "result.json"), "--port", str(port), *SMALL, "--side-by-side"]
    assert serving.main([*options, "--", *shell, "{port}"]) == 1
    assert "the server ended with 7" in capsys.readouterr().err and time.monotonic() - begin < 12


def test_a_signal_that_another_thread_takes_ends_a_wait():
    here, silent = socket.socketpair()
    here.settimeout(20)
    threads = threading.active_count()

    def take_it():
        time.sleep(0.3)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    with here, silent:
        begin = time.monotonic()
        with serving_server.signals_raised(), pytest.raises(serving_server.Signalled, match="SIGTERM"):
            other = threading.Thread(target=take_it)
            other.start()
            here.recv(1)
        assert time.monotonic() - begin < 10
    other.join()
    assert threading.active_count() == threads and signal.set_wakeup_fd(-1) == -1


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with serving_server.signals_raised():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(serving_server.Signalled, match="SIGTERM"):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_server_command_that_cannot_run_is_an_error(tmp_path, port, capsys):
    out = tmp_path / "result.json"
    assert serving.main(["--out", str(out), "--port", str(port), *SMALL, "--", "no-such-command", "{port}"]) == 1
    assert "the server command does not run: " in (said := capsys.readouterr().err) and "'no-such-command'" in said


def test_a_server_that_says_nothing_of_itself_is_an_error(tmp_path, port, capsys):
    assert run(tmp_path / "result.json", port, fake=["--no-info"]) == 1
    assert "/server_info gives no sizes: KeyError: 'tp_size'" in capsys.readouterr().err


@pytest.fixture
def garbage():
    """The URL of a port that answers every connection with what is no HTTP."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65_536)
                        connection.sendall(b"SSH-2.0-garbage\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_server_that_speaks_no_http_is_an_error(tmp_path, server, garbage, capsys):
    assert not serving_server.healthy(garbage)
    attach = [f"--attach=stock={garbage}", f"--attach=plugin={server()}"]
    assert serving.main(["--out", str(tmp_path / "result.json"), *SMALL, *attach]) == 1
    assert f"{garbage}/server_info: BadStatusLine: SSH-2.0-garbage" in capsys.readouterr().err


def test_a_server_that_hangs_costs_a_flush_no_more_than_its_time(server):
    url, begin = server("--hang"), time.monotonic()
    with pytest.raises(serving_server.ServerError, match="/flush_cache"):
        serving_server.flush_cache(url, timeout_s=1.0)
    assert time.monotonic() - begin < 3
    assert inspect.signature(serving_server.flush_cache).parameters["timeout_s"].default <= 30


def test_a_trace_is_read_once_it_is_whole(tmp_path, port, monkeypatch):
    monkeypatch.setattr(serving, "PREFILL_S", 0.1)
    monkeypatch.setattr(serving, "ARMS", ("plugin",))
    options = ["--rounds", "1", "--concurrency", "1", "--profile", "2", "--profile-dir", str(tmp_path / "profile")]
    out = tmp_path / "result.json"
    assert run(out, port, *options, fake=["--slow-trace", "2.5"]) == 0
    assert json.loads(out.read_text())["profiles"]["plugin"]["total_us"] == 100.0


def test_a_trace_that_stays_cut_is_an_error(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": []}')[:-12])
    with pytest.raises(serving_server.ServerError, match="does not read whole: EOFError"):
        serving._trace_events(path, time.monotonic())


def test_a_server_that_ends_is_an_error_with_its_log(tmp_path, port, capsys):
    assert run(tmp_path / "result.json", port, fake=["--die"]) == 1
    assert "the server ended with 1" in (text := capsys.readouterr().err) and "planted end" in text


def test_an_arm_that_did_not_run_the_plugin_is_an_error(tmp_path, port, capsys):
    assert run(tmp_path / "result.json", port, "--rounds", "1", "--concurrency", "1", fake=["--silent"]) == 1
    assert "the plugin server's log lacks calls answered by headfit" in capsys.readouterr().err
    quiet = ["--rounds", "1", "--concurrency", "1", "--backend", "flashmla"]
    own = ["--kernel", "the server's own (HEADFIT_BACKEND=flashmla)"]
    assert run(tmp_path / "result.json", port, *quiet, fake=own) == 0
    assert run(tmp_path / "result.json", port, *quiet, fake=["--silent"]) == 1
    assert "0 of the plugin server's 4 workers said which kernel decodes" in capsys.readouterr().err


def test_profile_of_the_last_round(tmp_path, port, monkeypatch):
    monkeypatch.setattr(serving, "PREFILL_S", 0.1)
    folder = tmp_path / "profile"
    options = ["--rounds", "1", "--concurrency", "1", "--profile", "2", "--profile-dir", str(folder)]
    first = folder / "0-TP-0.trace.json.gz"  # an earlier run's is not taken
    folder.mkdir()
    first.write_bytes(b"")
    monkeypatch.setattr(serving, "ARMS", ("plugin",))
    assert run(tmp_path / "result.json", port, *options) == 0
    found = json.loads((tmp_path / "result.json").read_text())["profiles"]["plugin"]
    assert (found["concurrency"], found["attention_us"], found["total_us"]) == (2, 25.0, 100.0)


@pytest.mark.parametrize("mode", [[], ["--side-by-side"]], ids=["in turn", "side by side"])
@pytest.mark.parametrize(
    "fake, message",
    [
        (["--prefill-in-trace"], "not all 10 profiled steps were decode steps: 9 launches of sparse_mqa"),
        (["--say-late", "Prefill batch, #new-seq: 1"], "the server computed a prompt while decode steps were profiled"),
        (["--refuse-long"], "2 of 2 profiled requests failed: ValueError: HTTP 400"),
    ],
    ids=["launches", "prefill", "refused"],
)
def test_a_profile_that_is_not_what_it_says_is_an_error_by_itself(
    tmp_path, port, monkeypatch, capsys, mode, fake, message
):
    monkeypatch.setattr(serving, "PREFILL_S", 0.1)
    folder = str(tmp_path / "profile")
    options = ["--rounds", "1", "--concurrency", "1", "--profile", "2", "--profile-dir", folder, *mode]
    out = tmp_path / "result.json"
    assert run(out, port, *options, fake=fake) == 1
    printed = capsys.readouterr()
    assert message in printed.err and printed.out.count("no profile of ") == 2
    result = json.loads(out.read_text())
    assert len(result["rows"]) == 2 and result["complete"] and result["num_errors"] == 0
    assert all(message in profile["error"] for profile in result["profiles"].values()) and len(result["profiles"]) == 2


def test_a_port_in_use_is_an_error(tmp_path, server, capsys):
    assert run(tmp_path / "result.json", server().rpartition(":")[2]) == 1
    assert "is served by another process" in capsys.readouterr().err


def test_client_keeps_the_concurrency_and_survives_no_server(server):
    requests = run_load(server(), [[1, 2]] * 6, concurrency=2, max_new_tokens=5)
    assert [request.num_tokens for request in requests] == [5] * 6
    events = [(r.start, 1) for r in requests] + [(r.last, -1) for r in requests]
    running = peak = 0
    for _, change in sorted(events):
        running += change
        peak = max(peak, running)
    assert peak <= 3  # the next starts at the moment when one ends
    (failed,) = run_load("http://127.0.0.1:1", [[1]], concurrency=1, max_new_tokens=1)
    assert "Error" in failed.error and failed.num_tokens == 0
    with pytest.raises(ValueError, match="concurrency: 0"):
        run_load("http://127.0.0.1:1", [], concurrency=0, max_new_tokens=1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--out is needed"),
        (["--out", "x"], "either a server command"),
        (["--out", "x", "--attach", "stock=http://a:1", "--", "python"], "either a server command"),
        (["--out", "x", "--attach", "stock=http://a:1"], "one URL each"),
        (["--out", "x", "--attach", "ours=http://a:1"], "--attach: 'ours=http://a:1'"),
        (["--out", "x", "--env", "STOCK:A=1", "--", "python"], "--env: 'STOCK:A=1', allowed: stock:NAME=VALUE or"),
        (["--out", "x", "--env", "stock:A", "--", "python"], "--env: 'stock:A'"),
        (["--out", "x", "--side-by-side", *(f"--attach={arm}=http://a:1" for arm in serving.ARMS)], "need servers"),
        (["--out", "x", *(f"--attach={arm}=http://a:1" for arm in serving.ARMS)], "http://a:1 for both arms"),
        (["--out", "x", *(f"--attach=stock=http://{host}:1" for host in "abc")], "--attach: stock, stock, stock"),
        (["--out", "x", "--attach=stock=http://a:b"], "--attach: 'stock=http://a:b', allowed: stock=http://HOST:PORT"),
        (["--out", "x", "--attach=stock=http://a:70000"], "--attach: 'stock=http://a:70000'"),
        (["--out", "x", "--attach=stock=http://:1"], "--attach: 'stock=http://:1'"),
        (["--out", "x", "--attach=stock=http://a:1/v1"], "--attach: 'stock=http://a:1/v1'"),
        (["--out", "no-folder/x", "--", "python"], "--out: 'no-folder/x', allowed: a file in a folder that exists"),
        (["--out", "/", "--", "python"], "--out: '/', allowed: a file"),
        (["--out", "x", "--vocab-size", "2", "--", "python"], "--vocab-size: 2, allowed: at least 3"),
        (["--out", "x", "--port", "65536", "--", "python"], "--port: 65536, allowed: 1 to 65535"),
        (["--out", "x", "--port", "0", "--", "python"], "--port: 0, allowed: 1 to 65535"),
        (["--out", "x", "--port", "http", "--", "python"], "--port: 'http', allowed: a whole number, 1 to 65535"),
        (["--out", "x", "--side-by-side", "--port", "65530", "--", "python"], "--port: 65530, allowed with"),
        (["--out", "x", "--profile", "0", "--", "python"], "--profile: 0, allowed: at least 1"),
        (["--out", "x", "--backend", "cuda", "--", "python"], "--backend: 'cuda', allowed: auto, sparse_mqa_cuda"),
        (["--out", "x", "--backend", "off", "--", "python"], "--backend: 'off', allowed: auto, sparse_mqa_cuda"),
        (["--out", "x", "--rounds", "0", "--", "python"], "--rounds: 0"),
        (["--out", "x", "--concurrency", "0", "--", "python"], "--concurrency: 0"),
        (["--out", "x", "--num-heads", "-1", "--", "python"], "--num-heads: -1"),
        (["--out", "x", "--warm-up-rounds", "-1", "--", "python"], "--warm-up-rounds: -1"),
        (["--out", "x", "--lone-rank", "8/8", "--", "python"], "--lone-rank: '8/8', allowed: R/N"),
        (
            ["--out", "x", "--lone-rank", "0/8", *(f"--attach={arm}=http://a:1" for arm in serving.ARMS)],
            "need servers",
        ),
    ],
)
def test_what_cannot_run_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        serving.parse(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_help_needs_neither_torch_nor_headfit():
    code = "import sys, serving; sys.exit(any(name.split('.')[0] in ('torch', 'headfit') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=BENCHMARK).returncode == 0


def test_metrics_by_hand():
    requests = [Request(0.0, 0.1, 0.5, 5), Request(0.0, 0.3, 0.3, 1), Request(0.5, 1.0, 2.0, 11, "length")]
    row = report.metrics([*requests, Request(0.0, 0.0, 0.0, 0, error="no")])
    assert (row["num_requests"], row["num_errors"], row["num_length_stops"]) == (4, 1, 1)
    assert row["output_tokens_per_s"] == pytest.approx(17 / 2.0)
    assert row["tpot_ms_p50"] == pytest.approx(100) and row["tpot_ms_mean"] == pytest.approx(100)
    assert row["ttft_ms_p50"] == pytest.approx(300) and row["ttft_ms_p99"] == pytest.approx(300 + 0.98 * 200)
    assert report.metrics([])["output_tokens_per_s"] is None and report.percentile([], 50) is None


def test_ratio_and_its_bound_by_hand():
    values = [(0, 100, 110), (1, 100, 100), (2, 200, 210)]
    rows = [
        {"arm": arm, "round": number, "concurrency": 8, "output_tokens_per_s": speed}
        for number, stock, plugin in values
        for arm, speed in (("stock", stock), ("plugin", plugin))
    ]
    rows.append({"arm": "stock", "round": 3, "concurrency": 8, "output_tokens_per_s": 100})
    rows.append({"arm": "plugin", "round": 3, "concurrency": 8, "output_tokens_per_s": None})
    found = report.summarise(rows)["8"]
    assert found["pairs"] == 3 and found["ratio_median"] == pytest.approx(1.05)
    logs = [math.log(1.1), 0.0, math.log(1.05)]
    center = sum(logs) / 3
    spread = math.sqrt(sum((log - center) ** 2 for log in logs) / 2)
    assert found["ratio_lower_95"] == pytest.approx(math.exp(center - 2.920 * spread / math.sqrt(3)))
    assert report.lower_bound([1.1]) is None and report.lower_bound([1.0] * 40) == pytest.approx(1.0)


def test_kernel_shares_and_steps_by_hand():
    events = [
        {"cat": "kernel", "name": "flash_fwd_splitkv_mla", "dur": 30.0},
        {"cat": "kernel", "name": "gemm", "dur": 60.0},
        {"cat": "kernel", "name": "sparse_mqa", "dur": 10.0},
        {"cat": "cpu_op", "name": "sparse_mqa", "dur": 99.0},
    ]
    found = report.kernel_shares(events, serving.ATTENTION_KERNELS)
    assert (found["total_us"], found["attention_us"]) == (100.0, 40.0) and next(iter(found["kernels_us"])) == "gemm"
    log = "Decode batch, #running-req: {}, #token: 1, cuda graph: {}, gen throughput (token/s): {}, x\n"
    text = log.format(8, "True", 1000.0) + log.format(8, "True", 2000.0) + log.format(8, "False", 10.0) + "other\n"
    assert report.decode_step_ms(text) == {"8": pytest.approx(6.0)}
    speculative = "Decode batch, #running-req: 2, #token: 1, accept len: 4.00, accept rate: 0.5, cuda graph: True, "
    assert report.decode_step_ms(f"{speculative}gen throughput (token/s): 400.0") == {"2": pytest.approx(20.0)}


def test_retractions_count_once_for_all_ranks_of_a_scheduler():
    line = "[2026-12-01 13:12:33{}] KV cache pool is full. Retract requests. #retracted_reqs: 26"
    for ranks, times in (
        ([""], 1),
        ([" TP0", " TP1", " TP0", " TP1"], 2),
        ([" DP0 TP0", " DP0 TP1", " DP1 TP2", " DP1 TP3"], 2),
        ([], 0),
    ):
        assert report.num_retractions("\n".join(map(line.format, ranks)) + "\nother TP9 line\n") == times


def test_what_is_asked_of_one_server_does_not_reach_both(monkeypatch, tmp_path):
    """A check that is left over in the environment would be timed with the kernel."""
    seen = {}
    monkeypatch.setenv("HEADFIT_CHECK", "1")
    monkeypatch.setattr(
        serving_server,
        "started",
        lambda command, environment, **rest: seen.__setitem__(environment["HEADFIT_BACKEND"], environment),
    )
    args = serving.parse(
        ["--out", "x", "--env", "plugin:HEADFIT_CHECK=1", "--profile-dir", str(tmp_path), "--", "python", "{port}"]
    )
    for arm in serving.ARMS:
        serving._server(args, arm, 1, tmp_path / "log", None)
    assert "HEADFIT_CHECK" not in seen["off"] and seen["auto"]["HEADFIT_CHECK"] == "1"


def test_where_a_result_comes_from(tmp_path, monkeypatch):
    import measured_on

    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'NVIDIA H200'\necho 'NVIDIA H200'\n")
    fake.chmod(0o755)
    assert measured_on.package_version("no-such-package") is None
    assert measured_on.package_version("torch").startswith("2.")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measured_on.gpu_name() == "NVIDIA H200" and measured_on.git_commit() is None  # no git on this path
    fake.write_text("#!/bin/sh\nexit 9\n")
    assert measured_on.gpu_name() is None
