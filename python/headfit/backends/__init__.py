"""Attention backends by name. Nothing is substituted: `auto` says what it took and why, once."""

import logging
from functools import cache

import torch

from headfit.backends import flashmla, reference
from headfit.backends.base import AttentionBackend, KernelSupport

logger = logging.getLogger(__name__)

KERNELS: tuple[KernelSupport, ...] = (reference.SUPPORT, flashmla.SUPPORT)
_FACTORIES = {reference.SUPPORT.name: reference.ReferenceBackend}
BACKEND_NAMES = tuple(_FACTORIES)


def choose(name: str, device: torch.device | str) -> tuple[str, str]:
    """The backend that `name` ("auto" or one of `BACKEND_NAMES`) means on `device`, and the reason.

    Raises:
        ValueError: an unknown name, or one that cannot run here.
    """
    if name == "auto":
        return "reference", f"the only backend so far; it runs on any device, {torch.device(device).type} too"
    if name not in BACKEND_NAMES:
        raise ValueError(f"backend: {name!r}, allowed: auto, {', '.join(BACKEND_NAMES)}")
    return name, "asked for"


def create(name: str, *, device: torch.device | str = "cpu") -> AttentionBackend:
    """Build the backend that `name` means on `device`; see `choose`."""
    chosen, reason = choose(name, device)
    _log_choice(chosen, reason)
    return _FACTORIES[chosen]()


@cache
def _log_choice(name: str, reason: str) -> None:
    logger.info("attention backend %s: %s", name, reason)
