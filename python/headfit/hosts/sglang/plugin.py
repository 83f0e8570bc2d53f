"""The plugin itself: what SGLang calls, the hooks, which kernel runs and why, and the worker's one log line.

Hooks are registered here and applied by SGLang afterwards, which only logs one that fails; so the first layer that is
built checks that all are in place. Whatever is not as expected while the server starts makes the plugin stand down: one
warning, and the server runs as stock from then on; where more than `auto` is asked for it does not start. Layers
whose sinks have their home by then keep it, and updates go on to bring them there. Once a kernel has been chosen graphs
may have been captured: a sink that then becomes what it must not be is an error, for they would replay the old one; a
layer built only then, a draft's, that cannot be kept is left to the server by itself.
"""

import importlib.metadata
import logging
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from headfit import __version__, backends
from headfit.backends import flashmla, reference, sparse_mqa_cuda
from headfit.backends.base import AttentionBackend
from headfit.hosts.sglang.capabilities import LOAD, ServerCode, UnsupportedServer, decode_heads, read_server
from headfit.hosts.sglang.seam import Seam
from headfit.hosts.sglang.settings import Settings
from headfit.hosts.sglang.sinks import LayerSinks, SwappedSink

logger = logging.getLogger(__name__)

# FlashMLA's smallest kernel: up to its head count ours was faster at every batch size measured (benchmark/results).
AUTO_MAX_HEADS = min(flashmla.SUPPORT.num_heads)
_BAD_LAYER = (ValueError, TypeError, AttributeError)  # what a layer of another kind than expected raises
_plugin: "Plugin | None" = None


def register() -> None:
    """SGLang's entry point: hook this process where it runs a model.

    Raises:
        SystemExit: an environment variable is not one of the allowed values, or asks for what this server's code does
            not allow. SGLang would log an `Exception` and go on without the plugin.
    """
    global _plugin
    try:
        settings = Settings.from_environment()
    except ValueError as error:
        raise SystemExit(f"headfit: {error}") from error
    if settings.backend == "off":
        logger.info("headfit %s: HEADFIT_BACKEND=off, the server runs as stock", __version__)
        return
    if not runs_a_model():
        return
    try:
        plugin = Plugin(settings, read_server())
        plugin.register_hooks()
    except Exception as error:
        reason = str(error) if isinstance(error, UnsupportedServer) else f"{type(error).__name__}: {error}"
        if settings.asked:
            raise SystemExit(f"headfit: {_refusal(settings, reason)}") from error
        _warn_stock(reason)
        return
    _plugin = plugin


def status() -> dict[str, Any]:
    """What the plugin does in this process, as JSON-ready values; `active` is False where it does nothing."""
    return {"active": False} if _plugin is None else _plugin.status()


def runs_a_model() -> bool:
    """False in the launcher and in the detokenizer, which would import model code for nothing."""
    if multiprocessing.parent_process() is None:
        return False
    modules = sys.modules
    return "sglang.srt.managers.detokenizer_manager" not in modules or "sglang.srt.managers.scheduler" in modules


def sglang_version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules.get("sglang"), "__version__", "unknown")


def _warn_stock(reason: str) -> None:
    logger.warning("headfit %s stands down, SGLang %s runs as stock: %s", __version__, sglang_version(), reason)


def _refusal(settings: Settings, reason: str) -> str:
    return f"{settings.asked} cannot be had in SGLang {sglang_version()}: {reason}"


class Plugin:
    """One process's hooks and what they have found out."""

    def __init__(self, settings: Settings, code: ServerCode) -> None:
        self.settings, self.code = settings, code
        self.sinks = LayerSinks(
            shape=code.shape, rank_attribute=code.rank_attribute, size_attribute=code.size_attribute
        )
        self.active = True
        self.seam: Seam | None = None
        self.kernel = ""  # what runs and why, once it is known
        self._checked = False
        self._said_bypassed = False
        self._prewarmed: set[int] = set()
        self._hooks: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(code.init, self._around_init),
            **dict.fromkeys(code.forward, self._around_forward),
            **dict.fromkeys(code.local_sink, self._around_local_sink),
            **dict.fromkeys(code.updates, self._around_update),
            **dict.fromkeys(code.seams, self._around_seam),
        }
        if code.loads_model:
            self._hooks[LOAD] = self._around_load

    def register_hooks(self) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        for target, hook in self._hooks.items():
            HookRegistry.register(target, hook, HookType.AROUND)

    def status(self) -> dict[str, Any]:
        seam, layers = self.seam, self.sinks.layers
        return {
            "active": self.active,
            "headfit": __version__,
            "sglang": sglang_version(),
            "settings": self.settings.as_environment(),
            "shape": self.code.shape,
            "kernel": self.kernel,
            "num_layers": len(layers),
            "num_local_heads": sorted({layer.n_local_heads for layer in layers}),
            "served": seam.served if seam else 0,
            "served_layers": len(seam.layers) if seam else 0,
            "captured": seam.captured if seam else 0,
            "checked": seam.checked if seam else 0,
            "passed_on": dict(seam.passed_on) if seam else {},
        }

    def stand_down(self, reason: str) -> None:
        """Do nothing more but keep sinks that have their home there.

        Raises:
            RuntimeError: what was asked for is not to be left unfulfilled.
        """
        if self.settings.asked:
            raise RuntimeError(_refusal(self.settings, reason))
        if self.active:
            self.active = False
            _warn_stock(reason)

    def _around_init(self, original, layer: nn.Module, *args, **kwargs):
        result = original(layer, *args, **kwargs)
        if self.active:
            self._check_hooks()
        if self.active:
            self._adopt(layer)
        return result

    def _around_forward(self, original, layer: nn.Module, *args, **kwargs):
        if not self.active or layer not in self.sinks:
            return original(layer, *args, **kwargs)
        self._refresh([layer])
        if self.active and not self.kernel:
            self._choose_kernel(layer.attn_sink.device)
        if not self.active or layer not in self.sinks:
            return original(layer, *args, **kwargs)
        with ExitStack() as stack:
            run = None if self.seam is None else stack.enter_context(self.seam.running(layer))
            stack.enter_context(self.sinks.padded_to_kernel(layer))  # shows the layer as another rank
            result = original(layer, *args, **kwargs)
        if run is not None and not run.answered and _decodes(*args, *kwargs.values()):
            self._unanswered(run.left)
        return result

    def _around_local_sink(self, original, layer: nn.Module, *args, **kwargs):
        if not self.active or layer not in self.sinks or getattr(layer, self.code.size_attribute) == 1:
            return original(layer, *args, **kwargs)
        return self.sinks.local(layer, *args, **kwargs)

    def _around_update(self, original, *args, **kwargs):
        try:
            return original(*args, **kwargs)
        finally:  # an update that failed may have bound some sinks to other memory
            self._refresh(self.sinks.layers)

    def _around_seam(self, original, *args, **kwargs):
        if not self.active or self.seam is None:
            return original(*args, **kwargs)
        return self.seam.call(original, *args, **kwargs)

    def _around_load(self, original, *args, **kwargs):
        """Before memory is measured and graphs are captured: the kernel is chosen, compiled and loaded here."""
        result = original(*args, **kwargs)
        self._refresh(self.sinks.layers)
        if self.active and self.sinks.layers:
            devices = [layer.attn_sink.device for layer in self.sinks.layers]
            self._choose_kernel(next((one for one in devices if one.type != "cpu"), devices[0]))  # some are offloaded
        return result

    def _adopt(self, layer: nn.Module) -> None:
        try:
            self.sinks.adopt(layer)
        except _BAD_LAYER as error:
            self.sinks.release(layer)
            if self.kernel:
                self._leave(str(error))
            else:
                self.stand_down(str(error))

    def _leave(self, reason: str, what: str = "a layer") -> None:
        """A single layer to the server."""
        if self.settings.asked:
            raise RuntimeError(_refusal(self.settings, reason))
        logger.warning("headfit leaves %s to the server: %s", what, reason)

    def _unanswered(self, reason: str) -> None:
        """A layer's decode step of which the server's kernel answered all: the seam has said why, or it went by it."""
        if reason and self.settings.asked:
            raise RuntimeError(_refusal(self.settings, reason))
        if not reason and not self._said_bypassed:
            reason = f"the layer's decode does not call {' or '.join(self.code.seams)} here"
            self._leave(reason, "a layer's decode")
            self._said_bypassed, self.kernel = True, f"{self.kernel}; the server's own where {reason}"

    def _refresh(self, layers: Iterable[nn.Module]) -> None:
        for layer in layers:
            try:
                self.sinks.refresh(layer)
            except SwappedSink as error:  # in every forward, so that no graph has been captured with ours
                self.sinks.release(layer)
                self._leave(str(error))
            except _BAD_LAYER as error:
                if self.kernel:
                    raise RuntimeError(f"headfit: captured CUDA graphs would go on with old sinks: {error}") from error
                self.sinks.release(layer)
                self.stand_down(str(error))

    def _check_hooks(self) -> None:
        if self._checked:
            return
        self._checked = True
        if absent := [target for target, hook in self._hooks.items() if not _is_hooked(target, hook)]:
            self.stand_down(f"hooks that SGLang did not apply: {', '.join(absent)}")

    def _choose_kernel(self, device: torch.device) -> None:
        """Once a process; a draft model loaded later only compiles for its own head count.

        Raises:
            ValueError, ImportError: a kernel asked for by name that cannot run here.
        """
        counts = {heads for layer in self.sinks.layers for heads in (layer.n_local_heads, decode_heads(layer))}
        first = not self.kernel
        if first:
            backend, self.kernel = _backend(self.settings, device, counts, self.code.seam_obstacle)
            if backend is not None:
                limit = AUTO_MAX_HEADS if self.settings.backend == "auto" else None
                check_sinks = self.sinks.own if self.settings.check else None
                self.seam = Seam(backend, max_heads=limit, check_sinks=check_sinks)
        if self.seam is not None:
            self._prewarm(counts, device)
        if self.settings.check and self.seam is None:
            raise RuntimeError(_refusal(self.settings, f"the decode kernel is {self.kernel}"))
        if first:
            self._log(device)

    def _prewarm(self, counts: set[int], device: torch.device) -> None:
        """`auto` may leave a kernel that does not compile to the server; one asked for by name may not fail quietly."""
        seam = self.seam
        for count in counts - self._prewarmed - seam.refused.keys():
            if seam.max_heads is not None and count > seam.max_heads:
                continue
            try:
                seam.backend.prewarm(count, device)
                self._prewarmed.add(count)
            except Exception as error:
                if self.settings.backend != "auto":
                    raise
                logger.warning("headfit: %s could not be prepared for %d heads: %s", seam.backend.name, count, error)
                seam.refused[count] = str(error)
        if seam.refused and not self._prewarmed:
            self.seam, self.kernel = None, f"the server's own ({', '.join(dict.fromkeys(seam.refused.values()))})"

    def _log(self, device: torch.device) -> None:
        layers = self.sinks.layers
        layouts = {self.sinks.layout(layer) for layer in layers}
        heads = ", ".join(
            f"{x.num_local_heads} of {x.num_heads} heads (attention TP rank {x.attn_tp_rank} of {x.attn_tp_size})"
            for x in layouts
        )
        architecture = "sm{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else "cpu"
        logger.info(
            "headfit %s in SGLang %s, process %d on %s: %s, %d layers; decode kernel: %s; sinks: %s",
            *(__version__, sglang_version(), os.getpid(), architecture, heads, len(layers), self.kernel),
            f"views of the parameters (server shape {self.code.shape})",
        )


def _backend(
    settings: Settings, device: torch.device, counts: set[int], seam_obstacle: str = ""
) -> tuple[AttentionBackend | None, str]:
    """The backend that answers the seam, None for the server's own kernel; and what runs and why.

    Args:
        counts: the layers' heads a rank, when they are built and when they decode.
        seam_obstacle: why this server has no function to answer, empty where it has.

    Raises:
        ValueError, ImportError: a kernel asked for by name that cannot run here.
    """
    if settings.backend == "flashmla":
        return None, "the server's own (HEADFIT_BACKEND=flashmla)"
    if seam_obstacle:
        if settings.backend != "auto":
            raise ValueError(
                f"HEADFIT_BACKEND={settings.backend}: this server has no decode call to answer: {seam_obstacle}"
            )
        return None, f"the server's own (auto: {seam_obstacle})"
    if settings.backend == reference.SUPPORT.name:
        return backends.create(settings.backend, device=device), "reference (asked for; far too slow to serve with)"
    if settings.backend != "auto":
        return _create(settings.backend, device), f"{settings.backend} (asked for)"
    if min(counts) > AUTO_MAX_HEADS:
        return None, f"the server's own (auto: {min(counts)} heads a rank, more than {AUTO_MAX_HEADS})"
    name = sparse_mqa_cuda.SUPPORT.name
    try:
        return _create(name, device), f"{name} (auto: the faster one here)"
    except (ValueError, ImportError) as error:
        return None, f"the server's own (auto: {error})"


def _create(name: str, device: torch.device) -> AttentionBackend:
    # The server's kernels are launched in many ways; what comes next to this one may count on the stream's order.
    return backends.create(name, device=device, pdl=False)


def _decodes(*arguments: Any) -> bool:
    """Whether the server's batch among a forward's arguments is a decode of some request."""
    for one in arguments:
        mode = getattr(one, "forward_mode", None)
        if mode is not None:
            return mode.is_decode() and getattr(one, "batch_size", 1) > 0
    return False


def _is_hooked(target: str, hook: Callable[..., Any]) -> bool:
    """Whether `hook` is among the wrappers that SGLang's registry put around `target`."""
    owner, _, name = target.rpartition(".")
    function = pkgutil.resolve_name(owner).__dict__.get(name)
    while function is not None:
        if any(_contents(cell) is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
