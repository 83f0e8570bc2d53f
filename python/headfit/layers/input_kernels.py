"""In which form a layer's `prepare_q` and `store_kv` run: as Triton kernels where those can run, else as PyTorch."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from headfit.kernels.prepare_q_ref import prepare_q_ref
from headfit.kernels.store_kv_ref import store_kv_ref
from headfit.kv_cache import ROPE_DIM, KVFormat, PackedFp8Format

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InputKernels:
    """The two operators between a layer's projections and its attention, in one form."""

    name: str
    prepare_q: Callable[..., None]
    store_kv: Callable[..., None]


REFERENCE = InputKernels("reference", prepare_q_ref, store_kv_ref)


@cache
def choose_input_kernels(
    fused: bool | None, *, device_type: str, dtype: torch.dtype, kv_format: KVFormat, rope_dim: int
) -> InputKernels:
    """The form that runs on inputs of this kind. It is chosen, and logged with the reason, once a kind.

    Args:
        fused: True: Triton kernels; False: reference; None: Triton kernels where they can run.

    Raises:
        ValueError: `fused` is True and the Triton kernels cannot run.
    """
    obstacle = _obstacle(device_type, dtype, rope_dim, kv_format)
    if fused and obstacle:
        raise ValueError(f"fused: True, but {obstacle}; allowed here: None, False")
    if fused is False or obstacle:
        logger.info("query and key preparation by the reference: %s", "asked for" if fused is False else obstacle)
        return REFERENCE
    from headfit.kernels.prepare_q_triton import prepare_q_triton
    from headfit.kernels.store_kv_triton import store_kv_triton

    reason = "asked for" if fused else f"{dtype} on {device_type}, fp8 pages"
    logger.info("query and key preparation by Triton kernels: %s", reason)
    return InputKernels("triton", prepare_q_triton, store_kv_triton)


def check_fused(fused: bool | None, *, device: torch.device | str | None, dtype: torch.dtype, rope_dim: int) -> None:
    """Refuse `fused` True for a layer that is built where the Triton kernels cannot run, whatever its cache will be.

    A layer on the meta device goes elsewhere before it runs, and is looked at then.

    Raises:
        ValueError: saying what is in the way.
    """
    device_type = (torch.get_default_device() if device is None else torch.device(device)).type
    if not fused or device_type == "meta":
        return
    if obstacle := _obstacle(device_type, dtype, rope_dim):
        raise ValueError(f"fused: True, but {obstacle}; allowed here: None, False")


def _obstacle(device_type: str, dtype: torch.dtype, rope_dim: int, kv_format: KVFormat | None = None) -> str | None:
    """Why the Triton kernels cannot run, None where they can. Without `kv_format` the cache is not looked at."""
    if device_type != "cuda":
        return f"the device is {device_type}, and the Triton kernels run on cuda"
    if dtype != torch.bfloat16:
        return f"activations are {dtype}, and the Triton kernels take torch.bfloat16"
    if rope_dim != ROPE_DIM:
        return f"qk_rope_head_dim is {rope_dim}, and the Triton kernels turn {ROPE_DIM} channels"
    if kv_format is not None and not isinstance(kv_format, PackedFp8Format):
        return f"the cache's KV format is {kv_format.name!r}, and the Triton kernels write 'fp8'"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton does not import ({error})"
    return None
