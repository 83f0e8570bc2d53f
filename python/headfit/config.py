"""The shape of a DeepSeek-V4 model, read from any of the three published spellings of its config.

- Hugging Face `config.json`: `num_attention_heads`, `compress_ratios`, `num_hash_layers`, `rope_scaling`.
- DeepSeek's own inference config: `n_heads`, `dim`, `window_size`, `original_seq_len`, `rope_factor`.
- transformers' `DeepseekV4Config.to_dict()`: `layer_types`, `compress_rates`, `rope_parameters`.

Spellings may be mixed as long as they agree. Sizes never default. What may be left out, because published code gives it
one default: `rms_norm_eps` 1e-6, `max_position_embeddings` 1048576, `num_nextn_predict_layers` 1, `rope_theta` 10000,
`compress_rates` 4 and 128, and YaRN's `beta_fast` 32, `beta_slow` 1, `attention_factor` 1 and `truncate` true.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

_FIXED = {"model_type": "deepseek_v4", "num_key_value_heads": 1, "attention_bias": False}
_FIXED |= {"compress_rate_csa": 4, "compress_rate_hca": 128}  # an older spelling of compress_rates
_ROPE_TYPES = ("default", "yarn")
_REQUIRED = object()
_LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
COMPRESS_RATIOS = tuple(_LAYER_TYPES.values())


def _size(*names: str, minimum: int = 1, default: Any = _REQUIRED) -> Any:
    """A dataclass field that is an integer, with its accepted names in a config."""
    return field(metadata={"names": names, "limits": {"minimum": minimum, "default": default}})


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary embedding: all that its inverse frequencies and cos/sin factor depend on, besides the RoPE width.

    theta is the base. `rope_type` "default" uses nothing else. "yarn" interpolates by `factor` from a trained length of
    `original_max_position_embeddings` tokens, between the channels that turn `beta_fast` and `beta_slow` times over it
    (rounded outwards to whole channels if `truncate`), and multiplies cos and sin by `attention_factor`.
    Source: `_compute_yarn_parameters` of transformers. Raises ValueError on a value out of range.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        check_number("theta", self.theta, above=1)
        check_choice("rope_type", self.rope_type, _ROPE_TYPES)
        for name in ("factor", "beta_fast", "beta_slow", "attention_factor"):
            check_number(name, getattr(self, name))
        _require(self.factor >= 1, "factor", self.factor, "a number of at least 1")
        _require(self.beta_fast >= self.beta_slow, "beta_fast", self.beta_fast, f"at least beta_slow {self.beta_slow}")
        check_choice("truncate", self.truncate, (True, False))
        if self.rope_type == "yarn" or self.original_max_position_embeddings is not None:
            check_integer("original_max_position_embeddings", self.original_max_position_embeddings, minimum=1)


@dataclass(frozen=True, slots=True)
class DeepSeekV4Config:
    """What the attention layer and its host need to know of a DeepSeek-V4 checkpoint.

    `compress_ratios` gives each layer 0 (window only), 4 or 128. `rope` serves window-only layers, `compress_rope` all
    keys and queries of layers with a compressor. `sliding_window` and `max_position_embeddings` count tokens,
    `index_topk` compressed entries. Raises ValueError, one line, for a wrong value or two fields that do not fit.
    """

    vocab_size: int = _size("vocab_size")
    hidden_size: int = _size("hidden_size", "dim")
    num_hidden_layers: int = _size("num_hidden_layers", "n_layers")
    num_heads: int = _size("num_attention_heads", "n_heads")
    head_dim: int = _size("head_dim")
    q_lora_rank: int = _size("q_lora_rank")
    o_groups: int = _size("o_groups")
    o_lora_rank: int = _size("o_lora_rank")
    sliding_window: int = _size("sliding_window", "window_size")
    index_n_heads: int = _size("index_n_heads")
    index_head_dim: int = _size("index_head_dim")
    index_topk: int = _size("index_topk")
    max_position_embeddings: int = _size("max_position_embeddings", "max_seq_len", default=1048576)
    num_nextn_predict_layers: int = _size("num_nextn_predict_layers", "n_mtp_layers", minimum=0, default=1)
    num_hash_layers: int
    qk_rope_head_dim: int
    compress_ratios: tuple[int, ...]
    rms_norm_eps: float
    rope: RopeConfig
    compress_rope: RopeConfig

    def __post_init__(self) -> None:
        for size in filter(lambda entry: entry.metadata, fields(self)):
            check_integer(size.name, getattr(self, size.name), minimum=size.metadata["limits"]["minimum"])
        check_integer("num_hash_layers", self.num_hash_layers, minimum=0, maximum=self.num_hidden_layers)
        check_number("rms_norm_eps", self.rms_norm_eps)
        ratios = self.compress_ratios
        per_layer = _per_layer("compress_ratios", ratios, self.num_hidden_layers, COMPRESS_RATIOS)
        _require(per_layer == ratios, "compress_ratios", ratios, f"a tuple of {self.num_hidden_layers} entries")
        for name, rope in (("rope", self.rope), ("compress_rope", self.compress_rope)):
            _require(isinstance(rope, RopeConfig), name, rope, "a RopeConfig")
        rope_dim = check_integer("qk_rope_head_dim", self.qk_rope_head_dim, minimum=2)
        _require(rope_dim % 2 == 0, "qk_rope_head_dim", rope_dim, "an even integer")
        _require(self.head_dim > rope_dim, "head_dim", self.head_dim, f"more than qk_rope_head_dim = {rope_dim}")
        indexed = self.index_head_dim >= rope_dim or 4 not in ratios
        _require(indexed, "index_head_dim", self.index_head_dim, f"at least qk_rope_head_dim = {rope_dim}")
        grouped = self.num_heads % self.o_groups == 0
        _require(grouped, "o_groups", self.o_groups, f"a divisor of num_heads = {self.num_heads}")

    def layer_rope(self, layer_id: int) -> RopeConfig:
        """The RoPE of one layer's queries and keys, compressed keys included."""
        return self.compress_rope if self.compress_ratios[layer_id] else self.rope

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DeepSeekV4Config:
        """Read a config in any of the three spellings; keys that the attention layer does not need are ignored.

        Raises ValueError for a missing field (listing its accepted names), a wrong value or names that contradict.
        """
        read = _Fields(config)
        for name, only in _FIXED.items():
            read.get(check_choice, name, allowed=(only,), default=None)
        sizes = [(entry.name, entry.metadata) for entry in fields(cls) if entry.metadata]
        values = {name: read.get(check_integer, *size["names"], **size["limits"]) for name, size in sizes}
        values["qk_rope_head_dim"] = rope_dim = _read_rope_dim(read, values["head_dim"])
        values["num_hash_layers"] = _read_num_hash_layers(read, values["num_hidden_layers"])
        values["compress_ratios"] = _read_compress_ratios(read, values["num_hidden_layers"])
        values["rms_norm_eps"] = read.get(check_number, "rms_norm_eps", "norm_eps", default=1e-6)
        values["rope"], values["compress_rope"] = _read_ropes(read, values["head_dim"], rope_dim)
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> DeepSeekV4Config:
        """Read a `config.json`, or the one in a checkpoint folder.

        Raises FileNotFoundError when there is none; ValueError, opening with the path, as `from_dict` or for bad JSON.
        """
        file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; allowed: a config.json or a folder that holds one")
        try:
            return cls.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:  # json's own errors included
            raise ValueError(f"{file}: {error}") from error

    @classmethod
    def from_pretrained_config(cls, hf_config: Any) -> DeepSeekV4Config:
        """Read a transformers config object through its `to_dict()`. Raises ValueError as `from_dict` does."""
        readable = callable(getattr(hf_config, "to_dict", None))
        _require(readable, "config", type(hf_config).__name__, "a transformers config with to_dict()")
        return cls.from_dict(hf_config.to_dict())


def check_integer(name: str, value: Any, minimum: int = 0, maximum: int = 2**31 - 1) -> int:
    """Return value if it is an int (a bool is not) in [minimum, maximum], else raise a ValueError that names it."""
    ok = isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum
    _require(ok, name, value, f"an integer from {minimum} to {maximum}")
    return value


def check_number(name: str, value: Any, above: float = 0) -> float:
    """Return value as a float if it is a finite number (a bool is not) greater than `above`, else raise ValueError."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and above < value < 1e100
    _require(ok, name, value, f"a finite number above {above}")
    return float(value)


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """Return value if it is one of those allowed, type included, else raise a ValueError that lists them."""
    ok = any(type(value) is type(choice) and value == choice for choice in allowed)
    _require(ok, name, value, " or ".join(map(repr, allowed)))
    return value


def _require(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        text = " ".join(repr(value).split())
        raise ValueError(f"{name} is {text if len(text) <= 100 else text[:97] + '...'}; allowed: {allowed}")


def _missing(*names: str) -> ValueError:
    return ValueError(f"missing field (absent or null); allowed names: {', '.join(names)}")


def _per_layer(name: str, value: Any, layers: int, allowed: tuple[Any, ...]) -> tuple[Any, ...]:
    """The entries of the first `layers` layers; those of MTP layers may follow and are dropped."""
    _require(isinstance(value, list | tuple), name, value, f"a list of {layers} entries, one per layer")
    if len(value) < layers:
        raise ValueError(f"{name} has {len(value)} entries; allowed: at least num_hidden_layers = {layers}")
    return tuple(check_choice(f"{name}[{i}]", entry, allowed) for i, entry in enumerate(value[:layers]))


class _Fields:
    """One mapping of a config, read by accepted names; `path` is what its errors put before a name."""

    def __init__(self, values: Any, path: str = "") -> None:
        _require(isinstance(values, Mapping), path or "config", values, "a mapping of names to values")
        self.values, self.path, self.prefix = values, path, f"{path}." if path else ""

    def section(self, name: str) -> _Fields | None:
        value = self.values.get(name)
        return None if value is None else _Fields(value, self.prefix + name)

    def get(self, check: Callable[..., Any], *names: str, default: Any = _REQUIRED, **limits: Any) -> Any:
        """The value under any of the names, checked to its limits; null counts as absent, two names must agree."""
        present = [name for name in names if self.values.get(name) is not None]
        found = [(self.prefix + name, check(self.prefix + name, self.values[name], **limits)) for name in present]
        if not found and default is _REQUIRED:
            raise _missing(*(self.prefix + name for name in names))
        return _agreed(*found) if found else default


def _agreed(*found: tuple[str, Any]) -> Any:
    """The one value that several (name, value) pairs give."""
    first, value = found[0]
    for name, other in found[1:]:
        if other != value:
            raise ValueError(f"{first} gives {value} but {name} gives {other}; allowed: one of them, or equal values")
    return value


def _read_compress_ratios(read: _Fields, layers: int) -> tuple[int, ...]:
    if rates := read.section("compress_rates"):
        for kind in list(_LAYER_TYPES)[1:]:
            rates.get(check_choice, kind, allowed=(_LAYER_TYPES[kind],), default=None)

    def check(name: str, value: Any) -> tuple[int, ...]:
        if name == "compress_ratios":
            return _per_layer(name, value, layers, COMPRESS_RATIOS)
        return tuple(_LAYER_TYPES[kind] for kind in _per_layer(name, value, layers, tuple(_LAYER_TYPES)))

    return read.get(check, "compress_ratios", "layer_types")


def _read_num_hash_layers(read: _Fields, layers: int) -> int:
    def check(name: str, value: Any) -> int:
        if name == "mlp_layer_types":
            return _per_layer(name, value, layers, ("hash_moe", "moe")).count("hash_moe")
        return min(check_integer(name, value), layers)

    return read.get(check, "num_hash_layers", "n_hash_layers", "mlp_layer_types")


def _read_rope_dim(read: _Fields, head_dim: int, default: Any = _REQUIRED) -> int:
    def check(name: str, value: Any) -> int:
        if name.endswith("partial_rotary_factor"):
            return int(head_dim * check_number(name, value))  # as transformers rounds it
        return check_integer(name, value, minimum=2)

    return read.get(check, "qk_rope_head_dim", "rope_head_dim", "partial_rotary_factor", default=default)


def _read_ropes(read: _Fields, head_dim: int, rope_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """The RoPE of window-only layers and that of layers with a compressor; every spelling present must give the same.

    Nested `rope_parameters` outrank a theta beside them, which in transformers may be an unused default.
    """
    outer = read.section("rope_parameters")
    flat = [section for section in (read.section("rope_scaling"), outer) if section]
    if outer and (outer.section("main") or outer.section("compress")):
        main, compress = (_Fields(outer.values.get(key), f"rope_parameters.{key}") for key in ("main", "compress"))
        rope = _rope(main, main.get(check_number, "rope_theta", above=1), attention_factor=_REQUIRED)
        theta = compress.get(check_number, "rope_theta", above=1)
        found = [(compress.path, _rope(compress, theta, attention_factor=_REQUIRED))]
        flat.remove(outer)
        sections = [main, compress, *flat]
    else:
        rope = RopeConfig(read.get(check_number, "rope_theta", above=1, default=10000.0))
        theta, found, sections = read.get(check_number, "compress_rope_theta", above=1), [], flat
    for section in flat:
        inner_theta = section.get(check_number, "rope_theta", above=1, default=rope.theta)
        _agreed(("rope_theta", rope.theta), (f"{section.path}.rope_theta", inner_theta))
        found.append((section.path, _rope(section, theta)))
    for section in sections:
        _agreed(("qk_rope_head_dim", rope_dim), (section.path, _read_rope_dim(section, head_dim, default=rope_dim)))
    if (length := read.get(check_integer, "original_seq_len", default=None)) is not None:
        found.append(("original_seq_len", _rope(read, theta, kind="yarn" if length else "default")))
    if not found and not {"rope_scaling", "rope_parameters"} & set(read.values):
        raise _missing("rope_scaling", "rope_parameters", "original_seq_len")
    return rope, _agreed(*found) if found else RopeConfig(theta)


def _rope(read: _Fields, theta: float, kind: str | None = None, attention_factor: Any = 1.0) -> RopeConfig:
    kind = kind or read.get(check_choice, "rope_type", "type", allowed=_ROPE_TYPES)
    read.get(check_choice, "truncate", allowed=(True,), default=True)  # both published implementations always round
    if kind == "default":
        return RopeConfig(theta)
    trained_length = ("original_max_position_embeddings", "original_seq_len")
    return RopeConfig(
        theta,
        rope_type=kind,
        factor=read.get(check_number, "factor", "rope_factor"),
        original_max_position_embeddings=read.get(check_integer, *trained_length, minimum=1),
        beta_fast=read.get(check_number, "beta_fast", default=32.0),
        beta_slow=read.get(check_number, "beta_slow", default=1.0),
        attention_factor=read.get(check_number, "attention_factor", default=attention_factor),
    )
