"""Lay out stock SGLang versions for the tests: `python test/sglang/prepare.py FOLDER`, then HEADFIT_SGLANG=FOLDER.

Each wheel is unpacked without its dependencies into FOLDER/<version>; the few light packages that its model file
imports go to FOLDER/packages, the transformers of the older versions to FOLDER/transformers. One torch serves all.
"""

import subprocess
import sys
import zipfile
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


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
