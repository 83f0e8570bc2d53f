"""Attention backends by name. Nothing is substituted: `auto` says what it took and why, once."""

import logging
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from headfit.backends import flashmla, reference, sparse_mqa_cuda, unified_kv_triton
from headfit.backends.base import AttentionBackend, KernelSupport
from headfit.kv_cache import ModelDtypeFormat, PackedFp8Format

logger = logging.getLogger(__name__)

KERNELS: tuple[KernelSupport, ...] = (
    reference.SUPPORT,
    flashmla.SUPPORT,
    unified_kv_triton.SUPPORT,
    sparse_mqa_cuda.SUPPORT,
)
_FACTORIES = {
    reference.SUPPORT.name: reference.ReferenceBackend,
    flashmla.SUPPORT.name: flashmla.FlashMLABackend,
    unified_kv_triton.SUPPORT.name: unified_kv_triton.UnifiedKVTritonBackend,
    sparse_mqa_cuda.SUPPORT.name: sparse_mqa_cuda.SparseMQACudaBackend,
}
BACKEND_NAMES = tuple(kernel.name for kernel in KERNELS)
_FASTEST_FIRST = (sparse_mqa_cuda.SUPPORT, flashmla.SUPPORT, unified_kv_triton.SUPPORT, reference.SUPPORT)
_KV_FORMATS = (PackedFp8Format.name, ModelDtypeFormat.name)
# A choice before heads and batch are known. Measured on sm90 (benchmark/results/decode_kernel-h200.json), either exact
# kernel beats padded heads in the mean at 8 and 16 heads a rank; the Triton one does not at 32 and 64.
_NOT_BY_AUTO = {(flashmla.SUPPORT.name, "sm90"): "padded heads, slower than exact ones at 8 and 16 heads a rank"}


def support(name: str) -> KernelSupport:
    """What the backend `name` runs, without building it.

    Raises:
        ValueError: an unknown name.
    """
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    raise ValueError(f"backend: {name!r}, allowed: auto, {', '.join(BACKEND_NAMES)}")


def choose(
    name: str, device: torch.device | str, *, kv_format: str = "fp8", dtype: torch.dtype = torch.bfloat16
) -> tuple[str, str]:
    """The backend that `name` ("auto" or one of `BACKEND_NAMES`) means, and the reason.

    Args:
        device: where the layers run.
        kv_format: the caches' format, "fp8" or "model".
        dtype: of the queries.

    Raises:
        ValueError: an unknown name, device, format or dtype, a device that torch does not have here, or a backend that
            cannot run here: what is in the way.
    """
    device, architecture = _found(device)
    if kv_format not in _KV_FORMATS:
        raise ValueError(f"kv_format: {kv_format!r}, allowed: {', '.join(map(repr, _KV_FORMATS))}")
    if dtype not in reference.SUPPORT.dtypes:
        raise ValueError(f"dtype: {dtype}, allowed: {', '.join(map(str, reference.SUPPORT.dtypes))}")
    if name != "auto":
        if obstacle := _obstacle(support(name), device, architecture, kv_format, dtype, asked=True):
            raise ValueError(f"backend {name}: {obstacle}")
        return name, "asked for"
    passed_over = []
    for kernel in _FASTEST_FIRST:
        obstacle = _obstacle(kernel, device, architecture, kv_format, dtype, asked=False)
        if obstacle is None:
            return kernel.name, "; ".join(["the fastest that runs here", *passed_over])
        passed_over.append(f"not {kernel.name}: {obstacle}")
    raise AssertionError("the reference runs everywhere")


def create(
    name: str,
    *,
    device: torch.device | str = "cpu",
    kv_format: str = "fp8",
    dtype: torch.dtype = torch.bfloat16,
    max_batch: int | None = None,
    pdl: bool = True,
) -> AttentionBackend:
    """Build the backend that `name` means; arguments and errors as `choose` has them.

    Args:
        max_batch: sequences that decode at a time. Where "auto" takes a padding backend, it then plans with the head
            count that was measured fastest there, instead of the smallest that holds a rank's heads.
        pdl: of the Hopper kernel, see `SparseMQACudaBackend`; other backends never overlap.
    """
    if max_batch is not None:
        flashmla.check_batch("max_batch", max_batch)
    chosen, reason = choose(name, device, kv_format=kv_format, dtype=dtype)
    _log_choice(chosen, reason)
    options: dict[str, Any] = {}
    if chosen == sparse_mqa_cuda.SUPPORT.name:
        options = {"pdl": pdl}
    if chosen == flashmla.SUPPORT.name:
        options = {"device": device}
        if name == "auto" and max_batch is not None:
            options["num_heads"] = flashmla.measured_num_heads(flashmla.architecture(device), max_batch)
    return _FACTORIES[chosen](**options)


def _found(device: torch.device | str) -> tuple[torch.device, str | None]:
    """The device, and its architecture such as "sm90" where it is a CUDA device."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: {device!r}, allowed: cpu, cuda or another that torch knows") from error
    if found.type != "cuda":
        return found, None
    try:
        return found, "sm{}{}".format(*torch.cuda.get_device_capability(found))
    except (AssertionError, RuntimeError) as error:  # a torch without CUDA, no driver, no such device
        gpus = torch.cuda.device_count()
        allowed = f"cpu or cuda:0 to cuda:{gpus - 1}" if gpus else "cpu, torch has no CUDA device"
        raise ValueError(f"device: {device}, allowed here: {allowed} ({error})") from error


def _obstacle(
    kernel: KernelSupport,
    device: torch.device,
    architecture: str | None,
    kv_format: str,
    dtype: torch.dtype,
    *,
    asked: bool,
) -> str | None:
    """Why `kernel` cannot run there, None where it can."""
    if kernel.name == reference.SUPPORT.name:
        return None
    interpreted = asked and kernel.name == unified_kv_triton.SUPPORT.name and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"needs a CUDA GPU, the device is {device.type}"
    if architecture is not None:
        if architecture not in kernel.architectures:
            return f"needs {' or '.join(kernel.architectures)}, the GPU is {architecture}"
        if not asked and (reason := _NOT_BY_AUTO.get((kernel.name, architecture))):
            return reason
    if kv_format != "fp8":
        return f"reads 'fp8' caches, the KV format is {kv_format!r}"
    if dtype not in kernel.dtypes:
        return f"takes queries of {' or '.join(map(str, kernel.dtypes))}, they are {dtype}"
    if kernel.name == flashmla.SUPPORT.name:
        return flashmla.obstacle()
    if missing := [module for module in kernel.modules if not _installed(module)]:
        return f"{' and '.join(missing)} not installed"
    return sparse_mqa_cuda.obstacle() if kernel.name == sparse_mqa_cuda.SUPPORT.name else None


def _installed(module: str) -> bool:
    package = module.partition(".")[0]
    if find_spec(package) is None:
        return False
    try:
        return package == module or import_module(module) is not None
    except ImportError:
        return False


@cache
def _log_choice(name: str, reason: str) -> None:
    logger.info("attention backend %s: %s", name, reason)
