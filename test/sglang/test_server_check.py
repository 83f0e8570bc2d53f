"""`test/gpu/sglang_server_check.py` without a GPU: what it asks, starts and concludes, against servers of our own."""

import contextlib
import json
import os
import random
import shutil
import sys
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


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*arguments, fault="") -> (exit code, result), with `python -m sglang.launch_server` a fake."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copy(HERE / "fake_launch_server.py", package / "launch_server.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    port = 20_000 + random.Random(os.urandom(8)).randrange(10_000)

    def start(*arguments, fault=""):
        monkeypatch.setenv("FAKE_FAULT", fault)
        out = tmp_path / "result.json"
        common = ["--out", str(out), "--port", str(port), "--steps", "4", "--start-timeout", "60"]
        code = check.main([*common, *arguments])
        return code, json.loads(out.read_text())

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
    code, result = run("--arms", *ALL, "--restart", "--", "--more", "flags")
    assert code == 0 and not failing(result), result["checks"]
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
    assert "HEADFIT_LONE_RANK" not in check.environment(check.parse(["--out", "x"]), "stock", tmp_path, tmp_path)
    args = check.parse(["--out", "x", *rank])
    assert check.environment(args, "stock", tmp_path, tmp_path)["HEADFIT_LONE_RANK"] == "3/8"


@pytest.mark.parametrize(
    "fault, names",
    [
        ("fresh stock", ["logprobs: stock after disk", "logprobs: stock after tensor"]),
        ("stale plugin", ["logprobs: plugin after disk", "logprobs: plugin after tensor"]),
        ("left a call", ["plugin: worker 0, calls left to the server's kernel"]),
        ("no update", ["plugin: no error", "stock: no error"]),
        ("unforced", ["plugin: no error", "stock: no error"]),
    ],
)
def test_a_fault_is_named(run, fault, names):
    code, result = run("--arms", "stock", "padded", "plugin", "--side-by-side", "2", fault=fault)
    assert code == 1 and set(names) <= set(failing(result)), failing(result)


def test_a_server_that_ended_shows_its_log(run):
    _, result = run("--arms", "plugin", fault="no start")
    assert "planted end" in result["arms"]["plugin"]["errors"][0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--num-heads", "15"], "--num-heads: 15"),
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
    assert made["eager"]["HEADFIT_CHECK"] == "1" and "HEADFIT_CHECK" not in made["plugin"]
    assert json.loads(made["padded"]["HEADFIT_SERVER_CHECK"])["pad_to"] == 128
    assert check.command(args, "dp", tmp_path, 1)[-5:] == ["--enable-dp-attention", "--dp-size", "4", "--one", "--two"]
    assert "--disable-cuda-graph" in check.command(args, "eager", tmp_path, 1)


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


def test_with_one_rank_stock_sees_an_update():
    """There its copy of the sinks is the parameter itself."""
    means = {"padding": 0.1, "stock after tensor": 1.0}
    assert [verdict._logprobs(means, size)[0]["holds"] for size in (1, 2)] == [True, False]
