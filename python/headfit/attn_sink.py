"""A rank's attention sink, without a copy.

Every query head has one learned logit, its sink, that joins the softmax and whose share is dropped. The checkpoint
holds all of them in one float32 parameter `attn_sink` [num_heads]; a rank's kernel wants its own heads' sinks first,
in a run of `kernel_num_heads` floats. Copies of that run are what goes stale: after a weight update, under a captured
CUDA graph, or when the wrong rank's slice was taken.

So there is no copy. The parameter lives at the front of a longer storage::

    head 0 .. head num_heads-1 | 0.0 .. 0.0
               ^ a rank's run starts at its first head and is kernel_num_heads long

and the rank's sink is a view into it. What follows the rank's own heads in the view are other ranks' sinks and then
zeros: numbers for kernel heads whose output is dropped. Whatever writes the parameter in place writes the view.
"""

import torch
from torch import nn

from headfit.head_layout import HeadLayout


class AttnSink:
    """Keeps one module's sink parameter inside a padded storage and hands out views of it.

    The storage is made at the first `local()`, when weights are loaded, and keeps its address for the life of the
    module on a device. A parameter that was rebound (`param.data = other`, `load_state_dict(assign=True)`, a new
    `nn.Parameter`) is taken in again at the next `local()` or `ensure()`: its values are copied into the storage once
    and the parameter points there again, so a graph captured earlier replays with the new values.
    """

    def __init__(self, owner: nn.Module, *, num_heads: int, max_kernel_heads: int) -> None:
        self._owner = (owner,)  # in a tuple: a module attribute would register the owner as its own child
        self._num_heads = num_heads
        self._length = num_heads + max(num_heads, max_kernel_heads)
        self._storage: torch.Tensor | None = None

    def local(self, layout: HeadLayout) -> torch.Tensor:
        """The sinks that `layout`'s rank hands its kernel: float32 [kernel_num_heads], a view, this rank's heads first.

        The parameter itself where the rank owns all heads and nothing is padded.

        Raises:
            ValueError: the layout is of another head count, or wider than the storage.
            TypeError, RuntimeError: see `ensure`.
        """
        start = layout.local_slice.start
        stop = start + layout.kernel_num_heads
        if layout.num_heads != self._num_heads or stop > self._length:
            raise ValueError(
                f"layout: {layout} does not fit a sink of {self._num_heads} heads "
                f"with room for {self._length - self._num_heads} more"
            )
        storage = self.ensure()
        if start == 0 and layout.kernel_num_heads == self._num_heads:
            return self._owner[0].attn_sink
        return storage[start:stop]

    def ensure(self) -> torch.Tensor:
        """Bring the parameter back into the storage if something rebound it; the storage, float32 [longer].

        Costs a few comparisons on the host when nothing changed. Call it before replaying a captured graph.

        Raises:
            TypeError: the parameter is not of a floating dtype (a bfloat16 or float16 one is widened).
            ValueError: its shape is not [num_heads].
            RuntimeError: it has no values yet (meta device), or it would have to be copied while a graph is captured.
        """
        param = self._owner[0].attn_sink
        storage = self._storage
        if storage is not None and self._lives_in(storage, param):
            return storage
        self._check(param)
        # An inference tensor could not be written in place by a later weight update outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if storage is None or storage.device != param.device:
                storage = torch.zeros(self._length, dtype=torch.float32, device=param.device)
            storage[: self._num_heads].copy_(param.detach())
            if param.is_inference():  # made under inference mode: it could not be sliced or written later
                param = nn.Parameter(storage[: self._num_heads], requires_grad=param.requires_grad)
                self._owner[0].attn_sink = param
            else:
                param.data = storage[: self._num_heads]
        self._storage = storage
        return storage

    def _lives_in(self, storage: torch.Tensor, param: torch.Tensor) -> bool:
        return (
            param.data_ptr() == storage.data_ptr()
            and param.device == storage.device
            and param.dtype == torch.float32
            and param.shape == (self._num_heads,)
            and param.is_contiguous()
        )

    def _check(self, param: torch.Tensor) -> None:
        if not param.dtype.is_floating_point:
            raise TypeError(f"attn_sink: dtype {param.dtype}, allowed: float32 (bfloat16 and float16 are widened)")
        if param.shape != (self._num_heads,):
            raise ValueError(f"attn_sink: shape {tuple(param.shape)}, allowed: ({self._num_heads},)")
        if param.is_meta:
            raise RuntimeError("attn_sink: on the meta device; load the weights before the first forward")
        if param.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("attn_sink: rebound since the last forward; run one forward before capturing a graph")


def ensure_sinks(model: nn.Module) -> int:
    """Run `AttnSink.ensure` for every module under `model` that owns a sink, draft layers too; how many there are."""
    sinks = [module.sink for module in model.modules() if isinstance(getattr(module, "sink", None), AttnSink)]
    for sink in sinks:
        sink.ensure()
    return len(sinks)
