"""A rank's attention sink, a view of the one parameter.

Every query head has one learned logit, its sink, that joins the softmax and whose share is dropped. The checkpoint
holds all of them in one float32 parameter `attn_sink` [num_heads]; a rank's kernel wants its own heads' sinks first,
in a run of `kernel_num_heads` floats. Copies of that run are what goes stale: after a weight update, under a captured
CUDA graph, or when the wrong rank's slice was taken.

So there is no copy. The parameter is made at the front of a longer storage, its home::

    head 0 .. head num_heads-1 | 0.0 .. 0.0
               ^ a rank's run starts at its first head and is kernel_num_heads long

and the rank's sink is a view into it. What follows the rank's own heads in the view are other ranks' sinks and then
zeros: numbers for kernel heads whose output is dropped. Whatever writes the parameter's memory writes the view.

A caller may bind the parameter to memory of its own (`param.data = flat_buffer[...]`, `load_state_dict(assign=True)`).
That memory is then what the view shows. Only where it ends before the kernel's heads do, a padded copy is made again
in every forward, which a captured graph captures too.
"""

import logging

import torch
from torch import nn

from headfit.head_layout import HeadLayout

logger = logging.getLogger(__name__)


class AttnSink:
    """Makes `owner.attn_sink` and hands out a rank's view of it.

    Args:
        owner: the module that gets the parameter.
        max_kernel_heads: the widest run that `local` will be asked for.
    """

    def __init__(
        self, owner: nn.Module, *, num_heads: int, max_kernel_heads: int, device: torch.device | str | None = None
    ) -> None:
        self._owner = owner
        self._num_heads = num_heads
        self._length = num_heads + max(num_heads, max_kernel_heads)
        self._copy: torch.Tensor | None = None
        self._move_home(torch.zeros(num_heads, dtype=torch.float32, device=device))

    def local(self, layout: HeadLayout) -> torch.Tensor:
        """The sinks that `layout`'s rank hands its kernel: float32 [kernel_num_heads], this rank's heads first.

        The parameter itself where the rank owns all heads and nothing is padded.

        Raises:
            ValueError: the layout is of another head count or too wide; the parameter is not [num_heads].
            TypeError: the parameter is not of a floating dtype (a bfloat16 or float16 one is widened).
            RuntimeError: it has no values yet (meta device), or its first padded copy would fall into a graph capture.
        """
        start = layout.local_slice.start
        stop = start + layout.kernel_num_heads
        if layout.num_heads != self._num_heads or stop > self._length:
            raise ValueError(
                f"layout: {layout} does not fit a sink of {self._num_heads} heads "
                f"with room for {self._length - self._num_heads} more"
            )
        param = self._parameter()
        if param.dtype == torch.float32 and param.is_contiguous():
            if (start, stop) == (0, self._num_heads):
                return param
            if stop <= self._num_heads:
                return param.detach()[start:stop]
            if self._is_home(param):
                return self._home[start:stop]
        return self._padded_copy(param)[start:stop]

    def after_apply(self, before: torch.Tensor) -> None:
        """Give the parameter a home where `nn.Module._apply` has just moved it; a cast does not round it.

        Args:
            before: the parameter's data before the move.
        """
        param = self._parameter(allow_meta=True)
        cast = param.dtype != torch.float32 and not before.is_meta
        self._move_home(before.to(param.device, torch.float32) if cast else param.detach())

    def _move_home(self, values: torch.Tensor) -> None:
        # An inference tensor could not be written in place by a later weight update outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            home = torch.zeros(self._length, dtype=torch.float32, device=values.device)
            home[: self._num_heads].copy_(values)
            old = self._owner._parameters.get("attn_sink")
            requires_grad = old is not None and old.requires_grad
            if old is None or old.is_inference() or old.device != home.device:
                self._owner.attn_sink = nn.Parameter(home[: self._num_heads], requires_grad=requires_grad)
            else:
                old.data = home[: self._num_heads]
        self._home = home

    def _is_home(self, param: torch.Tensor) -> bool:
        return param.device == self._home.device and param.data_ptr() == self._home.data_ptr()

    def _padded_copy(self, param: torch.Tensor) -> torch.Tensor:
        if self._copy is None or self._copy.device != param.device:
            if param.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "attn_sink: rebound since the last forward; run one forward before capturing a graph"
                )
            logger.warning(
                "attn_sink was bound to %s memory without room for the kernel's heads: copied in every forward",
                param.dtype,
            )
            with torch.inference_mode(False):
                self._copy = torch.zeros(self._length, dtype=torch.float32, device=param.device)
        self._copy[: self._num_heads].copy_(param.detach())
        return self._copy

    def _parameter(self, *, allow_meta: bool = False) -> torch.Tensor:
        param = self._owner._parameters.get("attn_sink")
        if param is None:
            raise RuntimeError("attn_sink: the module has no such parameter any more")
        if not param.dtype.is_floating_point:
            raise TypeError(f"attn_sink: dtype {param.dtype}, allowed: float32 (bfloat16 and float16 are widened)")
        if param.shape != (self._num_heads,):
            raise ValueError(f"attn_sink: shape {tuple(param.shape)}, allowed: ({self._num_heads},)")
        if param.is_meta and not allow_meta:
            raise RuntimeError("attn_sink: on the meta device; load the weights before the first forward")
        return param


def sink_addresses(model: nn.Module) -> tuple[int, ...]:
    """Where the values of every sink under `model` live, draft layers too.

    A captured CUDA graph reads these addresses. Writes into the parameters show in the next replay; if the addresses
    differ from those at the capture, a parameter was rebound and the graph must be captured again.
    """
    return tuple(
        module.attn_sink.data_ptr() for module in model.modules() if isinstance(getattr(module, "sink", None), AttnSink)
    )
