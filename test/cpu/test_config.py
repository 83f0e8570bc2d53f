"""Reading DeepSeek-V4 configs: three spellings of one model, transformers' own objects, and every refusal."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, DeepseekV4Config, LlamaConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from headfit.config import DeepSeekV4Config, RopeConfig

FLASH = DeepSeekV4Config(
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    num_heads=64,
    head_dim=512,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    sliding_window=128,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    max_position_embeddings=1048576,
    num_nextn_predict_layers=1,
    num_hash_layers=3,
    qk_rope_head_dim=64,
    compress_ratios=(0, 0, *(4, 128) * 20, 4),
    rms_norm_eps=1e-6,
    rope=RopeConfig(10000.0),
    compress_rope=RopeConfig(160000.0, "yarn", 16.0, 65536),
)
PRO = replace(
    FLASH,
    hidden_size=7168,
    num_hidden_layers=61,
    num_heads=128,
    q_lora_rank=1536,
    o_groups=16,
    index_topk=1024,
    compress_ratios=(128, 128, *(128, 4) * 29, 128),
)
TYPE_OF_RATIO = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
SHARED = ("vocab_size", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank")
INDEX = ("index_n_heads", "index_head_dim", "index_topk")


def shared(config):
    return {name: getattr(config, name) for name in (*SHARED, *INDEX)}


def hugging_face(config):
    return {
        **shared(config),
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "attention_bias": False,
        "num_key_value_heads": 1,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_heads,
        "num_hash_layers": config.num_hash_layers,
        "num_nextn_predict_layers": 1,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "sliding_window": config.sliding_window,
        "compress_ratios": [*config.compress_ratios, 0],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": 1048576,
    }


def original(config):
    return {
        **shared(config),
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_heads,
        "n_hash_layers": config.num_hash_layers,
        "n_mtp_layers": 1,
        "rope_head_dim": config.qk_rope_head_dim,
        "window_size": config.sliding_window,
        "compress_ratios": (*config.compress_ratios, 0),
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "original_seq_len": 65536,
        "rope_factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "max_seq_len": 1048576,
    }


def transformers_style(config):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125}
    yarn = {"rope_type": "yarn", "rope_theta": 160000.0, "partial_rotary_factor": 0.125, "factor": 16.0}
    yarn |= {"original_max_position_embeddings": 65536, "attention_factor": 1.0}
    layers = config.num_hidden_layers
    result = hugging_face(config)
    for name in ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling"):
        del result[name]
    return result | {
        "layer_types": [TYPE_OF_RATIO[ratio] for ratio in config.compress_ratios],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * (layers - 3),
        "partial_rotary_factor": 0.125,
        "rope_parameters": {"main": rope, "compress": yarn},
    }


STYLES = {"hugging_face": hugging_face, "original": original, "transformers": transformers_style}


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


def refusal(config):
    """The one-line message with which from_dict refuses."""
    with pytest.raises(ValueError) as caught:
        DeepSeekV4Config.from_dict(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_refused(config, *parts):
    message = refusal(config)
    assert not [part for part in parts if part not in message], message


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("expected", [FLASH, PRO], ids=["flash", "pro"])
def test_each_spelling_of_the_real_models(style, expected):
    assert DeepSeekV4Config.from_dict(STYLES[style](expected)) == expected


def test_spellings_that_agree_may_be_mixed():
    mixed = original(FLASH) | transformers_style(FLASH) | hugging_face(FLASH)
    assert DeepSeekV4Config.from_dict(mixed) == FLASH


def test_layers_choose_their_rope():
    assert FLASH.layer_rope(0) == RopeConfig(10000.0)
    assert FLASH.layer_rope(2) == FLASH.layer_rope(3) == FLASH.compress_rope


def test_transformers_default_config():
    config = DeepSeekV4Config.from_pretrained_config(DeepseekV4Config())
    ratios = (128, 128, *(128, 4) * 20, 128)
    assert config == replace(FLASH, compress_ratios=ratios, compress_rope=RopeConfig(160000.0))
    assert config == DeepSeekV4Config.from_dict(DeepseekV4Config().to_dict())


@pytest.mark.parametrize("expected", [FLASH, PRO], ids=["flash", "pro"])
def test_published_config_through_transformers_and_its_saved_file(expected, tmp_path):
    hf_config = DeepseekV4Config(**without(hugging_face(expected), "model_type"))
    assert DeepSeekV4Config.from_pretrained_config(hf_config) == expected
    hf_config.save_pretrained(tmp_path)
    assert DeepSeekV4Config.from_file(tmp_path) == expected
    assert DeepSeekV4Config.from_pretrained_config(AutoConfig.from_pretrained(tmp_path)) == expected


def test_a_small_transformers_config_with_its_own_thetas():
    nested = {
        "main": {"rope_type": "default", "rope_theta": 5000.0},
        "compress": {"rope_type": "default", "rope_theta": 7000.0},
    }
    hf_config = DeepseekV4Config(num_hidden_layers=2, rope_parameters=nested)
    config = DeepSeekV4Config.from_pretrained_config(hf_config)
    assert (config.rope, config.compress_rope) == (RopeConfig(5000.0), RopeConfig(7000.0))
    assert (config.compress_ratios, config.num_hash_layers) == ((128, 128), 2)


def inverse_frequencies(rope, dim):
    """YaRN written from RopeConfig alone, in float32 and in transformers' order of operations."""
    positions = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.rope_type == "default":
        return 1.0 / positions

    def channel(turns):
        return (
            dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * positions) * (1 - keep) + 1.0 / positions * keep


@pytest.mark.parametrize("scaling", [{}, {"beta_fast": 48.5, "beta_slow": 2, "factor": 7.5}], ids=["flash", "other"])
def test_rope_config_holds_all_that_transformers_uses(scaling):
    published = hugging_face(FLASH)
    published["rope_scaling"] = published["rope_scaling"] | scaling
    config = DeepSeekV4Config.from_dict(published)
    rotary = DeepseekV4RotaryEmbedding(DeepseekV4Config(**without(published, "model_type")))
    assert torch.equal(inverse_frequencies(config.rope, 64), rotary.main_inv_freq)
    assert torch.equal(inverse_frequencies(config.compress_rope, 64), rotary.compress_inv_freq)
    assert not torch.equal(rotary.main_inv_freq, rotary.compress_inv_freq)
    assert config.compress_rope.attention_factor == rotary.compress_attention_scaling == 1.0


def test_published_defaults():
    bare = without(original(FLASH), "norm_eps", "rope_theta", "beta_fast", "beta_slow", "max_seq_len", "n_mtp_layers")
    assert DeepSeekV4Config.from_dict(bare) == FLASH


@pytest.mark.parametrize("style", STYLES)
def test_every_size_is_required(style):
    config = STYLES[style](FLASH)
    optional = {"architectures", "model_type", "attention_bias", "num_key_value_heads", "num_nextn_predict_layers"}
    optional |= {"rms_norm_eps", "norm_eps", "rope_theta", "max_position_embeddings", "max_seq_len", "n_mtp_layers"}
    optional |= {"compress_rates", "beta_fast", "beta_slow"}
    optional |= {"compress_rope_theta"} if style == "transformers" else set()  # rope_parameters hold it
    for name in set(config) - optional:
        assert_refused(without(config, name), "missing field", name)
        if name not in ("rope_scaling", "rope_parameters"):  # null says: no scaling
            assert_refused(config | {name: None}, "missing field", name)
    for name in optional & set(config):
        assert DeepSeekV4Config.from_dict(without(config, name)) == FLASH


@pytest.mark.parametrize(
    ("gone", "names"),
    [
        ("num_attention_heads", "num_attention_heads, n_heads"),
        ("hidden_size", "hidden_size, dim"),
        ("num_hidden_layers", "num_hidden_layers, n_layers"),
        ("sliding_window", "sliding_window, window_size"),
        ("compress_ratios", "compress_ratios, layer_types"),
        ("num_hash_layers", "num_hash_layers, n_hash_layers, mlp_layer_types"),
        ("qk_rope_head_dim", "qk_rope_head_dim, rope_head_dim, partial_rotary_factor"),
        ("rope_scaling", "rope_scaling, rope_parameters, original_seq_len"),
    ],
)
def test_a_missing_field_lists_its_accepted_names(gone, names):
    assert_refused(without(hugging_face(FLASH), gone), f"allowed names: {names}")


@pytest.mark.parametrize("value", [0, -1, True, "64", 64.0, [64], 2**31])
@pytest.mark.parametrize(
    "name", ["n_heads", "dim", "head_dim", "window_size", "index_topk", "vocab_size", "o_lora_rank"]
)
def test_sizes_must_be_positive_integers(name, value):
    assert_refused(original(FLASH) | {name: value}, f"{name} is {value!r}", "allowed: an integer from 1 to")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"model_type": "deepseek_v3"}, ["model_type is 'deepseek_v3'", "allowed: 'deepseek_v4'"]),
        ({"model_type": ""}, ["model_type is ''"]),
        ({"num_key_value_heads": 8}, ["num_key_value_heads is 8", "allowed: 1"]),
        ({"attention_bias": True}, ["attention_bias is True", "allowed: False"]),
        ({"n_heads": 128}, ["num_attention_heads gives 64", "n_heads gives 128"]),
        ({"window_size": 64}, ["sliding_window gives 128", "window_size gives 64"]),
        ({"norm_eps": 1e-5}, ["rms_norm_eps gives 1e-06", "norm_eps gives 1e-05"]),
        ({"partial_rotary_factor": 0.25}, ["qk_rope_head_dim gives 64", "partial_rotary_factor gives 128"]),
        ({"mlp_layer_types": ["moe"] * 43}, ["num_hash_layers gives 3", "mlp_layer_types gives 0"]),
        ({"layer_types": ["sliding_attention"] * 43}, ["compress_ratios gives", "layer_types gives"]),
        ({"original_seq_len": 0}, ["rope_scaling gives", "original_seq_len gives", "default"]),
        ({"original_seq_len": 4096, "rope_factor": 16}, ["original_seq_len gives", "4096"]),
        ({"original_seq_len": 4096}, ["missing field", "factor, rope_factor"]),
        ({"rope_parameters": {"rope_type": "default"}}, ["rope_scaling gives", "rope_parameters gives"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps is 0", "above 0"]),
        ({"rms_norm_eps": math.nan}, ["rms_norm_eps is nan", "finite"]),
        ({"rms_norm_eps": True}, ["rms_norm_eps is True"]),
        ({"rope_theta": "10000"}, ["rope_theta is '10000'", "above 1"]),
        ({"rope_theta": 1}, ["rope_theta is 1", "above 1"]),
        ({"compress_rope_theta": math.inf}, ["compress_rope_theta is inf", "finite"]),
        ({"compress_rope_theta": 10**400}, ["compress_rope_theta is 1000", "finite"]),
        ({"compress_ratios": 4}, ["compress_ratios is 4", "a list of 43 entries"]),
        ({"compress_ratios": "0" * 43}, ["compress_ratios is '000", "a list"]),
        ({"compress_ratios": [4] * 42}, ["compress_ratios has 42 entries", "num_hidden_layers = 43"]),
        ({"compress_ratios": [0, 7] * 22}, ["compress_ratios[1] is 7", "0 or 4 or 128"]),
        ({"compress_ratios": [False] * 43}, ["compress_ratios[0] is False"]),
        ({"compress_ratios": [4.0] * 43}, ["compress_ratios[0] is 4.0"]),
        ({"num_hash_layers": -1}, ["num_hash_layers is -1"]),
        ({"qk_rope_head_dim": 63}, ["qk_rope_head_dim is 63", "even"]),
        ({"qk_rope_head_dim": 512}, ["head_dim is 512", "more than qk_rope_head_dim = 512"]),
        ({"index_head_dim": 32}, ["index_head_dim is 32", "at least qk_rope_head_dim = 64"]),
        ({"o_groups": 24}, ["o_groups is 24", "divisor of num_heads = 64"]),
        ({"num_nextn_predict_layers": -1}, ["num_nextn_predict_layers is -1", "from 0"]),
        ({"compress_rate_csa": 8}, ["compress_rate_csa is 8", "allowed: 4"]),
        ({"compress_rates": {"compressed_sparse_attention": 8}}, ["compress_rates.compressed_sparse_attention is 8"]),
        ({"compress_rates": [4, 128]}, ["compress_rates is [4, 128]", "a mapping"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling is 'yarn'", "a mapping"]),
        ({"rope_scaling": {}}, ["missing field", "rope_scaling.rope_type, rope_scaling.type"]),
    ],
)
def test_wrong_and_contradicting_values(change, parts):
    assert_refused(hugging_face(FLASH) | change, *parts)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"type": "linear"}, ["rope_scaling.type is 'linear'", "'default' or 'yarn'"]),
        ({"rope_type": "default"}, ["rope_scaling.rope_type gives default", "rope_scaling.type gives yarn"]),
        ({"factor": None}, ["missing field", "rope_scaling.factor"]),
        ({"factor": 0.5}, ["factor is 0.5", "at least 1"]),
        ({"factor": "16"}, ["rope_scaling.factor is '16'"]),
        ({"original_max_position_embeddings": 0}, ["rope_scaling.original_max_position_embeddings is 0"]),
        ({"original_max_position_embeddings": None}, ["rope_scaling.original_max_position_embeddings"]),
        ({"beta_fast": 0.5}, ["beta_fast is 0.5", "at least beta_slow"]),
        ({"beta_slow": -1}, ["rope_scaling.beta_slow is -1"]),
        ({"attention_factor": 0}, ["rope_scaling.attention_factor is 0"]),
        ({"truncate": False}, ["rope_scaling.truncate is False", "allowed: True"]),
        ({"rope_theta": 500}, ["rope_theta gives 10000.0", "rope_scaling.rope_theta gives 500.0"]),
        ({"partial_rotary_factor": 0.5}, ["qk_rope_head_dim gives 64", "rope_scaling gives 256"]),
    ],
)
def test_wrong_rope_scaling(change, parts):
    config = hugging_face(FLASH)
    assert_refused(config | {"rope_scaling": config["rope_scaling"] | change}, *parts)


@pytest.mark.parametrize(
    ("section", "change", "parts"),
    [
        ("main", {"rope_theta": None}, ["missing field", "rope_parameters.main.rope_theta"]),
        ("main", {"rope_type": "longrope"}, ["rope_parameters.main.rope_type is 'longrope'"]),
        ("main", {"partial_rotary_factor": 1.0}, ["qk_rope_head_dim gives 64", "rope_parameters.main gives 512"]),
        ("compress", {"attention_factor": None}, ["missing field", "rope_parameters.compress.attention_factor"]),
        ("compress", {"rope_theta": True}, ["rope_parameters.compress.rope_theta is True"]),
        ("compress", {"truncate": False}, ["rope_parameters.compress.truncate is False"]),
    ],
)
def test_wrong_nested_rope_parameters(section, change, parts):
    config = transformers_style(FLASH)
    ropes = config["rope_parameters"]
    assert_refused(config | {"rope_parameters": ropes | {section: ropes[section] | change}}, *parts)


def test_both_rope_sections_are_needed():
    config = transformers_style(FLASH)
    only_main = {"main": config["rope_parameters"]["main"]}
    assert_refused(config | {"rope_parameters": only_main}, "rope_parameters.compress is None", "a mapping")


@pytest.mark.parametrize("name", ["layer_types", "mlp_layer_types"])
def test_wrong_layer_types(name):
    config = transformers_style(FLASH)
    assert_refused(config | {name: config[name][:-1]}, f"{name} has 42 entries", "num_hidden_layers = 43")
    assert_refused(config | {name: ["dense", *config[name][1:]]}, f"{name}[0] is 'dense'", "allowed: '")
    assert_refused(config | {name: [["moe"], *config[name][1:]]}, f"{name}[0] is ['moe']")


def test_no_scaling_must_be_said():
    plain = replace(FLASH, compress_rope=RopeConfig(160000.0))
    assert DeepSeekV4Config.from_dict(hugging_face(FLASH) | {"rope_scaling": None}) == plain
    assert DeepSeekV4Config.from_dict(original(FLASH) | {"original_seq_len": 0}) == plain


def test_narrow_index_heads_are_fine_where_no_layer_has_an_indexer():
    config = hugging_face(FLASH) | {"index_head_dim": 32, "compress_ratios": [0, 128] * 22}
    assert DeepSeekV4Config.from_dict(config).index_head_dim == 32


def test_files(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(hugging_face(PRO)))
    assert DeepSeekV4Config.from_file(tmp_path) == DeepSeekV4Config.from_file(str(file)) == PRO
    file.write_text(json.dumps(hugging_face(PRO) | {"o_groups": 7}))
    with pytest.raises(ValueError, match=r"config\.json: o_groups is 7; allowed: a divisor of num_heads = 128"):
        DeepSeekV4Config.from_file(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"3", b"null", b"[" * 100_000])
def test_files_that_hold_no_config(content, tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        DeepSeekV4Config.from_file(file)
    assert str(caught.value).startswith(f"{file}: ") and "\n" not in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        DeepSeekV4Config.from_file(tmp_path)
    with pytest.raises(FileNotFoundError, match="missing"):
        DeepSeekV4Config.from_file(tmp_path / "missing")


def test_objects_that_are_no_config():
    with pytest.raises(ValueError, match="model_type is 'llama'; allowed: 'deepseek_v4'"):
        DeepSeekV4Config.from_pretrained_config(LlamaConfig())
    with pytest.raises(ValueError, match=r"config is 'dict'; allowed: .*to_dict"):
        DeepSeekV4Config.from_pretrained_config({})
    assert_refused([], "config is []", "a mapping")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"num_heads": True}, "num_heads is True"),
        ({"num_hash_layers": 44}, "num_hash_layers is 44; allowed: an integer from 0 to 43"),
        ({"rope": 10000.0}, "rope is 10000.0; allowed: a RopeConfig"),
        ({"compress_ratios": [0] * 43}, "allowed: a tuple of 43 entries"),
        ({"compress_ratios": (0,) * 44}, "allowed: a tuple of 43 entries"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim is 0; allowed: an integer from 2"),
    ],
)
def test_direct_construction_is_checked_too(change, part):
    with pytest.raises(ValueError) as caught:
        replace(FLASH, **change)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"theta": 1.0}, "theta is 1.0; allowed: a finite number above 1"),
        ({"rope_type": "ntk"}, "rope_type is 'ntk'; allowed: 'default' or 'yarn'"),
        ({"truncate": 1}, "truncate is 1; allowed: True or False"),
        ({"rope_type": "yarn"}, "original_max_position_embeddings is None"),
    ],
)
def test_rope_configs_are_checked_too(change, part):
    with pytest.raises(ValueError) as caught:
        replace(RopeConfig(10000.0), **change)
    assert part in str(caught.value)


def test_configs_are_frozen_values():
    with pytest.raises(AttributeError):
        FLASH.num_heads = 128
    assert hash(FLASH) == hash(replace(FLASH)) and FLASH != PRO


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["main", "compress", "type"]), inner),
)
NAMES = sorted({name for style in STYLES.values() for name in style(FLASH)} - {"architectures"})


@given(style=st.sampled_from(sorted(STYLES)), name=st.sampled_from(NAMES), value=ANYTHING)
def test_any_value_under_any_name_is_read_or_refused_in_one_line(style, name, value):
    try:
        config = DeepSeekV4Config.from_dict(STYLES[style](FLASH) | {name: value})
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert len(config.compress_ratios) == config.num_hidden_layers and config.head_dim > config.qk_rope_head_dim
