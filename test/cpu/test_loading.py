"""Checkpoints in every spelling, with fp8 attention, sharded over ranks; and the ones that must be refused."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4ForCausalLM

from headfit.backends.reference import ReferenceBackend
from headfit.checkpoint import Checkpoint, parameter_name
from headfit.config import DeepSeekV4Config
from headfit.distributed import AttnTPGroup
from headfit.forward_batch import ForwardBatch
from headfit.generate import TINY
from headfit.hosts.transformers import forward, load_model
from headfit.layers.linear import FP8_BLOCK
from headfit.models.deepseek_v4 import FP8_LINEARS, MQALayer
from headfit.testing.measure import FLOAT32, assert_close, relative_norm
from headfit.testing.models import hf_config, random_model
from headfit.testing.ranks import load_all_ranks

LENGTH = 140
IDS = torch.randint(0, 96, (LENGTH,), generator=torch.Generator().manual_seed(2))
TO_ORIGINAL = {  # of the tensors outside the layers, as transformers writes them
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}
TO_TRANSFORMERS = {  # MQALayer parameter -> transformers' attention parameter
    "wq_a": "q_a_proj",
    "q_norm": "q_a_norm",
    "wq_b": "q_b_proj",
    "wkv": "kv_proj",
    "kv_norm": "kv_norm",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
    "attn_sink": "sinks",
    "compressor.wkv": "compressor.kv_proj",
    "compressor.wgate": "compressor.gate_proj",
    "compressor.norm": "compressor.kv_norm",
    "compressor.ape": "compressor.position_bias",
    "indexer.wq_b": "compressor.indexer.q_b_proj",
    "indexer.weights_proj": "compressor.indexer.scorer.weights_proj",
    "indexer.compressor.wkv": "compressor.indexer.kv_proj",
    "indexer.compressor.wgate": "compressor.indexer.gate_proj",
    "indexer.compressor.norm": "compressor.indexer.kv_norm",
    "indexer.compressor.ape": "compressor.indexer.position_bias",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, request):
    """A float32 checkpoint as transformers writes it, of a random model or of the packaged one."""
    folder = tmp_path_factory.mktemp("saved")
    if getattr(request, "param", "random") == "tiny":
        loaded = DeepseekV4ForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        model = DeepseekV4ForCausalLM._from_config(loaded.config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(folder)  # a model that was not loaded is written under the original names
    else:
        random_model(hf_config((0, 4, 128)), seed=1).save_pretrained(folder)
    return folder


both_models = pytest.mark.parametrize("saved", ["random", "tiny"], indirect=True)


@pytest.fixture
def resaved(saved, tmp_path):
    """A function that writes `tensors` beside the saved config, changed by `config`, and returns the folder."""

    def write(tensors: dict[str, torch.Tensor], **config):
        settings = json.loads((saved / "config.json").read_text()) | config
        (tmp_path / "config.json").write_text(json.dumps(settings))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return write


@torch.inference_mode()
def logits(folder, attn_tp_size: int = 1) -> torch.Tensor:
    model, cache = load_all_ranks(
        folder, backend=ReferenceBackend(), attn_tp_size=attn_tp_size, max_context=LENGTH, max_chunk=LENGTH
    )
    return forward(model, IDS, ForwardBatch.for_step(cache, request_slots=[0], starts=[0], lengths=[LENGTH]))


def attention(name: str):
    return re.match(r"^model\.layers\.(\d+)\.attn\.(.+)$", name)


def original_names(tensors):
    renamed = {}
    for name, tensor in tensors.items():
        name = TO_ORIGINAL.get(name, name).removeprefix("model.")
        renamed[re.sub(r"attn\.norm\.", "attn.kv_norm.", name)] = tensor
    return renamed


def transformers_names(tensors):
    renamed = {}
    for name, tensor in tensors.items():
        if match := attention(name):
            path, dot, leaf = parameter_name(match[2]).rpartition(".")
            module = TO_TRANSFORMERS.get(path) or TO_TRANSFORMERS[f"{path}{dot}{leaf}"]
            name = f"model.layers.{match[1]}.self_attn.{module}" + (f".{leaf}" if path in TO_TRANSFORMERS else "")
        renamed[name] = tensor
    return renamed


@both_models
@pytest.mark.parametrize("spelling", [original_names, transformers_names])
def test_spellings_of_one_checkpoint(saved, resaved, spelling):
    tensors = load_file(saved / "model.safetensors")
    renamed = spelling(tensors)
    assert len(renamed) == len(tensors) and set(renamed) != set(tensors)
    assert torch.equal(logits(resaved(renamed)), logits(saved))


def test_a_checkpoint_that_transformers_loaded_and_saved_again(tmp_path):
    DeepseekV4ForCausalLM.from_pretrained(TINY, dtype=torch.float32).save_pretrained(tmp_path)
    assert torch.equal(logits(tmp_path), logits(TINY))


def quantize_blocks(weight: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 weight, a scale per block, and what they dequantise to."""
    rows, cols = (-(-size // FP8_BLOCK) for size in weight.shape)
    scale = torch.empty(rows, cols)
    quantized, dequantized = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(rows):
        for j in range(cols):
            block = (slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK), slice(j * FP8_BLOCK, (j + 1) * FP8_BLOCK))
            scale[i, j] = 2.0 ** torch.ceil(torch.log2(weight[block].abs().max() / 448))
            quantized[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
            dequantized[block] = quantized[block].float() * scale[i, j]
    return quantized, scale.to(scale_dtype), dequantized


@both_models
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("attn_tp_size", [1, 4])
def test_fp8_attention_equals_its_dequantised_form(saved, resaved, tmp_path_factory, scale_dtype, attn_tp_size):
    fp8, plain = {}, {}
    for name, tensor in load_file(saved / "model.safetensors").items():
        match = attention(name)
        if match and parameter_name(match[2]).removesuffix(".weight") in FP8_LINEARS:
            values, scale, plain[name] = quantize_blocks(tensor, scale_dtype)
            fp8 |= {name: values, name.removesuffix("weight") + "scale": scale}
        else:
            fp8[name] = plain[name] = tensor
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    folder = tmp_path_factory.mktemp("dequantised")
    (folder / "config.json").write_text((saved / "config.json").read_text())
    save_file(plain, folder / "model.safetensors")
    expected = logits(folder)
    assert Checkpoint(folder).fp8_linears(1) == frozenset()
    loaded = resaved(fp8, quantization_config=quantization)
    assert Checkpoint(loaded).fp8_linears(1) == set(FP8_LINEARS)
    assert_close(logits(loaded, attn_tp_size), expected, FLOAT32)


def test_x_quant_feeds_the_fp8_linears(saved, resaved):
    fp8 = {}
    for name, tensor in load_file(saved / "model.safetensors").items():
        if name.endswith(("layers.0.attn.wq_a.weight", "layers.0.attn.wkv.weight")):
            values, scale, _ = quantize_blocks(tensor, torch.float32)
            fp8 |= {name: values, name.removesuffix("weight") + "scale": scale}
        else:
            fp8[name] = tensor
    model, cache = load_all_ranks(resaved(fp8), backend=ReferenceBackend(), max_context=LENGTH, max_chunk=LENGTH)
    layer = model.model.layers[0].self_attn.layer
    batch = ForwardBatch.for_step(cache, request_slots=[0], starts=[0], lengths=[LENGTH])
    # Exact in e4m3, so that the quantised form says the same as x.
    x = torch.randint(-8, 8, (LENGTH, 64), generator=torch.Generator().manual_seed(4)).float()
    scales = torch.full((LENGTH, 1), 2.0)
    expected = layer(x, batch.positions, batch)
    quantized = layer(x, batch.positions, batch, x_quant=((x / 2).to(torch.float8_e4m3fn), scales))
    doubled = layer(x, batch.positions, batch, x_quant=(x.to(torch.float8_e4m3fn), scales))
    assert torch.equal(quantized, expected)
    assert not torch.equal(doubled, expected)
    with pytest.raises(ValueError, match=r"x_quant.*\(140, 2\).*allowed.*\(140, 1\)"):
        layer(x, batch.positions, batch, x_quant=(x.to(torch.float8_e4m3fn), torch.ones(LENGTH, 2)))


def test_a_rank_holds_only_its_slices(saved):
    config, checkpoint = DeepSeekV4Config.from_file(saved), Checkpoint(saved)
    full = load_file(saved / "model.safetensors")
    for rank in range(8):
        group = AttnTPGroup(rank, 8, reduce_results=False)
        layer = MQALayer(config, layer_id=1, backend=ReferenceBackend(), group=group, dtype=torch.float32)
        checkpoint.load_attention(layer)
        prefix = "model.layers.1.attn."
        heads, o_rank = slice(1024 * rank, 1024 * (rank + 1)), slice(16 * rank, 16 * (rank + 1))
        assert torch.equal(layer.wq_b.weight, full[prefix + "wq_b.weight"][heads])
        assert torch.equal(layer.wo_a.weight, full[prefix + "wo_a.weight"][o_rank])
        assert torch.equal(layer.wo_b.weight, full[prefix + "wo_b.weight"][:, o_rank])
        assert torch.equal(layer.attn_sink, full[prefix + "attn_sink"])


def test_trailing_compress_ratios_of_mtp_layers_are_accepted(saved, resaved):
    tensors = load_file(saved / "model.safetensors")
    tensors["mtp.0.attn.wq_a.weight"] = torch.zeros(2, 2)
    folder = resaved(tensors, layer_types=None, compress_ratios=[0, 4, 128, 0])
    assert torch.equal(logits(folder), logits(saved))


def drop(name):
    return lambda tensors: tensors.pop(f"model.{name}")


def put(name, *shape):
    return lambda tensors: tensors.update({f"model.{name}": torch.zeros(shape)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("layers.1.attn.wkv.weight"), r"layer 1 has no tensor for attention parameter wkv\.weight"),
        (drop("layers.2.ffn.gate.weight"), r"missing keys: .*layers\.2\.mlp\.gate\.weight"),
        (put("layers.0.attn.extra", 1), r"unknown attention tensors: .*layers\.0\.attn\.extra"),
        (put("layers.0.ffn.extra", 1), r"unexpected keys: .*extra"),
        (put("layers.9.attn.wkv.weight", 1), r"beyond the 3 layers: model\.layers\.9\.attn\.wkv\.weight"),
        (put("layers.0.attn.attn_sink", 8), r"layers\.0\.attn\.attn_sink has shape \(8,\), allowed: \(16,\)"),
        (put("norm.weight", 8), r"mismatched keys: .*norm\.weight"),
        (put("layers.0.self_attn.kv_proj.weight", 1), "are the same parameter"),
    ],
)
def test_tensors_that_do_not_fit_are_named(saved, resaved, change, message):
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    folder = resaved(tensors)
    with pytest.raises(ValueError, match=message):
        load_model(folder, backend=ReferenceBackend())


def test_files_that_cannot_be_read(saved, tmp_path):
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    (tmp_path / "weights.safetensors").write_bytes(b"transformers would not read it")
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        Checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "part.safetensors"}}')
    with pytest.raises(ValueError, match=r"not there: part\.safetensors"):
        Checkpoint(tmp_path)
    for broken in ("[]", "null", '{"k": 1}', '{"weight_map": {}}', "{"):
        index.write_text(broken)
        with pytest.raises(ValueError, match=r"index\.json: (not a safetensors index|names no file)"):
            Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a readable safetensors file"):
        Checkpoint(tmp_path)


def write_shards(folder, tensors, num_shards):
    names = sorted(tensors)
    shards = {f"part-{i}.safetensors": names[i::num_shards] for i in range(num_shards)}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_sharded_files(saved, tmp_path):
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    tensors = load_file(saved / "model.safetensors")
    write_shards(tmp_path, tensors, 3)
    assert torch.equal(logits(tmp_path), logits(saved))
    part = load_file(tmp_path / "part-0.safetensors") | load_file(tmp_path / "part-1.safetensors")
    save_file(part, tmp_path / "part-1.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"part-1\.safetensors and part-0\.safetensors both hold"):
        Checkpoint(tmp_path)


def test_headfit_and_transformers_read_the_same_file(saved, tmp_path):
    """A backup beside the model, or an index left over, must not mix two checkpoints."""
    tensors = load_file(saved / "model.safetensors")
    other = {
        name: torch.randn_like(tensor) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
    }
    write_shards(tmp_path, other, 2)
    save_file(other, tmp_path / "z_backup.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((saved / file).read_bytes())
    assert torch.equal(logits(tmp_path), logits(saved))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("wq_a.weight", torch.int32), ("wkv.weight", torch.float8_e5m2), ("attn_sink", torch.int64)],
)
def test_dtypes_that_are_no_weights_are_named(saved, resaved, name, dtype):
    tensors = load_file(saved / "model.safetensors")
    tensors[f"model.layers.0.attn.{name}"] = tensors[f"model.layers.0.attn.{name}"].to(dtype)
    with pytest.raises(ValueError, match=rf"layers\.0\.attn\.{name} has dtype .*allowed: F32, BF16"):
        load_model(resaved(tensors), backend=ReferenceBackend())


def test_saving_one_ranks_model_is_refused(saved, tmp_path):
    with pytest.raises(NotImplementedError, match="cannot be saved"):
        load_model(saved, backend=ReferenceBackend()).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_config_that_transformers_would_misread(saved, tmp_path):
    settings = json.loads((saved / "config.json").read_text())
    settings["dim"] = settings.pop("hidden_size")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    assert DeepSeekV4Config.from_file(tmp_path).hidden_size == 64
    with pytest.raises(ValueError, match="hidden_size gives 4096 but dim gives 64"):
        load_model(tmp_path, backend=ReferenceBackend())


def test_bfloat16_model_runs(saved):
    model = load_model(saved, backend=ReferenceBackend(), dtype=torch.bfloat16)
    cache = load_all_ranks(saved, backend=ReferenceBackend())[1]
    batch = ForwardBatch.for_step(cache, request_slots=[0], starts=[0], lengths=[LENGTH])
    with torch.inference_mode():
        out = forward(model, IDS, batch)
    assert out.dtype == torch.bfloat16
    assert relative_norm(out, logits(saved)) <= 0.1  # a random MoE amplifies rounding: routes flip
