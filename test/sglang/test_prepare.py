"""The command line of `prepare.py`; nothing is downloaded."""

import runpy
import subprocess
import sys
from pathlib import Path

import prepare
import pytest


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """prepared(*arguments) -> the exit code and pip's commands of a run in an empty folder, whose pip does nothing."""
    commands = []

    def pip(command, **_):
        assert command[1:3] == ["-m", "pip"]
        commands.append(command[3])
        if command[3] == "download":
            raise subprocess.CalledProcessError(1, command)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["prepare.py", *arguments])
        try:
            runpy.run_path(str(Path(prepare.__file__)), run_name="__main__")
        except subprocess.CalledProcessError:
            return 1, commands
        except SystemExit as ended:
            return ended.code, commands
        return 0, commands

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.chdir(tmp_path)
    return run


def test_help_says_what_is_downloaded_and_downloads_nothing(prepared, tmp_path, capsys):
    assert prepared("--help") == (0, [])
    said = capsys.readouterr().out
    assert "Each wheel is unpacked" in said and "about 800 MB of disk" in said and not list(tmp_path.iterdir())


ALLOWED = "allowed: a folder or a new one's name, without '-' in front"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: FOLDER"),
        (["--all"], "the following arguments are required: FOLDER"),
        (["new", "--all"], "unrecognized arguments: --all"),
        (["new", "newer"], "unrecognized arguments: newer"),
        (["-1"], f"argument FOLDER: '-1', {ALLOWED}"),
        (["--", "--all"], f"argument FOLDER: '--all', {ALLOWED}"),
        ([""], f"argument FOLDER: '', {ALLOWED}"),
        (["file"], f"argument FOLDER: 'file', {ALLOWED}"),
        (["file/new"], f"argument FOLDER: 'file/new', {ALLOWED}"),
    ],
)
def test_what_is_no_folder_is_refused(prepared, tmp_path, capsys, arguments, message):
    (tmp_path / "file").write_text("x")
    assert prepared(*arguments) == (2, [])
    assert capsys.readouterr().err.splitlines()[-1] == f"prepare.py: error: {message}"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_new_folder_is_made_and_an_old_one_kept(prepared, tmp_path):
    assert prepared("a/new") == (1, ["download"])
    assert (tmp_path / "a" / "new").is_dir()
    for name in (*prepare.VERSIONS, "packages", "transformers"):
        (tmp_path / "old" / name).mkdir(parents=True)
    assert prepared(str(tmp_path / "old")) == (0, ["download"])
