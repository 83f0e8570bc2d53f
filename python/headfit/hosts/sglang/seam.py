"""The seam: `flash_mla_with_kvcache`, the function that a server's decode calls, answered by a headfit backend.

The call, all by keyword (b query tokens, h padded heads, the rank's own first):

    q bfloat16 [b, 1, h, 512]; k_cache fp8 or uint8 [pages, page_size, 1, 584]; indices int32 [b, 1, n];
    topk_length int32 [b]; attn_sink float32 [>= the rank's heads]; extra_k_cache, extra_indices_in_kvcache and
    extra_topk_length likewise, or all None

and its answer: out bfloat16 [b, 1, h, 512] and lse float32 [b, h, 1], natural logarithm, +inf where a row has no
valid key (FlashMLA's convention, which this function's callers know). The backend reads the rank's rows of q and writes
the same rows of out, both in place; the other rows of out and lse are left as they were allocated, for the caller drops
them. How many rows are the rank's is the layer's to say, for q is padded: the layer that is running is set around its
forward. Shapes and sizes come from the tensors alone and nothing is read back, so that a CUDA graph can capture it.

A call of another form goes to the server's own function, with one warning a reason.

Source of the signature: `sgl_kernel/flash_mla.py` of sglang-kernel 0.4.5 and SGLang 0.5.23's `flash_mla_interface.py`.
"""

import logging
import math
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headfit.backends.base import AttentionBackend, check_indices
from headfit.backends.exact_heads import ExactHeadsBackend
from headfit.kernels.sparse_mqa_ref import sparse_mqa_ref
from headfit.kv_cache import HEAD_DIM, KVRegion, PagedPool

logger = logging.getLogger(__name__)

_REGIONS = {
    "window": ("k_cache", "indices", "topk_length"),
    "compressed": ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"),
}
_READ = {"q", "attn_sink", "softmax_scale", *(name for names in _REGIONS.values() for name in names)}
_IGNORED = {"tile_scheduler_metadata"}  # FlashMLA's split plan
_FIXED = {
    "block_table": None,
    "cache_seqlens": None,
    "head_dim_v": HEAD_DIM,
    "is_fp8_kvcache": True,
    "causal": False,
    "num_splits": None,
    "descale_q": None,
    "descale_k": None,
    "kv_format": None,
    "use_legacy": True,
}
_NO_DEFAULT = ("q", "attn_sink", *_REGIONS["window"], "head_dim_v", "is_fp8_kvcache")
# Each head of each token of an eager call may differ from float32 arithmetic over the same keys by this much in
# relative norm: probabilities and output in bf16 come to some 3e-3; a neighbour rank's sink or a wrong slot to more.
CHECK_TOLERANCE = 2e-2


class _UnknownForm(Exception):
    """Why a call is not one that the seam answers."""


class Answer(tuple):
    """(out, lse) as the callee returns it, with lse made when it is asked for: the server's decode never does."""

    def __new__(cls, out: torch.Tensor, lse: Callable[[], torch.Tensor]) -> "Answer":
        answer = super().__new__(cls, (out, None))
        answer._lse = lse
        return answer

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield self[0]
        yield self[1]

    def __getitem__(self, index):
        if index == 0:
            return tuple.__getitem__(self, 0)
        if index in (1, -1):
            return self._lse()
        return (self[0], self[1])[index]


@dataclass(slots=True)
class Run:
    """One forward of a layer: its own sinks, where calls are checked; its calls that came to the seam."""

    layer: nn.Module
    sinks: torch.Tensor | None
    answered: int = 0
    left: str = ""  # why the last one that was not answered was not


class Seam:
    """Answers the decode calls of the layer that is running with `backend`.

    Args:
        backend: runs any head count exactly.
        max_heads: layers with more heads a rank stay with the server's kernel; None: no limit.
        check_sinks: given a layer, the sinks that are its own, float32 [the rank's heads]. With it each call outside a
            capture is compared with the reference under those sinks, whichever the call brought.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        *,
        max_heads: int | None = None,
        check_sinks: Callable[[nn.Module], torch.Tensor] | None = None,
    ) -> None:
        self.backend, self.max_heads, self.check_sinks = backend, max_heads, check_sinks
        self.refused: dict[int, str] = {}  # head count -> why its calls are left to the server
        self.served = 0  # calls; a captured one counts once, when it is captured
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that were served
        self.captured = 0
        self.checked = 0
        self.passed_on: Counter[str] = Counter()  # by reason
        self._thread = threading.local()

    @contextmanager
    def running(self, layer: nn.Module) -> Iterator[Run]:
        """Within, decode calls are `layer`'s, and its own sinks those that it has on entry."""
        before = getattr(self._thread, "run", None)
        self._thread.run = Run(layer, None if self.check_sinks is None else self.check_sinks(layer))
        try:
            yield self._thread.run
        finally:
            self._thread.run = before

    def call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stands in for `original`, same arguments and same result.

        Raises:
            RuntimeError: in check mode, where the result differs from the reference.
            IndexError: in check mode, an index past its pool.
        """
        run = getattr(self._thread, "run", None)
        if run is None:  # another model's call, or a prefill graph's that runs outside the layer
            self._pass_on("no layer of ours is running")
            return original(*args, **kwargs)
        try:
            if args:
                raise _UnknownForm(f"{len(args)} positional arguments")
            answer = self._answer(run, kwargs)
            run.answered += 1
            return answer
        except (_UnknownForm, ValueError, TypeError) as error:
            run.left = str(error)
            self._pass_on(run.left)
            return original(*args, **kwargs)

    def _answer(self, run: Run, call: Mapping[str, Any]) -> Answer:
        num_heads = run.layer.n_local_heads
        if self.max_heads is not None and num_heads > self.max_heads:
            raise _UnknownForm(f"{num_heads} heads a rank, more than {self.max_heads}")
        if num_heads in self.refused:
            raise _UnknownForm(f"{num_heads} heads a rank: {self.refused[num_heads]}")
        _check_form(call, num_heads)
        q, sink = call["q"], call["attn_sink"][:num_heads]
        regions = {name: _region(name, call) for name in _REGIONS}
        present = tuple(region for region in regions.values() if region is not None)
        scale = q.shape[-1] ** -0.5 if call.get("softmax_scale") is None else call["softmax_scale"]
        arguments = {"q": q[:, 0, :num_heads], **regions, "attn_sink": sink, "softmax_scale": scale}
        out = torch.empty_like(q)
        rows = out[:, 0, :num_heads]
        capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        if checks := self.check_sinks is not None and not capturing:
            check_indices(present)
        if isinstance(self.backend, ExactHeadsBackend):
            _, lse = self.backend.decode(**arguments, out=rows)
        else:
            o, lse = self.backend.decode(**arguments)
            rows.copy_(o)
        self._count(run.layer, capturing)
        if checks:
            self.checked += 1
            of_layer = {"q": arguments["q"], "regions": present, "attn_sink": run.sinks, "softmax_scale": scale}
            _compare(getattr(run.layer, "layer_id", None), rows, **of_layer)
        return Answer(out, lambda: _callee_lse(lse, q.shape[2]))

    def _count(self, layer: nn.Module, capturing: bool) -> None:
        self.served += 1
        self.captured += capturing
        self.layers.add(layer)
        if self.served in (1, 100, 10_000, 1_000_000):
            said = "headfit answered %d decode calls of %d layers in process %d"
            logger.info(said, self.served, len(self.layers), os.getpid())

    def _pass_on(self, reason: str) -> None:
        self.passed_on[reason] += 1
        if self.passed_on[reason] == 1:
            logger.warning("headfit leaves a decode call to the server's kernel: %s", reason)


def _check_form(call: Mapping[str, Any], num_heads: int) -> None:
    """Refuse what the backend's own checks cannot see; those cover dtypes, row counts and strides."""
    if unknown := set(call) - _READ - _IGNORED - set(_FIXED):
        raise _UnknownForm(f"argument {', '.join(sorted(unknown))}")
    for name in _NO_DEFAULT:
        if call.get(name) is None:
            raise _UnknownForm(f"no {name}")
    for name, wanted in _FIXED.items():
        if name in call and (call[name] is not wanted if wanted is None else call[name] != wanted):
            raise _UnknownForm(f"{name}: {_described(call[name])}, allowed: {wanted}")
    given = [call.get(name) is not None for name in _REGIONS["compressed"]]
    if any(given) != all(given):
        raise _UnknownForm("only some of the extra cache's arguments")
    q, sink = call["q"], call["attn_sink"]
    if q.dim() != 4 or q.shape[1] != 1 or q.shape[3] != HEAD_DIM or q.shape[2] < num_heads:
        raise _UnknownForm(f"q: shape {tuple(q.shape)}, allowed: [tokens, 1, at least {num_heads}, {HEAD_DIM}]")
    if q.dtype != torch.bfloat16:
        raise _UnknownForm(f"q: dtype {q.dtype}, allowed: torch.bfloat16")
    if sink.dim() != 1 or sink.shape[0] < num_heads:
        raise _UnknownForm(f"attn_sink: shape {tuple(sink.shape)}, allowed: [at least {num_heads}]")


def _region(name: str, call: Mapping[str, Any]) -> KVRegion | None:
    cache, indices, lengths = (call.get(argument) for argument in _REGIONS[name])
    if cache is None:
        return None
    if indices.dim() != 3 or indices.shape[1] != 1:
        raise _UnknownForm(f"{_REGIONS[name][1]}: shape {tuple(indices.shape)}, allowed: [tokens, 1, keys]")
    return KVRegion(PagedPool.from_packed_cache(_REGIONS[name][0], cache), indices[:, 0], lengths)


def _callee_lse(lse: torch.Tensor, padded_heads: int) -> torch.Tensor:
    whole = torch.empty(lse.shape[0], padded_heads, 1, dtype=torch.float32, device=lse.device)
    whole[:, : lse.shape[1], 0] = torch.where(lse == float("-inf"), float("inf"), lse)
    return whole


def _compare(layer_id: int | None, computed: torch.Tensor, *, attn_sink: torch.Tensor, **arguments: Any) -> None:
    """Every head of every token, [tokens, heads, 512], by itself. Waits for the device.

    What is not finite agrees with the same and nothing else: the server may compute rows that it never reads, from
    whatever they hold. The sinks are weights, and may not be NaN.

    Args:
        arguments: the reference's, besides the sinks.

    Raises:
        RuntimeError: naming the layer, the token of the batch, the head and the relative error.
    """
    if attn_sink.isnan().any():
        raise RuntimeError(f"HEADFIT_CHECK: layer {layer_id}, attn_sink: NaN among the rank's own")
    if computed.shape[0] == 0:
        return
    computed, expected = computed.double(), sparse_mqa_ref(attn_sink=attn_sink, **arguments)[0].double()
    same = ~expected.isfinite() & ((computed == expected) | (computed.isnan() & expected.isnan()))
    expected, difference = expected.masked_fill(same, 0), (computed - expected).masked_fill(same, 0)
    scale = expected.norm(dim=-1)
    errors = difference.norm(dim=-1) / torch.where(scale > 0, scale, 1)
    errors = errors.nan_to_num(nan=math.inf, posinf=math.inf).flatten()
    worst = int(errors.argmax())
    if not (error := errors[worst].item()) <= CHECK_TOLERANCE:
        token, head = divmod(worst, computed.shape[1])
        where = f"layer {layer_id}, token {token} of {computed.shape[0]}, head {head}"
        raise RuntimeError(f"HEADFIT_CHECK: {where} is off by {error:.3g}, allowed {CHECK_TOLERANCE}")


def _described(value: Any) -> str:
    return f"tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
