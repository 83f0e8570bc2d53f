"""The model and the inputs of `sglang_server_check.py`: a DeepSeek-V4 of real attention widths with random weights.

    python test/gpu/sglang_server_model.py FOLDER 128       # its config.json with 128 heads, for a server of one's own
    python test/gpu/sglang_server_model.py FOLDER 128 --num-layers 18       # the same layers three times over

Everything here is a function of its arguments alone, so that the client and every worker process agree on it: the
sinks of a layer, the prompts, and the tokens that a sequence is made to continue with.
"""

import argparse
import json
import pickle
import sys
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

VOCAB_SIZE = 32_768
COMPRESS_RATIOS = (0, 4, 128, 4, 128, 0)
# Shorter than the window; ratio 128 with few entries; ratio 4 on both sides of the 512 entries that the indexer picks.
PROMPT_TOKENS = (2240, 2040, 300, 170, 60, 40, 30, 20)
# Of each set in a circle. A decode step of 3 sequences replays the graph of 4, with a row of padding; 1 has its own.
PROMPT_SETS = (PROMPT_TOKENS, PROMPT_TOKENS[::3], PROMPT_TOKENS[1:2])
NUM_WATCHED = 64  # tokens whose log-probabilities are compared at every step

CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "head_dim": 512,
    "num_key_value_heads": 1,
    "q_lora_rank": 1024,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 448,
    "qk_rope_head_dim": 64,
    "v_head_dim": 512,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "window_size": 128,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "num_nextn_predict_layers": 0,
    "num_hash_layers": 0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1024,
    "intermediate_size": 2048,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "compress_rope_theta": 160_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65_536,
    },
    "max_position_embeddings": 65_536,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}


def write_model(folder: Path, num_heads: int, num_layers: int = len(COMPRESS_RATIOS)) -> None:
    """`config.json` for a server's `--load-format dummy`; the weights are made in the workers (`sglang_server_plugin`).

    Raises:
        ValueError: heads that the model's output groups do not divide, or layers that are not whole turns of
            `COMPRESS_RATIOS`.
    """
    if num_heads < 1 or num_heads % CONFIG["o_groups"]:
        raise ValueError(f"num_heads: {num_heads}, allowed: multiples of {CONFIG['o_groups']}")
    turns, rest = divmod(num_layers, len(COMPRESS_RATIOS))
    if turns < 1 or rest:
        raise ValueError(f"num_layers: {num_layers}, allowed: multiples of {len(COMPRESS_RATIOS)}")
    sizes = {"num_attention_heads": num_heads, "num_hidden_layers": num_layers}
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | sizes | {"compress_ratios": list(COMPRESS_RATIOS) * turns}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def sink_values(layer_id: int, num_heads: int, seed: int) -> torch.Tensor:
    """float32 [num_heads] on the CPU.

    The same in a server that loads its model with another default dtype, whose draws differ in more than rounding.
    Drawn around 4: a window of 128 random keys sums to about e^5.4, so that a sink takes a fifth of the softmax and a
    wrong one shows far above rounding.
    """
    generator = torch.Generator().manual_seed(1_000 * seed + layer_id)
    return 4 + 2 * torch.randn(num_heads, generator=generator, dtype=torch.float32)


def sink_tensors(num_heads: int, seed: int) -> list[tuple[str, torch.Tensor]]:
    """(checkpoint name, values) of every layer's sinks."""
    return [
        (f"layers.{layer_id}.attn.attn_sink", sink_values(layer_id, num_heads, seed))
        for layer_id in range(len(COMPRESS_RATIOS))
    ]


def write_sinks(folder: Path, num_heads: int, seed: int) -> None:
    """A checkpoint of nothing but sinks, for `/update_weights_from_disk`."""
    from safetensors.torch import save_file

    write_model(folder, num_heads)
    save_file(dict(sink_tensors(num_heads, seed)), folder / "model.safetensors")


def sink_payload(num_heads: int, seed: int) -> str:
    """The sinks as `/update_weights_from_tensor` takes them for one rank: a pickle with the values in it, base64.

    SGLang's own serialiser sends handles to shared memory, which only a parent process of the server can give.
    """
    return b64encode(pickle.dumps(sink_tensors(num_heads, seed))).decode()


def prompts(number: int = 0) -> list[list[int]]:
    """The `number`-th set of prompts: 8 of them in set 0, 3 in set 1, 1 in set 2, 8 others in set 3, and so on.

    How long they are says `PROMPT_SETS`.
    """
    generator = torch.Generator().manual_seed(11 + 100 * number)
    lengths = PROMPT_SETS[number % len(PROMPT_SETS)]
    return [torch.randint(2, VOCAB_SIZE, (count,), generator=generator).tolist() for count in lengths]


def forced_tokens() -> torch.Tensor:
    """int64 [positions]: what follows a token at that position, in every sequence."""
    generator = torch.Generator().manual_seed(12)
    return torch.randint(2, VOCAB_SIZE, (CONFIG["max_position_embeddings"],), generator=generator)


def watched_tokens() -> list[int]:
    generator = torch.Generator().manual_seed(13)
    return torch.randperm(VOCAB_SIZE, generator=generator)[:NUM_WATCHED].sort().values.tolist()


class _Parser(argparse.ArgumentParser):
    """What is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made where it is missing")
    parser.add_argument("num_heads", type=int, metavar="HEADS", help=f"a multiple of {CONFIG['o_groups']}")
    parser.add_argument(
        "--num-layers",
        type=int,
        default=len(COMPRESS_RATIOS),
        help=f"a multiple of {len(COMPRESS_RATIOS)}, the default",
    )
    args = parser.parse_args(arguments)
    try:
        write_model(args.folder, args.num_heads, args.num_layers)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
