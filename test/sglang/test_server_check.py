"""`test/gpu/sglang_server_check.py` without a GPU: what it asks, starts and concludes, against servers of our own."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "gpu"))

import sglang_server_check as check  # noqa: E402
import sglang_server_model as model  # noqa: E402
import sglang_server_plugin as plugin  # noqa: E402
import sglang_server_verdict as verdict  # noqa: E402

ALL = list(check.ARMS)
RESULTS = sorted((HERE.parents[1] / "benchmark" / "results").glob("sglang_server_check-*.json"))


@pytest.fixture
def command_line(tmp_path, monkeypatch):
    """Arguments of a run with `python -m sglang.launch_server` a fake, whose result goes to `result.json`."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copy(HERE / "fake_launch_server.py", package / "launch_server.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setattr(check, "obstacle", lambda: "")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    port = 20_000 + random.Random(os.urandom(8)).randrange(10_000)
    return ["--out", str(tmp_path / "result.json"), "--port", str(port), "--steps", "4", "--start-timeout", "60"]


@pytest.fixture
def run(command_line, tmp_path, monkeypatch):
    """run(*arguments, fault="") -> (exit code, result)"""

    def start(*arguments, fault=""):
        monkeypatch.setenv("FAKE_FAULT", fault)
        code = check.main([*command_line, *arguments])
        assert not list((tmp_path / "temporary").iterdir())
        return code, json.loads((tmp_path / "result.json").read_text())

    return start


@contextlib.contextmanager
def set_default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def failing(result):
    return [one["name"] for one in result["checks"] if not one["holds"]]


def test_all_arms_of_a_server_without_fault(run, capsys):
    code, result = run("--arms", *ALL, "--num-heads", "64", "--restart", "--", "--more", "flags")
    assert code == 0 and not failing(result) and result["complete"], result["checks"]
    assert set(result["arms"]) == set(ALL) and all("ready_s" in arm for arm in result["arms"].values())
    assert result["arms"]["bare"]["restarted"] and result["arms"]["bare"]["after_kill"]["ended"]
    assert set(result["differences"]) == {name for name, _, _ in verdict.PAIRS}
    names = [one["name"] for one in result["checks"]]
    for wanted in (
        "fault / stock",
        "logprobs: stock after tensor",
        "eager after disk",
        "bare: starts again",
        "dp: worker 1",
        "attention of dp_eager: largest",
        "logprobs: dp, the worst sequence",
        "bare: the other workers end with it",
        "padded: worker 1, decode calls of no layer",
    ):
        assert any(wanted in name for name in names), (wanted, names)
    printed = capsys.readouterr().out
    assert "FAILS" not in printed and "1.059" in printed and json.loads(printed.splitlines()[-1])["tp_size"] == 2


def test_a_lone_rank_is_one_worker_that_copies_its_sinks(run, tmp_path, monkeypatch):
    rank = ["--tp-size", "1", "--num-heads", "128", "--lone-rank", "3/8"]
    code, result = run("--arms", "stock", "padded", "plugin", *rank)
    assert code == 0 and not failing(result), result["checks"]
    assert (result["tp_size"], result["attn_tp_size"], result["num_local_heads"]) == (1, 8, 16)
    for fault in ("whole layers", "rank 0"):  # seen in stock arms, too
        assert failing(run("--arms", "stock", *rank, fault=fault)[1]) == [
            "stock: [rank, size, heads] of each worker's attention layers"
        ]
    monkeypatch.setenv("HEADFIT_LONE_RANK", "0/2")
    monkeypatch.setenv("HEADFIT_CHECK", "1")
    assert "HEADFIT_CHECK" not in check.environment(check.parse(["--out", "x"]), "fault", tmp_path, tmp_path)
    assert "HEADFIT_LONE_RANK" not in check.environment(check.parse(["--out", "x"]), "stock", tmp_path, tmp_path)
    args = check.parse(["--out", "x", *rank])
    assert check.environment(args, "stock", tmp_path, tmp_path)["HEADFIT_LONE_RANK"] == "3/8"


@pytest.mark.parametrize(
    "fault, names",
    [
        ("fresh stock", ["logprobs: stock after disk", "logprobs: stock after tensor"]),
        ("stale plugin", ["logprobs: plugin after disk", "logprobs: plugin after tensor"]),
        ("left a call", ["plugin: worker 0, calls left to the server's kernel"]),
        ("outside", [f"{arm}: worker 1, decode calls of no layer" for arm in ("stock", "plugin")]),
        ("no update", ["plugin: no error", "stock: no error"]),
        ("unforced", ["plugin: no error", "stock: no error"]),
    ],
)
def test_a_fault_is_named(run, fault, names):
    code, result = run("--arms", "stock", "padded", "plugin", "--side-by-side", "2", fault=fault)
    assert code == 1 and set(names) <= set(failing(result)), failing(result)


def test_one_wrong_sequence_of_a_small_batch_is_seen(run):
    code, result = run("--arms", "stock", "padded", "plugin", fault="graph of 1")
    assert code == 1 and failing(result) == ["logprobs: plugin, the worst sequence"]


def test_dp_attention_is_compared_with_its_own_layout(run):
    code, result = run("--arms", "stock", "padded", "dp", "dp_eager", "--num-heads", "64", fault="dp graphs")
    assert code == 1 and failing(result) == ["logprobs: dp", "logprobs: dp, the worst sequence"]


@pytest.mark.parametrize(
    "fault, names",
    [
        ("unchecked layer", ["decode calls of each worker's layer"]),
        ("no error of stock", ["largest ours / stock", "smallest fault / stock"]),
        ("no number", ["largest ours / stock", "smallest fault / stock"]),
        ("quiet check", ["calls with a neighbour's sinks"]),
    ],
)
def test_checked_calls_are_whole(run, fault, names):
    code, result = run("--arms", "eager", fault=fault)
    found = failing(result)
    assert code == 1 and len(found) == len(names), found
    assert all(one.startswith(f"attention of eager: {name}") for one, name in zip(found, names, strict=True)), found


def test_a_worker_that_outlives_its_server_is_named(run, monkeypatch):
    monkeypatch.setattr(check, "END_S", 2.0)
    code, result = run("--arms", "bare", fault="left worker")
    assert code == 1 and failing(result) == ["bare: the other workers end with it"]
    (left,) = result["arms"]["bare"]["after_kill"]["left"]
    assert not check.runs(left)  # after the run


@pytest.mark.parametrize("fault, sent", [("slow start", signal.SIGTERM), ("slow answer", signal.SIGHUP)])
def test_an_interrupted_run_ends_its_servers(command_line, tmp_path, fault, sent):
    start = "import sys, sglang_server_check as check; check.obstacle = lambda: ''; sys.exit(check.main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", start, *command_line, "--arms", "stock", "plugin"],
        env=os.environ
        | {"FAKE_FAULT": fault, "TMPDIR": str(tmp_path / "temporary")}
        | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(HERE.parent / "gpu")])},
        stdout=subprocess.PIPE,
        text=True,
    )
    logs = [tmp_path / f"result-{arm}.log" for arm in ("stock", "plugin")]
    said = "still starting" if fault == "slow start" else "INFO headfit"
    deadline = time.monotonic() + 60
    while not all(log.exists() and said in log.read_text() for log in logs) and time.monotonic() < deadline:
        time.sleep(0.1)
    servers = children(process.pid)
    assert len(servers) == 2 and all(len(children(server)) == 2 for server in servers)
    everyone = servers + [worker for server in servers for worker in children(server)]
    try:
        process.send_signal(sent)
        process.send_signal(signal.SIGTERM)  # a second one changes nothing
        assert process.wait(40) == 1
        left = [pid for pid in everyone if check.runs(pid)]
    finally:
        for pid in filter(check.runs, [process.pid, *everyone]):
            os.kill(pid, signal.SIGKILL)
    assert not left and not list((tmp_path / "temporary").iterdir())
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["complete"] is False and "the run was not interrupted" in failing(result)
    assert result["interrupted"] in (sent.name, "SIGTERM")


def children(parent):
    """Its own, by their process ids."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def test_nothing_is_started_where_no_server_can_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check.torch.cuda, "is_available", lambda: False)
    for found, reason in (
        (None, "finds no sglang"),
        (SimpleNamespace(origin=None), "finds no sglang"),
        (sys, "no GPU"),
    ):
        spec = found if found is not sys else SimpleNamespace(origin="sglang/__init__.py")
        monkeypatch.setattr(check, "find_spec", lambda name, spec=spec: spec)
        assert check.main(["--out", str(tmp_path / "result.json")]) == 2
        said = capsys.readouterr().err
        assert reason in said and said.count("\n") == 1 and not list(tmp_path.iterdir())
    monkeypatch.setattr(check.torch.cuda, "is_available", lambda: True)
    assert check.obstacle() == ""


def test_a_server_that_ended_shows_its_log(run):
    _, result = run("--arms", "plugin", fault="no start")
    assert "planted end" in result["arms"]["plugin"]["errors"][0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--num-heads", "15"], "--num-heads: 15"),
        (["--num-heads", "12"], "--num-heads: 12, allowed: multiples of the model's 8 output groups"),
        (["--out", "missing/x"], "--out: missing/x, allowed: a file in a folder that exists"),
        (["--backend", "off"], "--backend: invalid choice: 'off' (choose from"),
        (["--arms", "dp_eager"], "--num-heads: 16, allowed with --arms dp_eager: 64, 128"),
        (["--tp-size", "1", "--arms", "eager"], "--num-heads: 16, allowed with --tp-size 1: 64, 128"),
        (["--tp-size", "1", "--num-heads", "64", "--arms", "dp_eager"], "--arms dp_eager needs"),
        (["--tp-size", "1"], "--num-heads: 16, allowed with --tp-size 1: 64, 128"),
        (["--tp-size", "1", "--num-heads", "64", "--arms", "dp"], "--arms dp needs"),
        (["--lone-rank", "0/2"], "--lone-rank: 0/2, allowed only with --tp-size 1, not 2"),
        (["--tp-size", "1", "--lone-rank", "2/2"], "--lone-rank: '2/2', allowed: R/N"),
        (["--tp-size", "1", "--lone-rank", "0/3"], "--num-heads: 16, allowed: multiples of the attention TP, 3"),
        (["--tp-size", "1", "--lone-rank", ""], "--lone-rank: '', allowed: R/N"),
        (["--tp-size", "1", "--num-heads", "128", "--lone-rank", "3/16"], "attention TP: 16, allowed: divisors of the"),
        (["--tp-size", "2", "--num-heads", "512"], "--num-heads: 256 a rank, allowed: at most 128"),
        (["--tp-size", "1", "--num-heads", "64", "--one-gpu"], "--one-gpu needs --tp-size 2 or more"),
        (["--steps", "0"], "--steps: 0"),
        (["--prompt-sets", "0"], "--prompt-sets: 0"),
        (["--arms", "other"], "invalid choice"),
        *(
            (["--memory-fraction", text], f"error: --memory-fraction: {text}, allowed: above 0 and below 1\n")
            for text in ("0.0", "1.0", "60.0", "nan", "inf")
        ),
        *(
            (["--start-timeout", text], f"error: --start-timeout: {text}, allowed: a finite number above 0\n")
            for text in ("0.0", "nan", "inf")
        ),
        (["--memory-fraction=-0.5"], "error: --memory-fraction: -0.5, allowed: above 0 and below 1\n"),
        (["--start-timeout=-1"], "error: --start-timeout: -1.0, allowed: a finite number above 0\n"),
    ],
)
def test_what_cannot_run_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        check.parse(["--out", "x", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_arms_differ_in_flags_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "before")
    args = check.parse(["--out", "x", "--tp-size", "4", "--backend", "sparse_mqa_cuda", "--", "--one", "--two"])
    made = {arm: check.environment(args, arm, tmp_path, tmp_path / arm) for arm in ALL}
    backends = {arm: environment["HEADFIT_BACKEND"] for arm, environment in made.items()}
    assert {arm for arm, backend in backends.items() if backend == "off"} == {"stock", "padded"}
    assert set(backends.values()) == {"off", "sparse_mqa_cuda"} and made["stock"]["PYTHONPATH"].endswith(":before")
    assert made["bare"]["TRITON_CACHE_DIR"] == str(tmp_path / "bare" / "missing" / "triton")
    assert {arm for arm in ALL if "HEADFIT_CHECK" in made[arm]} == {"eager", "dp_eager"} == set(verdict.EAGER)
    assert {json.loads(made[arm]["HEADFIT_SERVER_CHECK"])["check_every"] for arm in verdict.EAGER} == {8}
    assert not {"dp", "dp_eager"} & set(args.arms)
    assert json.loads(made["padded"]["HEADFIT_SERVER_CHECK"])["pad_to"] == 128
    assert check.command(args, "dp", tmp_path, 1)[-5:] == ["--enable-dp-attention", "--dp-size", "4", "--one", "--two"]
    flags = {arm: set(check.command(args, arm, tmp_path, 1)) for arm in ALL}
    assert {arm for arm in ALL if "--disable-cuda-graph" in flags[arm]} == {"eager", "dp_eager"}
    assert flags["dp_eager"] - flags["dp"] == {"--disable-cuda-graph"}


def test_ranks_that_trade_sinks_change_the_sum(monkeypatch):
    """The last matrix is each rank's own; everything else is the same on all ranks."""
    monkeypatch.setattr(plugin, "read_server", lambda: SimpleNamespace(rank_attribute="attn_tp_rank"))

    def network(rank):
        attention = torch.nn.Module()
        attention.attn_tp_rank = rank
        attention.wq_b, attention.wo_b = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
        attention.norm = torch.nn.LayerNorm(8, bias=False)
        plugin.make_weights(whole := torch.nn.Sequential(attention))
        return whole.state_dict()

    ranks = [network(rank) for rank in (0, 1, 1)]
    assert all(torch.equal(ranks[1][name], ranks[2][name]) for name in ranks[1])
    assert [name for name in ranks[0] if not torch.equal(ranks[0][name], ranks[1][name])] == ["0.wo_b.weight"]
    assert torch.equal(ranks[0]["0.norm.weight"], torch.ones(8)) and ranks[0]["0.wq_b.weight"].std() > 0.2


def test_ranks_on_one_gpu(tmp_path, monkeypatch):
    """Rank r looks at place r * step of CUDA_VISIBLE_DEVICES; CUDA stops at the first -1."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    args = check.parse(["--out", "x", "--tp-size", "2", "--one-gpu"])
    made = check.environment(args, "plugin", tmp_path, tmp_path)
    places = made["CUDA_VISIBLE_DEVICES"].split(",")
    assert [places[rank * check.ONE_GPU_STEP] for rank in range(2)] == ["5", "5"] and places[1] == "-1"
    assert made["SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS"] == "1"
    assert json.loads(made["HEADFIT_SERVER_CHECK"])["own_host"]
    command = check.command(args, "plugin", tmp_path, 1)
    assert command[command.index("--gpu-id-step") + 1] == str(check.ONE_GPU_STEP)
    args = check.parse(["--out", "x"])
    assert "--gpu-id-step" not in check.command(args, "plugin", tmp_path, 1)
    assert not json.loads(check.environment(args, "plugin", tmp_path, tmp_path)["HEADFIT_SERVER_CHECK"])["own_host"]


def test_inputs_are_the_same_everywhere(tmp_path):
    assert [len(prompt) for prompt in model.prompts()] == list(model.PROMPT_TOKENS)
    assert (
        model.prompts() == model.prompts() != model.prompts(1) and len(set(model.watched_tokens())) == model.NUM_WATCHED
    )
    assert [len(model.prompts(number)) for number in range(5)] == [8, 3, 1, 8, 3]
    assert {len(prompt) for number in (1, 2) for prompt in model.prompts(number)} <= set(model.PROMPT_TOKENS)
    assert torch.equal(model.forced_tokens(), model.forced_tokens())
    assert not torch.equal(model.sink_values(1, 16, 0), model.sink_values(1, 16, 1))
    with set_default_dtype(torch.bfloat16):  # as while a server makes its weights
        in_server = model.sink_values(1, 128, 0)
    assert in_server.dtype == torch.float32 and torch.equal(in_server, model.sink_values(1, 128, 0))
    model.write_model(tmp_path, 16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_attention_heads"] == 16 and len(config["compress_ratios"]) == config["num_hidden_layers"]
    with pytest.raises(ValueError, match="num_heads: 12, allowed: multiples of 8"):
        model.write_model(tmp_path, 12)


def test_difference_by_hand():
    found = {"plugin": torch.tensor([[[1.0, 2.0]]]), "stock": torch.tensor([[[1.5, 2.0]]])}
    by_hand = {"mean": 0.25, "p99": pytest.approx(0.495), "max": 0.5, "sequences": [0.25]}
    assert verdict.differences(found) == {"plugin": by_hand}
    found["stock"] = torch.tensor([[[1.5, 2.0]], [[7.0, 7.0]]])  # one more sequence, which only it ran
    assert verdict.differences(found) == {"plugin": by_hand}


def differences(**changed):
    """Of a run in which every pair that is held against padding is as padding is; with others' sequences."""
    sequences = {name: [0.02, 0.04] for name in ("padding", *verdict.SAME)} | changed
    return {name: {"mean": sum(some) / len(some), "sequences": some} for name, some in sequences.items()}


def test_what_an_update_does_to_stock():
    """With one rank its copy of the sinks is the parameter itself; other versions of SGLang have another copy."""
    found = differences(**{name: [1.0, 1.0] for name in verdict.STOCK})
    for size, shape, wrong in ((1, "cached", []), (2, "cached", list(verdict.STOCK)), (2, "method", []), (2, None, [])):
        checks = verdict._logprobs(found, attn_tp_size=size, shape=shape)
        assert [one["name"] for one in checks if not one["holds"]] == [f"logprobs: {name}" for name in wrong]
        assert any("stock" in one["name"] for one in checks) == (shape == "cached")


def test_without_padding_there_is_nothing_to_hold_others_against():
    found = differences(fault=[1.0])
    assert all(one["holds"] for one in verdict._logprobs(found, attn_tp_size=2, shape=None))
    del found["padding"]
    (missing,) = verdict._logprobs(found, attn_tp_size=2, shape=None)
    assert not missing["holds"] and "stock and padded" in missing["name"] and "eager after disk" in missing["limit"]
    assert verdict._logprobs({"stock twice": found["plugin"]}, attn_tp_size=2, shape=None) == []


@pytest.mark.parametrize("wrong", [0.2, float("nan")])
@pytest.mark.parametrize("name", verdict.SAME)
def test_the_worst_sequence_is_held(name, wrong):
    found = differences(padding=[0.02] * 31 + [0.04], **{name: [0.02] * 31 + [wrong]})
    found[name]["mean"] = 0.02
    failed = [one["name"] for one in verdict._logprobs(found, attn_tp_size=2, shape=None) if not one["holds"]]
    assert failed == [f"logprobs: {name}, the worst sequence"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_measured_sequences_hold_and_a_single_one_of_the_fault_would_not(path):
    result = json.loads(path.read_text())
    size, found = result["attn_tp_size"], result["differences"]
    assert all(one["holds"] for one in verdict._logprobs(found, attn_tp_size=size, shape="cached"))
    for sequence in found["fault"]["sequences"]:
        found["plugin"]["sequences"][0] = sequence
        failed = [
            one["name"] for one in verdict._logprobs(found, attn_tp_size=size, shape="cached") if not one["holds"]
        ]
        assert failed == ["logprobs: plugin, the worst sequence"]


def test_errors_that_are_no_numbers_are_shown():
    row = {"worker": 0, "layer": 0, "compress_ratio": None, "ours": float("nan"), "stock": 0.0, "fault": 1.0}
    assert verdict._layers("eager", [row])[1].split()[-1] == "nan" and verdict._layers("eager", []) == []


def test_every_row_of_a_batch_has_its_turn():
    for tokens in (1, 2, 3, 4, 5, 8, 16, 30):
        turns = [plugin.checked_rows(tokens, turn) for turn in range(tokens)]
        assert all(len(set(rows)) == len(rows) == min(tokens, plugin.MAX_CHECKED_ROWS) for rows in turns)
        assert {row for rows in turns for row in rows} == set(range(tokens))
    assert plugin.checked_rows(8, 0) == [0, 2, 4, 6] and plugin.checked_rows(8, 1) == [1, 3, 5, 7]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["{folder}", "12"], "num_heads: 12, allowed: multiples of 8"),
        (["{folder}", "16", "--num-layers", "0"], "num_layers: 0, allowed: multiples of 6"),
        (["{folder}", "16", "--num-layers", "8"], "num_layers: 8, allowed: multiples of 6"),
        (["{folder}", "many"], "many"),
        (["{folder}"], "HEADS"),
        (["{folder}/file", "16"], "file"),
    ],
)
def test_the_models_command_line(tmp_path, capsys, arguments, said):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        model.main([argument.format(folder=tmp_path) for argument in arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and error.count("\n") == 1
    with pytest.raises(SystemExit) as ended:
        model.main(["--help"])
    assert ended.value.code == 0 and "FOLDER" in capsys.readouterr().out
    for more, turns in (([], 1), (["--num-layers", "18"], 3)):
        model.main([str(tmp_path), "16", *more])
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["num_attention_heads"] == 16 and config["num_hidden_layers"] == 6 * turns
        assert config["compress_ratios"] == [0, 4, 128, 4, 128, 0] * turns
