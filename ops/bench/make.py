"""Random checkpoints in the shapes of real models, and the workloads that are run on them.

These weights are for speed: they repeat a token in most steps, so equal output proves little.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ops.bench.workload import Workload

OUT = Path("ops/out/bench")
INITIALIZER_RANGE = 0.02
PROMPT_TOKENS = 10_000  # prompts take ids below this, or the vocabulary's where it is smaller
END = "<|endoftext|>"

Span = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 decoder with tied embeddings."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rope_theta: float


SHAPES = {
    "tiny": Shape(32, 1, 2, 1, 16, 64, 512, 512, 1e4),
    "q54m": Shape(512, 12, 8, 4, 64, 1536, 32_000, 4096, 1e4),
    "q06b": Shape(1024, 28, 16, 8, 128, 3072, 151_936, 40_960, 1e6),  # Qwen3-0.6B's
}


def make_checkpoint(folder: Path, shape: Shape, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint with its tokenizer in Hugging Face layout; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size, "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta, "rms_norm_eps": 1e-6, "attention_bias": False,
        "tie_word_embeddings": True, "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": None, "eos_token_id": shape.vocab_size - 1, "pad_token_id": shape.vocab_size - 1,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(size, dtype=dtype)
        if len(size) == 1
        else (torch.randn(size, generator=generator) * INITIALIZER_RANGE).to(dtype)
        for name, size in tensor_sizes(shape)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder, shape)
    return folder


def existing_checkpoint(folder: Path, shape: str, dtype: torch.dtype = torch.float32) -> Path:
    """The folder, with a checkpoint of the shape made in it if there is none; half of one is never there."""
    if not folder.exists():
        unfinished = folder.with_name(folder.name + ".unfinished")
        make_checkpoint(unfinished, SHAPES[shape], dtype).rename(folder)
    return folder


def tensor_sizes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and size of each tensor; those of one dimension are norms."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "self_attn.q_proj.weight", (queries, hidden)
        yield layer + "self_attn.k_proj.weight", (keys, hidden)
        yield layer + "self_attn.v_proj.weight", (keys, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, queries)
        yield layer + "self_attn.q_norm.weight", (shape.head_dim,)
        yield layer + "self_attn.k_norm.weight", (shape.head_dim,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        yield layer + "mlp.gate_proj.weight", (inner, hidden)
        yield layer + "mlp.up_proj.weight", (inner, hidden)
        yield layer + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def _tokens(rng: random.Random, count: int, vocab_size: int = PROMPT_TOKENS) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def _mixed(
    name: str,
    model: str,
    num_seqs: int,
    prompts: Span,
    answers: Span,
    *,
    seed: int,
    vocab_size: int = PROMPT_TOKENS,
) -> Workload:
    """Prompts and answers of lengths within the spans."""
    rng = random.Random(seed)
    made = [_tokens(rng, rng.randint(*prompts), vocab_size) for _ in range(num_seqs)]
    return Workload(name, model, made, [rng.randint(*answers) for _ in range(num_seqs)])


def _shared(
    name: str, num_seqs: int, num_common: int, tails: Span, answers: Span, *, seed: int
) -> Workload:
    """Prompts that begin alike."""
    tail = _mixed(name, "q54m", num_seqs, tails, answers, seed=seed)
    common = _tokens(random.Random(seed + 1), num_common)
    return replace(tail, prompts=[common + own for own in tail.prompts])


def make_workloads(seed: int = 0) -> dict[str, Workload]:
    """Make the workloads W1 to W5, by name. Another seed gives other tokens and lengths of the same kind."""
    workloads = (
        _mixed("W1", "q54m", 64, (32, 256), (32, 256), seed=seed + 100),
        _shared("W2", 64, 512, (32, 32), (32, 32), seed=seed + 101),
        _mixed("W3", "q06b", 16, (32, 128), (16, 64), seed=seed + 103),
        _shared("W4", 256, 896, (16, 64), (1, 4), seed=seed + 101),
        _mixed("W5", "q54m", 48, (16, 64), (200, 400), seed=seed + 104),
    )
    return {workload.name: workload for workload in workloads}


WORKLOADS: dict[str, Workload] = {
    **make_workloads(),
    # nano-vLLM's benchmark, token for token
    "mixed256": _mixed(
        "mixed256", "q06b", 256, (100, 1024), (100, 1024), seed=0, vocab_size=PROMPT_TOKENS + 1
    ),
}


def save_tokenizer(folder: Path, shape: Shape) -> None:
    """Byte-level BPE of 256 bytes and one merge; the other ids are names that no text gives."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [
        *alphabet,
        "th",
        *(f"token{i}" for i in range(len(alphabet) + 1, shape.vocab_size - 1)),
        END,
    ]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
