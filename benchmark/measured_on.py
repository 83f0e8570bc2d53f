"""Where a result comes from, for programs that must not load torch or take memory of a GPU that servers fill."""

import subprocess
from importlib import metadata
from pathlib import Path


def git_commit() -> str | None:
    """The repository's short commit, `-dirty` where files differ from it; None where there is no repository."""
    return _said("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*")


def gpu_name() -> str | None:
    """The first GPU's name as its driver gives it, None without one."""
    names = _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return names.splitlines()[0].strip() if names else None


def package_version(name: str) -> str | None:
    """Of an installed package, None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _said(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
