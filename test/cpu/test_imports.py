"""The import order, and the sizes that stand in one file only: read from the source, nothing is run but one import."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headfit

ROOT = Path(headfit.__file__).parent
# Each row may import itself, member by member, and the rows above it. Packages count as one.
CORE_ORDER = (
    ("config",),
    ("head_layout", "distributed", "kv_cache"),
    ("attn_sink", "model_cache", "kernels"),
    ("forward_batch", "backends"),
    ("layers",),
    ("models",),
    ("checkpoint",),
)
HOST_ORDER = (("hosts", "memory", "launch"), ("runner",), ("generate", "doctor"), ("evals",), ("cli",), ("__main__",))
RANK = {name: rank for rank, row in enumerate(CORE_ORDER + HOST_ORDER) for name in row}
CORE_NAMES = {name for row in CORE_ORDER for name in row}
MAY_IMPORT_TRANSFORMERS = {"hosts", "runner", "evals", "generate", "cli", "testing", "assets"}
HOST_LIBRARIES = {"transformers", "sglang", "vllm"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("headfit", *(part for part in parts if part != "__init__")))


def imports_of(path):
    """Every module that a file imports, inside functions and under TYPE_CHECKING too, as absolute names."""
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names if source.startswith("headfit"))


def top(name):
    return name.split(".")[1] if "." in name else ""


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
IMPORTS = {name: set(imports_of(path)) for name, path in FILES.items()}
OURS = {name: {used for used in used_names if used in FILES} for name, used_names in IMPORTS.items()}
CORE = [name for name in FILES if top(name) in CORE_NAMES]


def test_the_walk_sees_what_it_should():
    assert {"headfit.attn_sink", "headfit.backends.base", "headfit.layers.rope"} <= OURS["headfit.models.deepseek_v4"]
    assert {"headfit.backends.flashmla", "headfit.backends.reference"} <= OURS["headfit.backends"]
    assert "transformers" in IMPORTS["headfit.testing.models"] and len(CORE) > 15


@pytest.mark.parametrize("name", [name for name in FILES if top(name) not in ("", "testing", "assets")])
def test_imports_run_one_way(name):
    assert top(name) in RANK, f"{name} has no row in CORE_ORDER or HOST_ORDER: give it one"
    used = {other for other in OURS[name] if top(other) not in ("", "assets", top(name))}
    assert "testing" not in {top(other) for other in used}
    wrong = sorted(other for other in used if RANK[top(other)] >= RANK[top(name)])
    assert not wrong, f"{name} imports upward or sideways: {wrong}"


@pytest.mark.parametrize("name", CORE)
def test_core_imports_core_only(name):
    assert {top(used) for used in OURS[name]} <= CORE_NAMES | {""}
    assert not {used.split(".")[0] for used in IMPORTS[name]} & HOST_LIBRARIES


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("kernels", {"backends", "layers", "models", "head_layout"}),
        ("backends", {"layers", "models", "attn_sink", "forward_batch"}),
        ("layers", {"backends", "models", "attn_sink"}),
        ("attn_sink", {"backends", "kernels", "models", "distributed"}),
        ("head_layout", set(RANK) - {"config", "head_layout"}),
        ("config", set(RANK) - {"config"}),
    ],
)
def test_package_knows_nothing_of(package, forbidden):
    members = [name for name in FILES if top(name) == package]
    assert members
    for name in members:
        found = {top(used) for used in OURS[name]} & forbidden
        assert not found, f"{name} imports {sorted(found)}"


def test_models_know_the_backend_protocol_only():
    """Attention runs in a backend. A layer's own operators (norm, RoPE, the store) are chosen in layers."""
    for name in (name for name in FILES if top(name) in ("models", "layers")):
        assert {used for used in OURS[name] if top(used) == "backends"} <= {"headfit.backends.base", "headfit.backends"}
        kernels = {used for used in OURS[name] if top(used) == "kernels"}
        assert not {used for used in kernels if top(name) == "models" or "sparse_mqa" in used}


def test_only_the_host_side_imports_transformers():
    users = {top(name) for name, used in IMPORTS.items() if {"transformers"} & {part.split(".")[0] for part in used}}
    assert "hosts" in users and users <= MAY_IMPORT_TRANSFORMERS


def test_the_layer_loads_without_a_host_library():
    names = sorted(HOST_LIBRARIES)
    code = f"import sys, headfit.models.deepseek_v4; print([name for name in {names} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"


def integers(name):
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is int}


@pytest.mark.parametrize("name", FILES)
def test_packed_sizes_are_derived_never_written(name):
    """kv_cache.py makes 576 and 584 out of the head's dimensions."""
    assert not integers(name) & {576, 584}


@pytest.mark.parametrize("path", sorted(ROOT.glob("kernels/*.cu*")), ids=lambda path: path.name)
def test_packed_sizes_reach_cuda_sources_as_defines(path):
    assert not set(re.findall(r"\b(?:448|576|584)\b", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "name", [name for name in FILES if top(name) in ("head_layout", "attn_sink", "models", "hosts", "backends")]
)
def test_kernel_head_counts_stand_in_flashmla_only(name):
    found = integers(name) & {64, 128}
    assert found == ({64, 128} if name == "headfit.backends.flashmla" else set())
