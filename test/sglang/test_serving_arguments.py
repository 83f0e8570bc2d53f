"""What the serving benchmark refuses before it starts a server; nothing is started here."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import serving

FINITE = "allowed: a finite number above 0"
SERVER = ["--", "python", "--port", "{port}"]
LONE = ["--lone-rank", "3/8", *SERVER]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--", "python", "-m", "x y"],
            "server: \"python -m 'x y'\", allowed: a command with {port} where the port goes",
        ),
        (["--", "run", "port"], "server: 'run port', allowed: a command with {port} where the port goes"),
        (["--num-heads", "100", *LONE], "--num-heads: 100, allowed with --lone-rank 3/8: multiples of 8"),
        ([*LONE, "--tp-size", "2"], "the server command's --tp-size: '2', allowed with --lone-rank 3/8: 1"),
        ([*LONE, "--tp-size=2"], "the server command's --tp-size: '2', allowed with --lone-rank 3/8: 1"),
        ([*LONE, "--tp", "8"], "the server command's --tp: '8', allowed with --lone-rank 3/8: 1"),
        ([*LONE, "--tp=8"], "the server command's --tp: '8', allowed with --lone-rank 3/8: 1"),
        (
            [*LONE, "--tensor-parallel-size", "4"],
            "the server command's --tensor-parallel-size: '4', allowed with --lone-rank 3/8: 1",
        ),
        (
            [*LONE, "--tp", "1", "--tensor-parallel-size=4"],
            "the server command's --tensor-parallel-size: '4', allowed with --lone-rank 3/8: 1",
        ),
        ([*LONE, "--tp"], "the server command's --tp: '', allowed with --lone-rank 3/8: 1"),
        *(
            ([option, value, *SERVER], f"argument {option}: {value!r}, {FINITE}")
            for option in ("--stop-after", "--start-timeout")
            for value in ("0", "nan", "inf", "soon")
        ),
        (["--start-timeout=-1", *SERVER], f"argument --start-timeout: '-1', {FINITE}"),
        (["--stop-after=-inf", *SERVER], f"argument --stop-after: '-inf', {FINITE}"),
    ],
)
def test_what_no_server_can_do_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        serving.parse(["--out", "x", *arguments])
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and said.partition(": error: ")[2] == message


@pytest.mark.parametrize(
    "arguments",
    [
        ["--", "sh", "-c", "serve --port={port}"],
        [*SERVER, "--tp-size", "2"],  # without a lone rank any TP goes
        ["--num-heads", "64", *LONE],
        [*LONE, "--tp-size", "1"],
        [*LONE, "--tp=1", "--dp-size", "2"],
        [*LONE, "--tp", "2", "--tp-size=1"],
        ["--stop-after", "1e-6", "--start-timeout", "0.5", *SERVER],
    ],
)
def test_what_a_server_can_do_is_taken(arguments):
    assert serving.parse(["--out", "x", *arguments]).server
