"""Runs in process, on the packaged checkpoint with its own held-out problems in GSM8K's form.

benchmark/eval_tiny.py has the arms; here they are small. Without shots, because a shot's tokens cost as much as an
answer's.
"""

import importlib
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch

from headfit import cli
from headfit.assets.word_problems import held_out_problems
from headfit.evals.store import read_run

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))
bench = importlib.import_module("eval_tiny")
tiny_accuracy = importlib.import_module("tiny_accuracy")

PROBLEMS = 50
LONGEST = ("--max-tokens", 56)  # a right answer has at most 50 tokens
ARMS = {
    "exact": bench.Arm(bench.options()),
    "padded": bench.Arm(bench.options(), {"pad_heads_to": (24,)}),  # of 16 heads; to 64 on a GPU
    "packed": bench.Arm(bench.options("fp8")),
    "tp2": bench.Arm(bench.options(), attn_tp=2),
    "fault": bench.Arm(bench.options(), {"alter": partial(bench.sinks_of_rank_0, attn_tp=8)}),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run an arm once; its file."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name):
        file = folder / f"{name}.jsonl"
        if not file.exists():
            bench.run_arm(ARMS[name], file, problems=PROBLEMS, shots=0, device="cpu", batch=PROBLEMS, more=LONGEST)
        return file

    return run


@pytest.mark.parametrize("name", ["padded", "packed", "tp2"])
def test_arms_agree_with_exact_heads(run, name):
    found = bench.compare(run("exact"), run(name))
    marked = found.differences["marked"]
    assert (marked.losses, marked.gains, marked.p) == (0, 0, 1.0)
    assert found.scores[0].accuracy("marked") == 1 and found.scores[1].num_answers == PROBLEMS
    assert found.verdict == "no drop shown" and 0.07 < -marked.interval[0] < 0.08 and marked.detectable_drop < 0.16


def test_a_planted_fault_is_seen(run):
    found = bench.compare(run("exact"), run("fault"))
    assert found.verdict == "drop" and found.differences["marked"].p < bench.FAULT_P
    assert found.arms[1]["altered"] == "sinks_of_rank_0"


def test_an_arm_that_fails_leaves_the_others(run, tmp_path):
    def fails():
        raise RuntimeError("no memory")

    (tmp_path / "exact-heads.jsonl").write_bytes(run("exact").read_bytes())
    (tmp_path / "packed-fp8-KV.jsonl").write_bytes(run("packed").read_bytes())
    with bench.workers(1) as submit:
        score = submit(lambda: (bench.compare(run("exact"), run("packed")).scores[1].summary(), 1.5))
        runs = {"padded to 64 heads": submit(fails), "packed fp8 KV": score, "attention TP 4": "needs 4 GPUs, found 1"}
        rows = list(bench.rows_of(runs, tmp_path))
    assert rows[0] == {"arm": "padded to 64 heads", "failed": "RuntimeError: no memory"}
    assert rows[1]["seconds"] == 1.5 and rows[1]["verdict"] == "no drop shown" and "failed" not in rows[1]
    assert rows[2] == {"arm": "attention TP 4", "not_run": "needs 4 GPUs, found 1"}


def test_arms_run_in_processes_of_their_own():
    with bench.workers(2) as submit:
        runs = [submit(os.getpid) for _ in range(4)]
        assert os.getpid() not in {run.result() for run in runs}


def sampled(folder, out, *more, seed=5, limit=5):
    data = bench.write_problems(folder / "problems.jsonl", held_out_problems(limit))
    argv = ["eval", "gsm8k", "--local", "tiny", "--data", data, "--num-shots", 0, "--out", folder / out, "--seed", seed]
    argv += ["--temperature", 3.0, "--max-tokens", 12, "--max-batch", 3, "--device", "cpu", "--json", *more]
    return [str(each) for each in argv]


def texts(file):
    return {key: row["text"] for key, row in read_run(file).answers.items()}


def test_an_interrupted_run_gives_the_answers_of_one_that_was_not(capfd, tmp_path):
    assert cli.main(sampled(tmp_path, "whole.jsonl", "--repeats", 2)) == cli.OK
    whole = tmp_path / "whole.jsonl"
    lines = whole.read_bytes().splitlines(keepends=True)
    assert len(lines) == 11
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[:6]) + lines[6][:20])  # within the second batch of three, and a torn line
    assert cli.main(sampled(tmp_path, "cut.jsonl", "--repeats", 2)) == cli.OK
    assert cut.read_bytes() == whole.read_bytes()
    score = json.loads(capfd.readouterr().out.splitlines()[-1])["score"]
    assert score["answers"] == 10 and score["length_stops"] > 0
    assert texts(whole)[0, 0] != texts(whole)[0, 1]


def test_each_repeat_draws_for_itself_in_every_batch(capfd, tmp_path):
    assert cli.main(sampled(tmp_path, "run.jsonl", "--repeats", 7, limit=1)) == cli.OK  # batches of 3, 3 and 1
    assert len(set(texts(tmp_path / "run.jsonl").values())) == 7


def test_seeds_draw_differently(capfd, tmp_path):
    for seed in (0, 1):
        assert cli.main(sampled(tmp_path, f"seed{seed}.jsonl", seed=seed, limit=2)) == cli.OK
    assert not set(texts(tmp_path / "seed0.jsonl").values()) & set(texts(tmp_path / "seed1.jsonl").values())


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (("--attn-tp", 3), "16"),
        (("--local", "/none"), "/none: no such file or folder"),
        (("--model", "tiny"), "--model, --thinking: go with --base-url only"),
        (("--backend", "unknown"), "backend: 'unknown', allowed"),
        (("--max-tokens", 10**6), "do not fit the cache"),
        (("--temperature", 1e-4), "temperature: 0.0001, allowed: 0 (greedy), 0.001 or more"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(capfd, tmp_path, more, part):
    assert cli.main(sampled(tmp_path, "run.jsonl", *more)) == cli.BAD_INPUT
    err = capfd.readouterr().err
    assert part in err and err.count("\n") == 1 and not (tmp_path / "run.jsonl").exists()


@pytest.mark.parametrize("program", [bench, tiny_accuracy], ids=lambda program: program.__name__)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cuda"), "--device: cuda, allowed where torch sees no GPU: cpu"),
        (("--device", "foo"), "argument --device: invalid choice: 'foo' (choose from 'cpu', 'cuda')"),
        (("--problems", "0"), "--problems: 0, allowed: at least 1"),
        (("--problems", "-1"), "--problems: -1, allowed: at least 1"),
    ],
)
def test_a_benchmark_that_cannot_run_says_so_in_one_line(capsys, monkeypatch, tmp_path, program, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [f"{program.__name__}.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        program.main()
    said = capsys.readouterr().err.splitlines()[-1]
    # argparse quotes the choices in some Python versions only
    assert ended.value.code == 2 and said.replace("from cpu, cuda", "from 'cpu', 'cuda'").endswith(
        f": error: {message}"
    )
    assert not list(tmp_path.iterdir())
