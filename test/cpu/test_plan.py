"""`headfit plan`, and how little it takes to start the command line."""

import subprocess
import sys

import pytest
from test_cli import assert_refused, run_json

from headfit import cli
from headfit.backends import KERNELS
from headfit.testing.models import hf_config


@pytest.mark.parametrize(
    ("preset", "num_heads", "o_groups", "flashmla"),
    [
        ("flash", 64, 8, {1: (64, 0), 2: (64, 0.5), 4: (64, 0.75), 8: (64, 0.875)}),
        ("pro", 128, 16, {1: (128, 0), 2: (64, 0), 4: (64, 0.5), 8: (64, 0.75), 16: (64, 0.875)}),
    ],
)
def test_plans_of_the_released_models(capfd, preset, num_heads, o_groups, flashmla):
    plan = run_json(capfd, "plan", "--preset", preset)
    assert (plan["num_heads"], plan["o_groups"]) == (num_heads, o_groups)
    assert plan["allowed_attn_tp_sizes"] == list(flashmla)
    assert [kernel["name"] for kernel in plan["kernels"]] == [kernel.name for kernel in KERNELS]
    for entry in plan["plans"]:
        local = num_heads // entry["attn_tp_size"]
        assert entry["num_local_heads"] == local
        cells = {cell["name"]: (cell["kernel_num_heads"], cell["waste"]) for cell in entry["kernels"]}
        assert cells["reference"] == (local, 0)
        assert cells["flashmla"] == flashmla[entry["attn_tp_size"]]
    assert run_json(capfd, "plan", "--num-heads", num_heads, "--o-groups", o_groups) == plan
    assert len(run_json(capfd, "plan", "--preset", preset, "--attn-tp", 4)["plans"]) == 1


def test_a_plan_is_a_table(capfd, tmp_path):
    assert cli.main(["plan", "--preset", "pro"]) == cli.OK
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("128 query heads, 16 output groups")
    exact = ["16", "heads,", "0%"]
    assert lines[-2].split() == ["8", "16", *exact, "64", "heads,", "75%", *exact, *exact]
    assert cli.main(["plan", "--num-heads", "256"]) == cli.OK
    assert "too many heads" in capfd.readouterr().out
    hf_config((0, 4, 128)).save_pretrained(tmp_path)
    assert run_json(capfd, "plan", "--model", tmp_path)["allowed_attn_tp_sizes"] == [1, 2, 4, 8]


def test_a_plan_that_does_not_divide_is_refused(capfd):
    argv = ["plan", "--num-heads", 64, "--o-groups", 8, "--attn-tp", 6]
    assert_refused(capfd, cli.BAD_INPUT, ["64", "8", " 6 ", "1, 2, 4, 8"], *argv)
    assert_refused(
        capfd, cli.BAD_INPUT, ["128", "16", " 32 ", "1, 2, 4, 8, 16"], "plan", "--preset", "pro", "--attn-tp", 32
    )
    assert_refused(capfd, cli.BAD_INPUT, ["--o-groups"], "plan", "--preset", "pro", "--o-groups", 8)


def test_help_and_plan_start_without_heavy_imports():
    code = "import sys; from headfit.cli import main\ntry: main({argv})\nfinally: assert not {heavy} & set(sys.modules)"
    for argv, heavy in ((["--help"], {"torch", "transformers"}), (["plan", "--preset", "pro"], {"transformers"})):
        done = subprocess.run(
            [sys.executable, "-c", code.format(argv=argv, heavy=heavy)], capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stderr == "", done.stderr
        assert ("exit codes: 0 ok" in done.stdout) == ("--help" in argv)
