"""Sinks of a server's attention layers: the rank's padded run as a view of the parameter, for good.

A server's layer holds all heads' sinks in one float32 parameter [num_heads] and hands its kernel a padded copy of the
rank's own. Here the parameter itself is moved to the front of a longer buffer, its home (as in `headfit.attn_sink`)::

    head 0 .. head num_heads-1 | 0.0 .. 0.0
               ^ the rank's run: its own heads first, then numbers for heads whose output is dropped

Whatever writes the parameter's memory (a loader, an update from disk, tensors or another process) has written the run,
and a captured CUDA graph reads it at the next replay. Only a parameter bound to other memory leaves its home: `refresh`
brings its values back into the home, in place, and binds it there again. The slice is taken from the layer's rank and
head count at the time of the call, so a server that switches its attention TP between prefill and decode gets the
right one each time.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from headfit.backends import flashmla
from headfit.head_layout import HeadLayout, plan_heads

_HOME = "_headfit_sink_home"
_PADDING = max(flashmla.SUPPORT.num_heads)


class SwappedSink(ValueError):
    """A layer runs with another tensor in its parameter's place, as one that the server keeps in the CPU's memory."""


class LayerSinks:
    """The sinks of every attention layer of this process, draft layers too.

    Args:
        shape: how the server's layer treats its sink, a key of the table in `capabilities`.
        rank_attribute, size_attribute: where a layer keeps its attention-TP rank and size.
    """

    def __init__(self, *, shape: str, rank_attribute: str, size_attribute: str) -> None:
        self.shape = shape
        self._rank_attribute, self._size_attribute = rank_attribute, size_attribute
        self._layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return tuple(self._layers)

    def __contains__(self, layer: nn.Module) -> bool:
        return layer in self._layers

    def layout(self, layer: nn.Module) -> HeadLayout:
        """The layer's share of the heads, padded as FlashMLA wants it.

        Raises:
            ValueError: heads that do not divide, or more than FlashMLA runs.
        """
        layout = plan_heads(
            num_heads=layer.n_heads,
            attn_tp_size=getattr(layer, self._size_attribute),
            attn_tp_rank=getattr(layer, self._rank_attribute),
            supported=flashmla.SUPPORT.num_heads,
        )
        if layout.num_local_heads != layer.n_local_heads:
            raise ValueError(f"n_local_heads: {layer.n_local_heads}, the layer's TP gives {layout.num_local_heads}")
        return layout

    def adopt(self, layer: nn.Module) -> None:
        """Give a new layer's sink its home. The server allocates weights at this time and place, and so does this."""
        self.layout(layer)
        self._layers.add(layer)
        self.refresh(layer)

    def refresh(self, layer: nn.Module) -> None:
        """Bring a sink that was bound to other memory home, in place. Nothing is done where it never left.

        Raises:
            TypeError, ValueError: the parameter is not float32 [num_heads].
            SwappedSink: a tensor that is no parameter stands in its place.
            RuntimeError: it left while a CUDA graph is being captured.
        """
        param = layer._parameters.get("attn_sink")
        if param is None or param.shape != (layer.n_heads,):
            raise ValueError(f"attn_sink: {None if param is None else tuple(param.shape)}, allowed: ({layer.n_heads},)")
        if param.dtype != torch.float32:
            raise TypeError(f"attn_sink: dtype {param.dtype}, allowed: torch.float32")
        if param.is_meta:
            return
        if not isinstance(param, nn.Parameter):
            raise SwappedSink("attn_sink: another tensor in the parameter's place while the layer runs (CPU offload)")
        home = layer.__dict__.get(_HOME)
        if home is None or home.device != param.device:
            home = self._move(layer, param)
        elif param.data_ptr() != home.data_ptr():
            _refuse_capture(param)
            with torch.no_grad():
                home[: layer.n_heads].copy_(param.detach())
            param.data = home[: layer.n_heads]
        if self.shape == "cached" and getattr(layer, self._size_attribute) > 1:
            layer._attn_sink_local = self.local(layer)

    def local(self, layer: nn.Module, kernel_num_heads: int | None = None) -> torch.Tensor:
        """The rank's run: float32 [kernel_num_heads], its own heads first; None: as wide as FlashMLA wants it.

        Raises:
            ValueError: fewer than the rank's heads, or more than there is room for.
        """
        layout = self.layout(layer)
        width = layout.kernel_num_heads if kernel_num_heads is None else kernel_num_heads
        if not layout.num_local_heads <= width <= _PADDING:
            raise ValueError(f"kernel_num_heads: {width}, allowed: {layout.num_local_heads} to {_PADDING}")
        start = layout.local_slice.start
        return layer.__dict__[_HOME][start : start + width]

    def own(self, layer: nn.Module) -> torch.Tensor:
        """float32 [n_local_heads]: the rank's sinks read from the parameter itself, for checks of `local`."""
        start = getattr(layer, self._rank_attribute) * layer.n_local_heads
        # `data`: a parameter that was made in inference mode and has its home here could not be sliced itself.
        return layer._parameters["attn_sink"].data[start : start + layer.n_local_heads]

    def release(self, layer: nn.Module) -> None:
        """Leave a layer to the server, with a sink that it has to copy anew."""
        self._layers.discard(layer)
        layer.__dict__.pop(_HOME, None)
        if self.shape == "cached" and getattr(layer, self._size_attribute, 1) > 1:
            layer._attn_sink_local = None

    @contextmanager
    def padded_to_kernel(self, layer: nn.Module) -> Iterator[None]:
        """Shape `all_heads`: within, the layer's forward pads to what the kernel wants, this rank's heads first.

        It then sees the padded width as its head count, rank 0 and the rank's own run as `attn_sink`; an instance
        attribute hides the parameter of that name, which stays where it is.
        """
        if self.shape != "all_heads" or getattr(layer, self._size_attribute) == 1:
            yield
            return
        before = layer.n_heads, layer.tp_rank
        sink = self.local(layer)
        layer.n_heads, layer.tp_rank = self.layout(layer).kernel_num_heads, 0
        layer.__dict__["attn_sink"] = sink
        try:
            yield
        finally:
            del layer.__dict__["attn_sink"]
            layer.n_heads, layer.tp_rank = before

    def _move(self, layer: nn.Module, param: nn.Parameter) -> torch.Tensor:
        _refuse_capture(param)
        # An inference tensor could not be written in place by a later weight update outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            home = torch.zeros(layer.n_heads + _PADDING, dtype=torch.float32, device=param.device)
            home[: layer.n_heads].copy_(param.detach())
            param.data = home[: layer.n_heads]
        setattr(layer, _HOME, home)
        return home


def _is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _refuse_capture(param: torch.Tensor) -> None:
    if _is_capturing(param):
        raise RuntimeError("attn_sink: bound to other memory since the last forward; run one before capturing a graph")
