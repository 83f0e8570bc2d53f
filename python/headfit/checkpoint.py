"""Attention weights out of a safetensors checkpoint, each rank reading only its own slices.

Three spellings of the same tensors exist: the original checkpoint's (`layers.0.attn.wq_a.weight`), transformers'
(`model.layers.0.self_attn.q_a_proj.weight`), and what transformers writes back: either of them with `kv_norm` shortened
to `norm`. Block scales of fp8 weights end in `.scale` or `.weight_scale_inv`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from headfit.layers.linear import ParallelLinear
from headfit.models.deepseek_v4 import FP8_LINEARS, MQALayer

ATTENTION_TENSOR = re.compile(r"^(?:model\.)?layers\.(\d+)\.(?:attn|self_attn)\.(.+)$")

# Module paths in transformers' spelling, longest first, and the checkpoint's own.
_TRANSFORMERS_NAMES = (
    ("compressor.indexer.scorer.weights_proj", "indexer.weights_proj"),
    ("compressor.indexer.weights_proj", "indexer.weights_proj"),
    ("compressor.indexer.q_b_proj", "indexer.wq_b"),
    ("compressor.indexer.kv_proj", "indexer.compressor.wkv"),
    ("compressor.indexer.gate_proj", "indexer.compressor.wgate"),
    ("compressor.indexer.kv_norm", "indexer.compressor.norm"),
    ("compressor.indexer.norm", "indexer.compressor.norm"),
    ("compressor.indexer.position_bias", "indexer.compressor.ape"),
    ("compressor.kv_proj", "compressor.wkv"),
    ("compressor.gate_proj", "compressor.wgate"),
    ("compressor.kv_norm", "compressor.norm"),
    ("compressor.position_bias", "compressor.ape"),
    ("q_a_proj", "wq_a"),
    ("q_a_norm", "q_norm"),
    ("q_b_proj", "wq_b"),
    ("kv_proj", "wkv"),
    ("o_a_proj", "wo_a"),
    ("o_b_proj", "wo_b"),
    ("sinks", "attn_sink"),
    ("norm", "kv_norm"),
)


def parameter_name(name: str) -> str:
    """The MQALayer parameter that an attention tensor's name, in any of the three spellings, stands for."""
    for theirs, ours in _TRANSFORMERS_NAMES:
        if name == theirs or name.startswith(theirs + "."):
            name = ours + name[len(theirs) :]
            break
    return re.sub(r"\.scale$", ".weight_scale_inv", name)


class Checkpoint:
    """The safetensors files of a model folder, opened once; nothing is read until asked for.

    Raises:
        ValueError: no safetensors file, an index that names a missing file, a file that is corrupt.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files = {}
        self._file_of: dict[str, str] = {}
        for file in self._file_names():
            try:
                self._files[file] = safe_open(self.folder / file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.folder / file}: not a readable safetensors file ({error})") from error
            names = set(self._files[file].keys())
            if twice := sorted(names & self._file_of.keys()):
                raise ValueError(f"{self.folder}: {file} and {self._file_of[twice[0]]} both hold {', '.join(twice)}")
            self._file_of |= dict.fromkeys(names, file)
        self.attention: dict[int, dict[str, str]] = {}
        """By layer: parameter name -> tensor name in the files."""
        for tensor in self._file_of:
            if match := ATTENTION_TENSOR.match(tensor):
                names = self.attention.setdefault(int(match[1]), {})
                name = parameter_name(match[2])
                if name in names:
                    raise ValueError(f"{self.folder}: {names[name]} and {tensor} are the same parameter")
                names[name] = tensor

    def _file_names(self) -> Sequence[str]:
        """The files that transformers would read: `model.safetensors`, else those of the index."""
        index = self.folder / "model.safetensors.index.json"
        if (self.folder / "model.safetensors").exists():
            return ["model.safetensors"]
        if not index.exists():
            raise ValueError(f"{self.folder}: holds no model.safetensors and no model.safetensors.index.json")
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index}: not a safetensors index ({error})") from error
        if not files or (missing := [file for file in files if not (self.folder / file).exists()]):
            raise ValueError(
                f"{index}: names no file, or files that are not there: {', '.join(missing if files else [])}"
            )
        return files

    def tensors_outside_attention(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """(name, shape, safetensors dtype such as "BF16" or "F8_E4M3") of every tensor that is not attention's."""
        for tensor in self._file_of:
            if not ATTENTION_TENSOR.match(tensor):
                stored = self._slice(tensor)
                yield tensor, tuple(stored.get_shape()), stored.get_dtype()

    @property
    def has_fp8_outside_attention(self) -> bool:
        """Whether any tensor that is not attention's is stored in 8 bits or fewer."""
        return any(dtype.startswith(("F8", "F4", "I8", "U8")) for _, _, dtype in self.tensors_outside_attention())

    def fp8_linears(self, layer_id: int) -> frozenset[str]:
        """The linears of a layer whose weights are float8_e4m3 here."""
        names = self.attention.get(layer_id, {})
        return frozenset(
            linear
            for linear in FP8_LINEARS
            if (tensor := names.get(f"{linear}.weight")) and self._slice(tensor).get_dtype() == "F8_E4M3"
        )

    def check_layers(self, num_layers: int) -> None:
        """Raise ValueError naming the attention tensors of layers that a model of `num_layers` does not have."""
        extra = {layer: names for layer, names in self.attention.items() if layer >= num_layers}
        if extra:
            tensors = sorted(tensor for names in extra.values() for tensor in names.values())
            raise ValueError(f"{self.folder}: attention tensors beyond the {num_layers} layers: {', '.join(tensors)}")

    def check_attention(self, layer: MQALayer) -> None:
        """Raise ValueError where a tensor of `layer` is missing, unknown or does not fit, named as in the files."""
        names = self.attention.get(layer.layer_id, {})
        parts, parameters = _parts(layer), dict(layer.named_parameters())
        for name, (shape, _) in parts.items():
            if name not in names:
                raise ValueError(f"{self.folder}: layer {layer.layer_id} has no tensor for attention parameter {name}")
            stored = self._slice(names[name])
            if tuple(stored.get_shape()) != shape:
                raise ValueError(
                    f"{self.folder}: {names[name]} has shape {tuple(stored.get_shape())}, allowed: {shape}"
                )
            allowed = _dtypes(name, parameters[name].dtype)
            if stored.get_dtype() not in allowed:
                raise ValueError(
                    f"{self.folder}: {names[name]} has dtype {stored.get_dtype()}, allowed: {', '.join(allowed)}"
                )
        if unknown := sorted(names[name] for name in names.keys() - parts.keys()):
            raise ValueError(f"{self.folder}: unknown attention tensors: {', '.join(unknown)}")

    def load_attention(self, layer: MQALayer) -> None:
        """Fill every parameter of `layer` with its rank's slice, read once. Raises as `check_attention`."""
        self.check_attention(layer)
        names, parameters = self.attention[layer.layer_id], dict(layer.named_parameters())
        for name, (_, part) in _parts(layer).items():
            parameters[name].data.copy_(self._slice(names[name])[part])

    def _slice(self, tensor: str):
        return self._files[self._file_of[tensor]].get_slice(tensor)


def _dtypes(name: str, dtype: torch.dtype) -> tuple[str, ...]:
    """The safetensors dtypes that a parameter of `dtype` is filled from."""
    if dtype == torch.float8_e4m3fn:
        return ("F8_E4M3",)
    floats = ("F32", "BF16", "F16", "F64")
    return (*floats, "F8_E8M0") if name.endswith("weight_scale_inv") else floats


def _parts(layer: MQALayer) -> dict[str, tuple[tuple[int, ...], tuple[slice, ...]]]:
    """For each parameter of `layer`: its full shape in a checkpoint, and the part of it that this rank holds."""
    whole = {
        name: (tuple(param.shape), tuple(slice(0, size) for size in param.shape))
        for name, param in layer.named_parameters()
    }
    sharded = {
        f"{path}.{name}": part
        for path, module in layer.named_modules()
        if isinstance(module, ParallelLinear)
        for name, part in module.tensor_slices().items()
    }
    return whole | sharded
