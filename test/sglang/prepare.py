"""Lay out stock SGLang versions for the tests: `python test/sglang/prepare.py FOLDER`, then HEADFIT_SGLANG=FOLDER.

Each wheel is unpacked without its dependencies into FOLDER/<version>; the few light packages that its model file
imports go to FOLDER/packages, the transformers of the older versions to FOLDER/transformers. One torch serves all. What
is downloaded with pip takes about 800 MB of disk; what is already there is left as it is.
"""

import argparse
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

VERSIONS = ("0.5.23", "0.5.16", "0.5.13.post1")
# 0.5.23 imports with the transformers that headfit itself uses; the others register names that it has taken since.
OLD_TRANSFORMERS = ("0.5.16", "0.5.13.post1")
TRANSFORMERS = ("transformers==5.12.1", "tokenizers==0.22.2", "huggingface-hub<2", "httpx==0.28.1", "httpcore==1.0.9")
PACKAGES = (
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "apache-tvm-ffi", "cloudpickle", "compressed-tensors", "dill"),
    *("distro", "einops", "fastapi==0.121.3", "frozenlist", "gguf", "interegular", "jiter", "llvmlite", "loguru"),
    *("msgspec", "multidict", "numba", "openai==2.6.1", "openai-harmony==0.0.4", "orjson", "partial-json-parser"),
    *("prometheus_client", "propcache", "pybase64", "python-multipart", "pyzmq", "requests", "sentencepiece"),
    *("setproctitle", "sniffio", "starlette==0.50.0", "uvicorn", "uvloop", "yarl", "ml_dtypes", "attrs"),
    *("urllib3", "charset-normalizer", "certifi", "httpx==0.28.1", "httpcore==1.0.9", "anyio", "h11", "idna"),
    *("annotated-doc", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "psutil", "pillow"),
)


def python_path(folder: Path, version: str) -> list[str]:
    """What goes in front of the environment's own packages."""
    older = [folder / "transformers"] if version in OLD_TRANSFORMERS else []
    return [str(path) for path in (folder / version, *older, folder / "packages")]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for version in VERSIONS:
        if not (folder / version).exists():
            _pip("download", "--dest", folder / "wheels", f"sglang=={version}")
            (wheel,) = (folder / "wheels").glob(f"sglang-{version}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder / version)
    for name, wanted in (("packages", PACKAGES), ("transformers", TRANSFORMERS)):
        if not (folder / name).exists():
            _pip("install", "--target", folder / name, *wanted)


def _pip(command: str, *arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "pip", command, "-q", "--no-deps", *map(str, arguments)], check=True)


def parse(arguments: Sequence[str] | None = None) -> Path:
    """The command line's folder; what can be none ends it with a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=_folder, metavar="FOLDER", help="where it goes; made where there is none")
    return parser.parse_args(arguments).folder


def _folder(text: str) -> Path:
    path = Path(text)
    blocked = any(os.path.lexists(part) and not part.is_dir() for part in (path, *path.parents))
    if not text or text.startswith("-") or blocked:
        raise argparse.ArgumentTypeError(f"{text!r}, allowed: a folder or a new one's name, without '-' in front")
    return path


if __name__ == "__main__":
    main(parse())
