"""What this machine offers headfit: packages, devices, the backend that `auto` takes, SGLang's plugin state."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import TYPE_CHECKING, Any

from headfit.memory import available_memory, readable

if TYPE_CHECKING:
    from headfit.hosts.sglang.settings import Settings

# Module -> the distributions that install it.
_PACKAGES = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "safetensors": ("safetensors",),
    "triton": ("triton", "pytorch-triton"),
    "cuda": ("cuda-bindings",),
    "flash_mla": ("sgl-flash-mla", "flash-mla", "flash_mla"),
    "sgl_kernel": ("sgl-kernel", "sglang-kernel"),
    "sglang": ("sglang",),
}
PLUGIN_GROUP = "sglang.srt.plugins"


def report() -> dict[str, Any]:
    """Everything `headfit doctor` says, as JSON-ready values."""
    import torch

    from headfit import __version__, backends

    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen, reason = backends.choose("auto", device)
    return {
        "headfit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {module: _version(module) for module in _PACKAGES},
        "sglang_plugin": _plugin(device),
        "cpu": {"count": os.cpu_count(), "memory_available": available_memory("cpu")},
        "gpus": [_gpu(i) for i in range(torch.cuda.device_count() if device == "cuda" else 0)],
        "backend": {"auto": chosen, "reason": reason, "device": device, "available": list(backends.BACKEND_NAMES)},
    }


def _version(module: str) -> str | None:
    """The installed version of what provides `module`; "unknown" where only the module is found; None where absent."""
    for distribution in _PACKAGES[module]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown" if importlib.util.find_spec(module) else None


def _plugin(device: str) -> dict[str, Any]:
    """Whether SGLang would load headfit (an entry point of ours in its plugin group), and with which settings.

    `obstacle` is what in them keeps a server that loads the plugin from starting.
    """
    from headfit.hosts.sglang.settings import Settings

    ours = [e for e in importlib.metadata.entry_points(group=PLUGIN_GROUP) if e.module.split(".")[0] == "headfit"]
    allowed = os.environ.get("SGLANG_PLUGINS", "")  # SGLang's list of plugin names; none, of a list without any
    names = {name.strip() for name in allowed.split(",")}
    try:
        read = Settings.from_environment()
        settings, obstacle = read.as_environment(), _kernel_obstacle(read, device)
    except ValueError as error:
        settings, obstacle = None, str(error)
    return {
        "group": PLUGIN_GROUP,
        "registered": bool(ours),
        "entry_points": [f"{e.name} = {e.value}" for e in ours],
        "excluded_by": None if not allowed or any(e.name in names for e in ours) else f"SGLANG_PLUGINS={allowed}",
        "settings": settings,
        "obstacle": obstacle,
    }


def is_loaded(plugin: dict[str, Any]) -> bool:
    """Whether a server here loads the plugin of a `report`."""
    return plugin["registered"] and not plugin["excluded_by"]


def _kernel_obstacle(settings: Settings, device: str) -> str | None:
    """Why the plugin cannot have the kernel that its settings ask for, built as the plugin builds it."""
    from headfit import backends
    from headfit.backends import sparse_mqa_cuda
    from headfit.hosts.sglang.settings import NOT_OURS

    if not settings.asked or settings.backend in NOT_OURS:  # the server's own kernel will do
        return None
    # A check needs a kernel of ours, and `auto` has this one.
    name = sparse_mqa_cuda.SUPPORT.name if settings.backend == "auto" else settings.backend
    try:
        backends.create(name, device=device)
    except (ValueError, ImportError) as error:
        return f"{settings.asked} cannot be had: {error}"
    return None


def _gpu(index: int) -> dict[str, Any]:
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    return {
        "index": index,
        "name": name,
        "architecture": f"sm{major}{minor}",
        "memory_total": total,
        "memory_available": free,
    }


def show(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"headfit {report['headfit']}, Python {report['python']}, {report['platform']}"]
    lines += [f"  {module:<13}{version or 'not installed'}" for module, version in report["packages"].items()]
    plugin = report["sglang_plugin"]
    state = ", ".join(plugin["entry_points"]) if plugin["registered"] else f"not registered in {plugin['group']}"
    lines.append(f"  SGLang plugin: {state}{_plugin_state(plugin)}")
    cpu = report["cpu"]
    lines.append(f"  CPU: {cpu['count']} cores, {readable(cpu['memory_available'])} available")
    for gpu in report["gpus"]:
        memory = f"{readable(gpu['memory_available'])} of {readable(gpu['memory_total'])} available"
        lines.append(f"  GPU {gpu['index']}: {gpu['name']}, {gpu['architecture']}, {memory}")
    if not report["gpus"]:
        lines.append("  GPU: none that torch can use")
    backend = report["backend"]
    lines.append(f"  backends: {', '.join(backend['available'])}; auto is {backend['auto']} ({backend['reason']})")
    if memory := report.get("memory"):
        lines += ["", *_show_memory(memory)]
    return "\n".join(lines)


def _plugin_state(plugin: dict[str, Any]) -> str:
    parts = [""]
    if plugin["settings"] is not None:
        parts.append(" ".join(f"{name}={value}" for name, value in plugin["settings"].items()))
    if plugin["obstacle"]:
        parts.append(plugin["obstacle"])
        if is_loaded(plugin):
            parts.append("a server does not start with that")
    if plugin["excluded_by"]:
        parts.append(f"not loaded: {plugin['excluded_by']}")
    return "; ".join(parts)


def _show_memory(memory: dict[str, Any]) -> list[str]:
    sizes = {name: f"{readable(value):>10}" for name, value in memory.items() if name.endswith("_bytes")}
    run = f"{memory['model']}, attention TP {memory['attn_tp_size']}, {memory['device']}, {memory['dtype']}"
    share = "its own share" if memory["expert_shards"] > 1 else "all of them"
    tokens = f"{memory['max_seqs']} x {memory['max_context']} tokens"
    return [
        f"{run}: each rank needs",
        f"  {sizes['attention_bytes']}  attention weights, its own slices",
        f"  {sizes['experts_bytes']}  routed experts, {share}",
        f"  {sizes['other_bytes']}  everything else, whole on every rank",
        f"  {sizes['cache_bytes']}  KV cache in {memory['kv_format']} format, {tokens}",
        f"  {sizes['working_bytes']}  working memory",
        f"  {memory['verdict']}: {'fits' if memory['fits'] else 'does not fit'}",
    ]
