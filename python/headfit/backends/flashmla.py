"""FlashMLA's fp8 sparse decode: its legacy kernels, the only ones that read the DeepSeek-V4 cache format.

They run 64 or 128 query heads, so a rank's heads are padded. Source of the interface and its contract: `flash_mla`
(`sgl-flash-mla` 1.0.0) and https://github.com/deepseek-ai/FlashMLA; `sgl_kernel.flash_mla` stands in for it where it is
absent. This is the one file that knows these head counts.
"""

import inspect
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from headfit.backends.base import KernelSupport, check_decode, check_indices
from headfit.backends.flashmla_plan import PlanOwner, PreparedRegions
from headfit.kv_cache import HEAD_DIM, PAGE_ALIGNMENT, KVRegion, PackedFp8Format

logger = logging.getLogger(__name__)

SUPPORT = KernelSupport(name="flashmla", architectures=("sm90", "sm100"), num_heads=(64, 128), dtypes=(torch.bfloat16,))
MODULES = ("flash_mla", "sgl_kernel.flash_mla")
INDEX_MULTIPLE = 64  # the kernels take index rows of multiples of this
MAX_LAUNCH_BYTES = 128 * 2**20
"""Of one launch's output. The kernel's float32 split buffers are twice that and a little more."""

_ARGUMENTS = ("q", "k_cache", "indices", "attn_sink", "topk_length")
_EXTRA_ARGUMENTS = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
_PADDING_TABLE = "flashmla_padding.json"


@dataclass(frozen=True, slots=True)
class Kernel:
    """The library's functions, and the arguments that are the same in every call."""

    module: str
    decode: Callable[..., tuple[Tensor, Tensor]]
    new_metadata: Callable[[], tuple[Any, None]]
    fixed: dict[str, Any] = field(default_factory=dict)


def load_kernel() -> Kernel:
    """The first of `MODULES` that is installed, asked for what it can do.

    Raises:
        ImportError: neither is installed, the installed one does not load, or it lacks the kernels.
    """
    for name in MODULES:
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise ImportError(f"{name} does not load: {error}", name=name) from error
            continue
        except (ImportError, OSError) as error:  # OSError: a shared library that does not load
            raise ImportError(f"{name} does not load: {error}", name=name) from error
        if missing := _missing(module):
            raise ImportError(
                f"{name} has no {missing}; needed: sgl-flash-mla 1.0.0 with its legacy kernels", name=name
            )
        takes = inspect.signature(module.flash_mla_with_kvcache).parameters
        fixed = {"use_legacy": True} if "use_legacy" in takes else {}
        return Kernel(name, module.flash_mla_with_kvcache, module.get_mla_metadata, fixed)
    raise ImportError(f"{' and '.join(MODULES)} are not installed; needed: one of them", name=MODULES[0])


def _missing(module: Any) -> str | None:
    """What a FlashMLA module lacks of what is called here, None where it has everything."""
    if hasattr(module, "has_legacy") and not module.has_legacy():
        return "legacy kernels (has_legacy() is False)"
    try:
        takes = inspect.signature(module.flash_mla_with_kvcache).parameters
        inspect.signature(module.get_mla_metadata).bind()
    except (AttributeError, TypeError, ValueError) as error:
        return f"sparse decode with metadata made by its first call ({error})"
    lacking = [name for name in (*_ARGUMENTS, *_EXTRA_ARGUMENTS) if name not in takes]
    return f"argument {', '.join(lacking)} of flash_mla_with_kvcache" if lacking else None


def architecture(device: torch.device | str) -> str:
    """The device's CUDA architecture such as "sm90", or its type where it is no CUDA device torch can use."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type if device.type != "cuda" else "absent"
    return "sm{}{}".format(*torch.cuda.get_device_capability(device))


def obstacle() -> str | None:
    """Why FlashMLA cannot be called in this environment, None where it can. Loads the library."""
    try:
        load_kernel()
    except ImportError as error:
        return str(error)
    return None


def check_batch(name: str, batch: int) -> None:
    """Raise TypeError or ValueError where `batch` is no count of sequences."""
    if isinstance(batch, bool) or not isinstance(batch, int):
        raise TypeError(f"{name}: {batch!r}, allowed: int")
    if batch < 1:
        raise ValueError(f"{name}: {batch}, allowed: 1 or more")


def measured_num_heads(architecture: str, batch: int) -> tuple[int, ...]:
    """The head counts to plan with so that decode at `batch` is fastest, by the measured table of this architecture.

    The table (`flashmla_padding.json`, with its provenance) holds microseconds by kernel head count, batch and key set;
    of the measured batches the nearest one from `batch` up counts, past the last the last. All of `SUPPORT.num_heads`,
    which pads least, where less padding is not slower over the sum of the key sets, or nothing was measured.

    Raises:
        ValueError: batch below 1.
        TypeError: batch is no int.
    """
    check_batch("batch", batch)
    table = json.loads(files("headfit.backends").joinpath(_PADDING_TABLE).read_text(encoding="utf-8"))
    rows = table["architectures"].get(architecture, {}).get("rows", [])
    batches = sorted({row["batch"] for row in rows})
    if not batches:
        return SUPPORT.num_heads
    nearest = next((measured for measured in batches if measured >= batch), batches[-1])
    at_batch = [row["us"] for row in rows if row["batch"] == nearest]
    totals = {count: sum(us[str(count)] for us in at_batch) for count in SUPPORT.num_heads}
    fastest = min(totals, key=totals.get)
    return tuple(count for count in SUPPORT.num_heads if count >= fastest)


class FlashMLABackend:
    """Calls FlashMLA on queries padded to one of its head counts.

    Long batches run in launches of bounded output, see `MAX_LAUNCH_BYTES`. Rows without a valid key, where FlashMLA
    gives an lse of +inf, get o = 0 and lse = -inf, as every backend has it. Scheduling metadata is made anew in each
    call, and shared between calls only within `step`.

    Args:
        device: where the layers run.
        checked: also refuse indices past the pool (costs a device synchronisation a call).
        batch_invariant: must be False: FlashMLA's legacy kernels split keys by what else is in the batch.
        num_heads: plan with these of `SUPPORT.num_heads` only, such as (128,) to pad 16 heads to 128.

    Raises:
        ValueError: `batch_invariant`, an unknown head count, a device without these kernels.
        ImportError: the library is not installed, does not load, or lacks the legacy kernels.
    """

    name = SUPPORT.name

    def __init__(
        self,
        *,
        device: torch.device | str = "cuda",
        checked: bool = False,
        batch_invariant: bool = False,
        num_heads: tuple[int, ...] = SUPPORT.num_heads,
    ) -> None:
        if batch_invariant:
            raise ValueError(
                "batch_invariant: True, allowed by backend flashmla: False (its splits depend on the batch)"
            )
        if not num_heads or not set(num_heads) <= set(SUPPORT.num_heads):
            raise ValueError(f"num_heads: {num_heads}, allowed: some of {SUPPORT.num_heads}")
        found = architecture(device)
        if found not in SUPPORT.architectures:
            allowed = " or ".join(SUPPORT.architectures)
            raise ValueError(f"device: {device} is {found}, allowed by backend flashmla: a GPU of {allowed}")
        self.device = torch.device(device)
        self.supported_num_heads = tuple(sorted(set(num_heads)))
        self.checked = checked
        self.kernel = load_kernel()
        self.plans = PlanOwner(lambda: self.kernel.new_metadata()[0], index_multiple=INDEX_MULTIPLE)
        logger.info("flashmla: kernels of %s", self.kernel.module)

    def prewarm(self, num_heads: int, device: torch.device | str) -> None:
        """See `AttentionBackend.prewarm`: the kernels come compiled."""

    def step(self) -> AbstractContextManager[None]:
        """Around one forward of a model: calls with the same length tensors share their scheduling metadata.

        Within it nothing writes a length tensor or index tensor that was passed before, and it lies wholly inside one
        graph capture or outside of any.
        """
        return self.plans.step()

    def decode(
        self,
        *,
        q: Tensor,
        window: KVRegion,
        compressed: KVRegion | None,
        attn_sink: Tensor,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.decode`."""
        regions = (window,) if compressed is None else (window, compressed)
        check_decode(self, q, regions, attn_sink)
        self._check(q, regions, attn_sink)
        if self.checked:
            check_indices(regions)
        if compressed is not None and not compressed.indices.shape[1]:
            regions = (window,)
        num_tokens, num_heads, _ = q.shape
        max_tokens = MAX_LAUNCH_BYTES // (num_heads * HEAD_DIM * q.element_size())
        if 0 < num_tokens <= max_tokens:
            return self._launch(q, regions, slice(0, num_tokens), attn_sink, softmax_scale)
        o, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
        for start in range(0, num_tokens, max_tokens):
            rows = slice(start, min(start + max_tokens, num_tokens))
            o[rows], lse[rows] = self._launch(q[rows], regions, rows, attn_sink, softmax_scale)
        return o, lse

    def _check(self, q: Tensor, regions: tuple[KVRegion, ...], attn_sink: Tensor) -> None:
        if q.dtype not in SUPPORT.dtypes:
            raise TypeError(f"q: dtype {q.dtype}, allowed by backend flashmla: {SUPPORT.dtypes[0]}")
        if q.device.type != self.device.type:
            raise ValueError(f"q: on {q.device}, allowed: {self.device.type}, for which this backend was built")
        if q.stride(-1) != 1 or attn_sink.stride(0) != 1:
            strides = f"{q.stride()} and {attn_sink.stride()}"
            raise ValueError(f"q, attn_sink: strides {strides}, allowed: a contiguous last axis")
        if attn_sink.device != q.device:
            raise ValueError(f"attn_sink: on {attn_sink.device}, allowed: {q.device}, where q is")
        for name, region in zip(("window", "compressed"), regions, strict=False):
            pool = region.pool
            if not isinstance(pool.kv_format, PackedFp8Format):
                raise ValueError(f"{name}.pool: kv_format {pool.kv_format.name!r}, allowed by backend flashmla: 'fp8'")
            if not pool.num_pages or pool.buffer.stride(0) % PAGE_ALIGNMENT:
                raise ValueError(
                    f"{name}.pool: {pool.num_pages} pages, {pool.buffer.stride(0)} bytes apart; "
                    f"allowed by backend flashmla: 1 or more, a multiple of {PAGE_ALIGNMENT} bytes apart"
                )
            for part, tensor in (("pool", pool.buffer), ("indices", region.indices), ("lengths", region.lengths)):
                if tensor.device != q.device:
                    raise ValueError(f"{name}.{part}: on {tensor.device}, allowed: {q.device}, where q is")

    def _launch(
        self, q: Tensor, regions: tuple[KVRegion, ...], rows: slice, attn_sink: Tensor, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        """The tokens `rows` of the regions, whose queries are q."""
        prepared = self.plans.prepare(regions, rows=rows, num_heads=q.shape[1], in_capture=_capturing(q))
        o, lse = self.kernel.decode(
            q=q[:, None],
            block_table=None,
            cache_seqlens=None,
            head_dim_v=HEAD_DIM,
            tile_scheduler_metadata=prepared.metadata,
            softmax_scale=softmax_scale,
            is_fp8_kvcache=True,
            attn_sink=attn_sink,
            **_region_arguments(regions, prepared),
            **self.kernel.fixed,
        )
        # [num_tokens, num_heads, 1], +inf where a row has no valid key.
        lse = lse[:, :, 0].nan_to_num(nan=float("nan"), posinf=float("-inf"), neginf=float("-inf"))
        return o[:, 0].masked_fill_((lse == float("-inf"))[..., None], 0), lse


def _region_arguments(regions: tuple[KVRegion, ...], prepared: PreparedRegions) -> dict[str, Tensor]:
    arguments = {}
    names = (("k_cache", "indices", "topk_length"), _EXTRA_ARGUMENTS)
    parts = zip(names, regions, prepared.indices, prepared.lengths, strict=False)
    for (cache_name, indices_name, lengths_name), region, indices, lengths in parts:
        arguments[cache_name] = region.pool.kernel_view().view(torch.float8_e4m3fn)
        arguments[indices_name], arguments[lengths_name] = indices[:, None], lengths
    return arguments


def _capturing(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()
