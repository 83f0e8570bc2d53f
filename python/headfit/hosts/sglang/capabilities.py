"""What the installed SGLang's DeepSeek-V4 code looks like, read from the code itself: what to hook, or why not.

Three shapes of the attention layer's forward are known, by the names that its bytecode reads:

    | shape       | the server                                                               | seen in              |
    |-------------|--------------------------------------------------------------------------|----------------------|
    | `all_heads` | pads to all heads, the rank's at rank x local, with the whole sink       | 0.5.13.post1         |
    | `cached`    | pads to 64, copies the rank's sink into `_attn_sink_local` once          | 0.5.14 to 0.5.16     |
    | `method`    | pads to 64, asks `_local_attn_sink()`, which caches such a copy          | 0.5.18 to 0.5.23     |
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType, ModuleType

from torch import nn

MODEL = "sglang.srt.models.deepseek_v4"
DRAFT = "sglang.srt.models.deepseek_v4_dspark"
LOAD = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
_SEAM_MODULES = ("sglang.kernels.ops.attention.flash_mla_interface", "sgl_kernel.flash_mla")
_SEAM_NAME = "flash_mla_with_kvcache"
# Keyword arguments of the decode call that the seam reads or must see fixed.
_SEAM_ARGUMENTS = {
    *("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "softmax_scale"),
    *("is_fp8_kvcache", "indices", "topk_length", "attn_sink"),
    *("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"),
}
_SOURCES = ("disk", "tensor", "distributed", "ipc")
# Whatever writes weights while the server runs; those that this version has are hooked.
_UPDATES = (
    (f"{MODEL}.DeepseekV4ForCausalLM", ("load_weights", "post_load_weights")),
    (f"{MODEL}_nextn.DeepseekV4ForCausalLMNextN", ("load_weights", "post_load_weights")),
    (f"{DRAFT}.DeepseekV4ForCausalLMDSpark", ("load_weights", "post_load_weights")),
    *(
        (owner, (*(f"update_weights_from_{source}" for source in _SOURCES), "load_weights_from_distributed"))
        for owner in (
            "sglang.srt.model_executor.model_runner.ModelRunner",
            "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater",
            "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",
        )
    ),
)


class UnsupportedServer(Exception):
    """The server's code has a shape that the plugin does not know; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class ServerCode:
    """Dotted names of what to hook, and how the layer treats its sink.

    Args:
        shape: a key of the module's table.
        rank_attribute, size_attribute: where a layer keeps its attention-TP rank and size.
        init: constructors of the modules that own a sink.
        forward: their forwards, within which the decode kernel is called.
        local_sink: the methods that hand out the local sink (shape `method`, and draft layers of `cached`).
        updates: functions that write weights.
        seams: the decode kernel's function; empty with `seam_obstacle` where there is none to be had.
        loads_model: whether `LOAD` exists.
    """

    shape: str
    rank_attribute: str
    size_attribute: str
    init: tuple[str, ...]
    forward: tuple[str, ...]
    local_sink: tuple[str, ...]
    updates: tuple[str, ...]
    seams: tuple[str, ...]
    seam_obstacle: str
    loads_model: bool


def read_server() -> ServerCode:
    """Read the installed SGLang.

    Raises:
        UnsupportedServer: what is missing or different.
    """
    try:
        model = import_module(MODEL)
    except Exception as error:
        raise UnsupportedServer(f"{MODEL} cannot be imported: {type(error).__name__}: {error}") from error
    layer = _class(model, "MQALayer")
    owner = getattr(model, "MqaAttentionBase", layer)
    if not issubclass(layer, owner):
        raise UnsupportedServer("MQALayer is not an MqaAttentionBase")
    written = _names(owner, "__init__", ("config", "layer_id"))
    _require("the layer's constructor", {"attn_sink", "n_heads", "n_local_heads"}, written)
    prefix = "attn_tp" if {"attn_tp_rank", "attn_tp_size"} <= written else "tp"
    _require("the layer's constructor", {f"{prefix}_rank", f"{prefix}_size"}, written)
    shape = _shape(layer, owner)
    draft = _class(draft_model, "DSparkAttention") if (draft_model := _module(DRAFT)) else None
    if draft is not None and not issubclass(draft, owner):
        raise UnsupportedServer("DSparkAttention is not an MqaAttentionBase")
    layers = [layer] if draft is None else [layer, draft]
    seams, obstacle = _seams()
    return ServerCode(
        shape=shape,
        rank_attribute=f"{prefix}_rank",
        size_attribute=f"{prefix}_size",
        init=(_dotted(owner, "__init__"),),
        forward=tuple(_dotted(one, "forward") for one in layers),
        local_sink=tuple(_dotted(one, "_local_attn_sink") for one in (owner, *layers) if _own(one, "_local_attn_sink")),
        updates=_existing_updates(),
        seams=seams,
        seam_obstacle=obstacle,
        loads_model=_find(LOAD.rpartition(".")[0], "load_model") is not None,
    )


def decode_heads(layer: nn.Module) -> int:
    """A layer's heads a rank in decode steps: ranks that share a prompt's context may then share out its heads."""
    for owner in type(layer).__mro__:  # 0.5.23's model file has this function
        if context := getattr(sys.modules.get(owner.__module__), "get_cp_decode_attn_tp_ctx", None):
            size = context().decode_tp_size  # None: they do not
            return layer.n_heads // size if size else layer.n_local_heads
    return layer.n_local_heads


def _shape(layer: type, owner: type) -> str:
    read = _names(layer, "forward", ("x", "positions", "forward_batch"))
    if "_local_attn_sink" in read:
        if not callable(getattr(layer, "_local_attn_sink", None)):
            raise UnsupportedServer("MQALayer.forward asks for _local_attn_sink, which no class defines")
        unknown = set(inspect.signature(layer._local_attn_sink).parameters) - {"self", "kernel_num_heads"}
        if unknown:
            raise UnsupportedServer(f"_local_attn_sink takes {', '.join(sorted(unknown))}")
        return "method"
    if "_attn_sink_local" in read:
        return "cached"
    _require("MQALayer.forward", {"attn_sink", "n_heads", "n_local_heads", "tp_rank", "tp_size", "new_empty"}, read)
    # This shape's forward runs with other values of these two; nothing else may depend on them.
    for name, member in vars(layer).items():
        if name not in ("__init__", "forward") and isinstance(inspect.unwrap(member), FunctionType):
            shared = {"n_heads", "tp_rank"} & set(inspect.unwrap(member).__code__.co_names)
            if shared:
                raise UnsupportedServer(f"MQALayer.{name} reads {', '.join(sorted(shared))}")
    return "all_heads"


def _seams() -> tuple[tuple[str, ...], str]:
    """The decode functions of this version, and why there is none."""
    found, obstacles = [], []
    for name in _SEAM_MODULES:
        function = _find(name, _SEAM_NAME)
        if function is None:
            obstacles.append(f"no {name}.{_SEAM_NAME}")
        elif missing := _SEAM_ARGUMENTS - set(inspect.signature(function).parameters):
            obstacles.append(f"{name}.{_SEAM_NAME} has no argument {', '.join(sorted(missing))}")
        else:
            found.append(f"{name}.{_SEAM_NAME}")
    return tuple(found), "" if found else "; ".join(obstacles)


def _existing_updates() -> tuple[str, ...]:
    """A method that is only inherited is hooked where it is defined."""
    found = []
    for dotted, methods in _UPDATES:
        module, _, name = dotted.rpartition(".")
        owner = _find(module, name)
        found += [f"{dotted}.{method}" for method in methods if isinstance(owner, type) and _own(owner, method)]
    if f"{MODEL}.DeepseekV4ForCausalLM.load_weights" not in found:
        raise UnsupportedServer("DeepseekV4ForCausalLM has no load_weights")
    return tuple(found)


def _names(owner: type, method: str, parameters: tuple[str, ...]) -> set[str]:
    """The attribute and global names that a method's code uses; other plugins' wrappers are looked through."""
    function = inspect.unwrap(getattr(owner, method, None) or _missing(f"{owner.__name__}.{method}"))
    if not isinstance(function, FunctionType):
        raise UnsupportedServer(f"{owner.__name__}.{method} is not a Python function")
    absent = set(parameters) - set(inspect.signature(function).parameters)
    if absent:
        raise UnsupportedServer(f"{owner.__name__}.{method} takes no {', '.join(sorted(absent))}")
    return set(function.__code__.co_names)


def _require(what: str, wanted: set[str], got: set[str]) -> None:
    if absent := wanted - got:
        raise UnsupportedServer(f"{what} does not use {', '.join(sorted(absent))}")


def _class(module: ModuleType, name: str) -> type:
    found = getattr(module, name, None)
    return found if isinstance(found, type) else _missing(f"{module.__name__}.{name}")


def _missing(what: str):
    raise UnsupportedServer(f"there is no {what}")


def _own(owner: type, method: str) -> bool:
    return method in vars(owner)


def _dotted(owner: type, method: str) -> str:
    return f"{owner.__module__}.{owner.__qualname__}.{method}"


def _find(module: str, name: str) -> Callable | None:
    """`module` may also be a class's dotted name."""
    found = _module(module)
    if found is None and "." in module:
        parent, _, last = module.rpartition(".")
        found = getattr(_module(parent), last, None)
    return getattr(found, name, None)


def _module(name: str) -> ModuleType | None:
    """A library of the server that cannot be loaded on this machine, for whatever reason, counts as absent."""
    try:
        return import_module(name) if find_spec(name) is not None else None
    except Exception:
        return None
