"""A family's checkpoint through the engine in each mode, compared with transformers token by token."""

import random
from pathlib import Path
from typing import Any

from engine import Engine, EngineConfig, EngineStats, SamplingParams
from engine.checkpoint.model_config import read_model_config
from tests.engine.families import Family, make_family
from tests.engine.reference import Reference

NUM_NEW_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
BLOCK_SIZE = 16
#: all: chunks of 24 tokens, prefixes found in the cache, and a pool that holds a part of the sequences.
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 6},
    "all": {"pool_blocks": 11, "max_num_batched_tokens": 24, "max_num_seqs": 6},
    "tp2": {"tensor_parallel_size": 2, "max_num_batched_tokens": 24, "max_num_seqs": 6},
}


def prompts() -> list[list[int]]:
    """Of 13 to 100 tokens, most behind one of two prefixes, which end inside and at the end of a block."""
    rng = random.Random(0)
    prefixes = [[rng.randrange(3, 500) for _ in range(length)] for length in (21, 48)]
    lengths = (100, 13, 90, 15, 40, 14, 30, 30)
    return [
        (prefixes[i % 2] if i > 2 else []) + [rng.randrange(3, 500) for _ in range(length)]
        for i, length in enumerate(lengths)
    ]


def reference_of(folder: Path, family: Family) -> Reference:
    """Make the family's checkpoint there; transformers' answers, from no cache, come when asked for."""
    return Reference(
        make_family(folder, family), prompts(), num_new_tokens=NUM_NEW_TOKENS, use_cache=False
    )


def config_of(
    folder: Path,
    mode: str = "all",
    backend: str = "torch",
    *,
    max_model_len: int = 170,
    block_bytes: int | None = None,
    **settings: Any,
) -> EngineConfig:
    """The engine's configuration of a mode. block_bytes: of a KV block, where config.json does not say it."""
    changes = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, **MODES[mode], **settings}
    model = read_model_config(folder)
    ranks = changes.get("tensor_parallel_size", 1)
    num_layers = model.num_layers - (model.values.get("layer_types") or []).count(
        "linear_attention"
    )
    layer_bytes = 2 * BLOCK_SIZE * max(1, model.num_kv_heads // ranks) * model.head_dim * 4
    return EngineConfig(
        str(folder),
        dtype="float32",
        max_model_len=max_model_len,
        attention_backend=backend,
        block_size=BLOCK_SIZE,
        kv_cache_bytes=changes.pop("pool_blocks", 300)
        * (block_bytes or max(1, num_layers) * layer_bytes),
        **changes,
    )


def run(
    reference: Reference, mode: str = "all", backend: str = "torch", **settings: Any
) -> tuple[list[str], EngineStats]:
    """Generate for all prompts; return the differences that no tie explains, and the stats."""
    with Engine(config_of(reference.folder, mode, backend, **settings)) as engine:
        completions = engine.generate(reference.prompts, GREEDY)
        return reference.unexplained(completions), engine.stats()
