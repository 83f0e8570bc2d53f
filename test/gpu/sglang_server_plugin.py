"""What `sglang_server_check.py` adds to a server's worker processes: an SGLang plugin of its own, beside headfit's.

It makes the random weights, forces what every sequence continues with, counts the decode calls on the device (so that
each replay of a captured CUDA graph counts), and plants what an arm asks for: padding to 128, a neighbour rank's sinks.
In an eager server it also holds some decode calls' outputs against float64 over the cache that they read: what the
server's own kernel gives on the same arguments, and what comes out with a neighbour's sinks.

The arm's wishes come as JSON in `HEADFIT_SERVER_CHECK`, and what was seen goes to `<folder>/worker-<pid>.json`.
"""

import functools
import importlib
import inspect
import json
import math
import os
import re
import threading
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sglang_server_model as model
import torch

from headfit.hosts.sglang.capabilities import LOAD, ServerCode, read_server
from headfit.hosts.sglang.plugin import runs_a_model
from headfit.kv_cache import KVRegion, PagedPool
from headfit.testing.cases import reference_float64
from headfit.testing.measure import relative_norm

VARIABLE = "HEADFIT_SERVER_CHECK"
SAMPLER = "sglang.srt.layers.sampler.Sampler.forward"
WEIGHTS = "sglang.srt.model_loader.weight_utils.initialize_dummy_weights"
MAX_CHECKED_ROWS = 4  # tokens of a call that are held against float64, which is slow
WRITE_EVERY_S = 0.3


@dataclass(frozen=True, slots=True)
class Wishes:
    """What an arm wants of its workers.

    folder: where they write. pad_to: the heads that the server's kernel gets, 0: as the server has it.
    neighbour_sinks: every decode call gets the next rank's. check_every: hold every n-th decode step against float64,
    0: none; for servers without CUDA graphs only. own_host: NCCL takes each worker for another host's, so that several
    may share a GPU.
    """

    folder: str
    pad_to: int = 0
    neighbour_sinks: bool = False
    check_every: int = 0
    own_host: bool = False

    def as_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> "Wishes":
        return cls(**json.loads(os.environ[VARIABLE]))


def register() -> None:
    """The entry point. The hooks go around those of all other plugins, whatever order SGLang loads them in."""
    if VARIABLE not in os.environ or not runs_a_model():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wishes = Wishes.from_environment()
    if wishes.own_host:
        os.environ["NCCL_HOSTID"] = f"worker-{os.getpid()}"
    worker = Worker(wishes, read_server())
    apply = HookRegistry.apply_hooks

    def apply_last() -> None:
        HookRegistry.apply_hooks = apply
        worker.count_servers_kernel()
        for target, hook in worker.hooks().items():
            HookRegistry.register(target, hook, HookType.AROUND)
        HookRegistry.register(WEIGHTS, make_weights, HookType.REPLACE)
        apply()

    HookRegistry.apply_hooks = apply_last


def make_weights(network: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """In place of SGLang's dummy weights, whose +-1e-3 would leave attention without effect on the output.

    Norms and scales are 1, biases 0, matrices of unit gain; every rank draws a parameter's values from its name. An
    attention layer's last matrix has other values on each attention-TP rank: with the same ones everywhere, ranks that
    trade their sinks would trade their outputs, and the sum over them would be what it was.
    """
    attribute = read_server().rank_attribute
    ranks = {
        id(value): getattr(layer, attribute)
        for layer in network.modules()
        if hasattr(layer, "wo_b") and hasattr(layer, attribute)
        for value in layer.wo_b.parameters()
    }
    for name, parameter in network.state_dict(keep_vars=True).items():
        value = parameter.detach()
        if not torch.is_floating_point(value) or value.element_size() < 2 or name.endswith("_attn_sink_local"):
            continue
        if name.endswith("attn_sink"):
            layer_id = int(re.search(r"layers\.(\d+)\.", name)[1])
            value.copy_(model.sink_values(layer_id, value.shape[0], seed=0))
        elif value.dim() == 1:
            value.fill_(1.0 if "norm" in name or "scale" in name else 0.0)
        else:
            seed = zlib.crc32(f"{name} {ranks.get(id(parameter), '')}".encode())
            generator = torch.Generator(device=value.device).manual_seed(seed)
            gain = 1.0 if "embed" in name else value.shape[-1] ** -0.5
            value.normal_(0.0, gain, generator=generator)


class Worker:
    """One worker's hooks and counts. `code` names what to hook, as headfit reads it from the installed server."""

    def __init__(self, wishes: Wishes, code: ServerCode) -> None:
        self.wishes, self.code = wishes, code
        self.rows: list[dict[str, Any]] = []  # decode calls held against float64
        self._kernel: Any = None  # the server's own function
        self._counts: torch.Tensor | None = None  # int64 [2, layers + 1]: decode calls, and the server's kernel's
        self._tokens: torch.Tensor | None = None
        self._calls: dict[int, int] = {}
        self._layers: set[tuple[int, int, int]] = set()  # (attention-TP rank, size, heads) of the layers that ran
        self._samples, self._written = 0, 0.0
        self._state = threading.local()
        self._positions_at = None

    def hooks(self) -> dict[str, Any]:
        return {
            **dict.fromkeys(self.code.forward, self.around_forward),
            **dict.fromkeys(self.code.seams, self.around_seam),
            SAMPLER: self.around_sampler,
            LOAD: self.around_load,
        }

    def count_servers_kernel(self) -> None:
        """Put a counter directly around the server's function, inside of all hooks."""
        for dotted in self.code.seams:
            owner, _, name = dotted.rpartition(".")
            module = importlib.import_module(owner)
            kernel = getattr(module, name)

            @functools.wraps(kernel)
            def counted(*args: Any, _kernel: Any = kernel, **kwargs: Any) -> Any:
                self._count(1)
                return _kernel(*args, **kwargs)

            self._kernel = kernel
            setattr(module, name, counted)

    def around_load(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """What a captured graph will use is made before any capture."""
        result = original(*args, **kwargs)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._counts = torch.zeros(2, len(model.COMPRESS_RATIOS) + 1, dtype=torch.int64, device=device)
        self._tokens = model.forced_tokens().to(device)
        self.write()
        return result

    def around_forward(self, original: Any, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Within, decode calls are `layer`'s. Its rank is taken here: headfit may show the forward another one."""
        before = self._state.__dict__.copy()
        self._state.layer = layer
        self._state.batch = next((one for one in (*args, *kwargs.values()) if hasattr(one, "forward_mode")), None)
        self._state.rank, self._state.size = (
            getattr(layer, name) for name in (self.code.rank_attribute, self.code.size_attribute)
        )
        self._layers.add((self._state.rank, self._state.size, layer.n_local_heads))
        try:
            return original(layer, *args, **kwargs)
        finally:
            self._state.__dict__.clear()
            self._state.__dict__.update(before)

    def around_sampler(self, original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The sampled tokens, replaced by those that are due at their positions; log-probabilities stay as they are."""
        sampled = original(*args, **kwargs)
        if self._positions_at is None:
            self._positions_at = list(inspect.signature(inspect.unwrap(original)).parameters).index("positions")
        positions = kwargs["positions"] if "positions" in kwargs else args[self._positions_at]
        self._samples += 1
        if time.monotonic() - self._written > WRITE_EVERY_S:
            self.write()
        return self._tokens[positions[: sampled.shape[0]].long()].to(sampled.dtype)

    def around_seam(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        layer = getattr(self._state, "layer", None)
        if layer is None or args:
            self._count(0)
            return original(*args, **kwargs)
        self._count(0)
        if self.wishes.neighbour_sinks:
            kwargs["attn_sink"] = self.neighbour_sinks(layer, kwargs["attn_sink"])
        if self.wishes.pad_to:
            return self._padded(original, kwargs)
        answer = original(**kwargs)
        if not self.wishes.check_every or is_capturing(kwargs["q"]):
            return answer
        if tokens := num_real_tokens(self._state.batch, kwargs["q"].shape[0]):
            step = self._calls[layer.layer_id] = self._calls.get(layer.layer_id, -1) + 1
            turn, rest = divmod(step, self.wishes.check_every)
            if rest == 0:
                self._state.checking = True
                try:
                    found = self.errors(layer, original, answer[0], kwargs, checked_rows(tokens, turn))
                finally:
                    self._state.checking = False
                self.rows.append({"step": step, **found})
        return answer

    def _count(self, which: int) -> None:
        if self._counts is None or getattr(self._state, "checking", False):
            return
        layer = getattr(self._state, "layer", None)
        self._counts[which, -1 if layer is None else layer.layer_id] += 1

    def _padded(self, original: Any, call: dict[str, Any]) -> tuple[torch.Tensor, None]:
        """The server's call with `pad_to` heads, and of its output the heads that the server asked for."""
        q, sink, heads = call["q"], call["attn_sink"], self.wishes.pad_to
        wide = q.new_zeros(q.shape[0], 1, heads, q.shape[3])
        wide[:, :, : q.shape[2]] = q
        wide_sink = sink.new_zeros(heads)
        wide_sink[: sink.shape[0]] = sink
        out = original(**call | {"q": wide, "attn_sink": wide_sink})[0]
        return out[:, :, : q.shape[2]].contiguous(), None

    def own_sinks(self, layer: torch.nn.Module, *, shift: int = 0) -> torch.Tensor:
        """float32 [heads of a rank] from the layer's parameter; `shift` ranks further, in a circle.

        A layer that owns all heads has no neighbour: there it is half of the heads that trade places.
        """
        heads = layer.n_local_heads
        offset = heads if self._state.size > 1 else heads // 2
        everything = layer._parameters["attn_sink"].detach()
        return torch.roll(everything, -(self._state.rank * heads + shift * offset))[:heads]

    def neighbour_sinks(self, layer: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
        """As long as the sinks that the server gave, with the next rank's in front."""
        wrong = given.new_zeros(given.shape)
        wrong[: layer.n_local_heads] = self.own_sinks(layer, shift=1)
        return wrong

    def errors(
        self, layer: torch.nn.Module, seam: Any, out: torch.Tensor, call: dict[str, Any], checked: list[int]
    ) -> dict[str, Any]:
        """Relative norms against float64 over the cache: what was answered, the server's kernel, a neighbour's sinks.

        Over the tokens `checked`; NaN where float64 itself has a NaN in them. The reference takes the sinks from the
        parameter, not from the call. The server's kernel gets a schedule of its own, for the call's may belong to the
        answer. `refused`: whether headfit's check mode ended the call with a neighbour's sinks.
        """
        rows, heads = torch.tensor(checked, device=out.device), layer.n_local_heads
        expected, _ = reference_float64(
            q=call["q"][rows, 0, :heads],
            window=region(call, "k_cache", "indices", "topk_length", rows),
            compressed=region(call, "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length", rows),
            attn_sink=self.own_sinks(layer),
            softmax_scale=call["softmax_scale"],
        )
        schedule = type(call["tile_scheduler_metadata"])
        wrong = call | {"attn_sink": self.neighbour_sinks(layer, call["attn_sink"])}
        found = {
            "ours": out,
            "stock": self._kernel(**call | {"tile_scheduler_metadata": schedule()})[0],
            "fault": self._kernel(**wrong | {"tile_scheduler_metadata": schedule()})[0],
        }
        return {
            "layer": layer.layer_id,
            "compress_ratio": getattr(layer, "compress_ratio", None),
            "batch": call["q"].shape[0],
            "num_keys": [int(call[n].max()) for n in ("topk_length", "extra_topk_length") if call.get(n) is not None],
            **{name: error_norm(one[rows, 0, :heads], expected) for name, one in found.items()},
            "refused": is_refused(seam, wrong | {"tile_scheduler_metadata": schedule()}),
        }

    def write(self) -> None:
        from headfit.hosts.sglang import status

        counts = self._counts.tolist()
        seen = {
            "pid": os.getpid(),
            "decode_calls": counts[0][:-1],
            "stock_calls": counts[1][:-1],
            "outside_calls": [counts[0][-1], counts[1][-1]],
            "samples": self._samples,
            "layers": sorted(self._layers),
            "plugin": status(),
            "rows": self.rows,
        }
        path = Path(self.wishes.folder, f"worker-{os.getpid()}.json")
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(seen))
        temporary.replace(path)
        self._written = time.monotonic()


def is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def num_real_tokens(batch: Any, num_tokens: int) -> int:
    """How many of a call's tokens are a request's; with DP attention others behind them make the ranks' counts equal.

    `batch` is the server's `ForwardBatch`. A rank without a request runs an idle one, of nothing but such tokens.
    """
    mode = getattr(batch, "forward_mode", None)
    if mode is None:
        return num_tokens
    if mode.is_idle():
        return 0
    before = getattr(batch, "_original_batch_size", None)
    return min(before, num_tokens) if before is not None and mode.is_decode() else num_tokens


def checked_rows(num_tokens: int, turn: int) -> list[int]:
    """At most `MAX_CHECKED_ROWS` tokens, spread over all and one further each turn, so that every one has its turn."""
    count = min(MAX_CHECKED_ROWS, num_tokens)
    return sorted((turn + place * num_tokens // count) % num_tokens for place in range(count))


def is_refused(seam: Any, call: dict[str, Any]) -> bool:
    try:
        seam(**call)
    except RuntimeError as error:
        return str(error).startswith("HEADFIT_CHECK")
    return False


def error_norm(out: torch.Tensor, expected: torch.Tensor) -> float:
    """`relative_norm`, and NaN where it would raise in the middle of a server's step: nothing compares with a NaN."""
    return math.nan if expected.isnan().any() else relative_norm(out, expected)


def region(call: dict[str, Any], cache: str, indices: str, lengths: str, rows: torch.Tensor) -> KVRegion | None:
    """Some rows of the cache arguments of those names; None where the call has none."""
    if call.get(cache) is None:
        return None
    return KVRegion(PagedPool.from_packed_cache(cache, call[cache]), call[indices][rows, 0], call[lengths][rows])
