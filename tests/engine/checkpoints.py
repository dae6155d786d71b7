"""Random Qwen3 checkpoints; wide weights and random norms show mistakes that a fresh checkpoint hides."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "Der März ist ein Monat. Le café est fermé à midi, naïvement. Ñandú, ångström, Œuvre.",
    "Numbers: 0 1 2 3 4 5 6 7 8 9 10 1987 2024. Dates: 3rd of March, '87 gives 1987-03-03.",
]
VOCAB_SIZE = 512


@dataclass(frozen=True)
class Shape:
    """Sizes of one test checkpoint; head_dim * heads differs from the hidden size in all of them."""

    name: str
    hidden_size: int = 48
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    tied: bool = False
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    vocab_size: int = VOCAB_SIZE
    max_positions: int = 512
    seed: int = 0


SHAPES = [
    Shape("gqa1_untied", num_heads=4, num_kv_heads=4, rope_theta=500.0, rms_norm_eps=1e-3, seed=1),
    Shape("gqa2_tied_hub", hidden_size=40, num_layers=3, tied=True, rope_theta=1_000_000.0, seed=2),
    Shape(
        "gqa4_tied",
        num_heads=4,
        num_kv_heads=1,
        tied=True,
        rope_theta=2_000.0,
        rms_norm_eps=1e-2,
        seed=3,
    ),
    Shape(
        "gqa2_sharded",
        hidden_size=56,
        num_layers=4,
        num_heads=6,
        num_kv_heads=3,
        rope_theta=50.0,
        seed=4,
    ),
    Shape(
        "gqa2_bias",
        hidden_size=72,
        num_heads=4,
        num_kv_heads=2,
        attention_bias=True,
        rope_theta=300.0,
        seed=5,
    ),
]


def pool_bytes(shape: Shape, num_blocks: int, block_size: int = 16) -> int:
    """kv_cache_bytes of a float32 pool of num_blocks blocks."""
    return num_blocks * shape.num_layers * 2 * block_size * shape.num_kv_heads * shape.head_dim * 4


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over a few sentences, with chat tokens and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 8,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_checkpoint(folder: Path, shape: Shape) -> Path:
    """Write a random float32 checkpoint with its tokenizer; return its folder."""
    torch.manual_seed(shape.seed)
    config = Qwen3Config(
        hidden_size=shape.hidden_size,
        intermediate_size=2 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tied,
        rms_norm_eps=shape.rms_norm_eps,
        attention_bias=shape.attention_bias,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.4, 1.6)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def write_random(model: PreTrainedModel, folder: Path) -> Path:
    """Save a new model with random norms, biases and sinks, and its tokenizer; return its folder."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or ".ln" in name:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.6, 0.6))
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "sink" in name:
                parameter.normal_(0.0, 1.0)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def write_as_the_hub_does(folder: Path) -> None:
    """Rewrite a tied checkpoint as the hub holds Qwen3-0.6B: older keys, bfloat16, `lm_head.weight` present."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    config.pop("dtype")
    config.pop("layer_types", None)
    config["torch_dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path, num_shards: int = 3) -> None:
    """Split model.safetensors into shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    weight_map = {}
    for i in range(num_shards):
        name = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::num_shards]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
