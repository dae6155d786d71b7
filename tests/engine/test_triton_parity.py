"""The triton backend's engine: transformers' tokens, padding that leaves no trace, and faults that show."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine import Engine, EngineConfig, SamplingParams
from engine.attention.kv_cache import KVCache
from tests.engine.checkpoints import SHAPES, Shape, make_checkpoint, pool_bytes
from tests.engine.families import BY_NAME as FAMILIES
from tests.engine.family_runs import reference_of, run
from tests.engine.graphs import simulate_graphs
from tests.engine.reference import Reference, mixed_prompts

pytestmark = pytest.mark.long

# The interpreter takes milliseconds for each program: few prompts, those around a block and with a prefix,
# and two layers, where other tests have up to four.
PROMPTS = (0, 2, 3, 7, 11)
LONGEST = "gqa4_tied"  # the one checkpoint that has the prompt of 168 tokens too
NUM_NEW_TOKENS = 4
GREEDY = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
BY_NAME = {shape.name: replace(shape, num_layers=2) for shape in SHAPES}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in BY_NAME),
    ("gqa4_tied", {"enable_prefix_caching": False}),
    ("gqa4_tied", {"max_num_seqs": 5, "max_num_batched_tokens": 23}),
]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """References with few prompts and short answers."""
    made = {}
    for name, shape in BY_NAME.items():
        folder = make_checkpoint(tmp_path_factory.mktemp("few") / name, shape)
        prompts = [mixed_prompts(len(name))[i] for i in PROMPTS]
        kept = [prompt for prompt in prompts if len(prompt) < 168 or name == LONGEST]
        made[name] = Reference(folder, kept, num_new_tokens=NUM_NEW_TOKENS)
    return made


def config(folder: Path, shape: Shape, *, pool_blocks: int = 100, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 200, "max_num_seqs": 8, "max_num_batched_tokens": 1024,
        "kv_cache_bytes": pool_bytes(shape, pool_blocks, changes.get("block_size", 16)),
        "attention_backend": "triton",
    }  # fmt: skip
    return EngineConfig(str(folder), **{**values, **changes})


def differences(
    reference: Reference,
    shape: Shape,
    settings: dict[str, Any],
    change: Callable[[Engine], None] = lambda engine: None,
) -> list[str]:
    """Run the prompts; return the differences that no tie explains."""
    with Engine(config(reference.folder, shape, **settings)) as built:
        change(built)
        completions = built.generate(reference.prompts, GREEDY)
        assert (built.stats().num_preemptions > 0) == ("pool_blocks" in settings)
        return reference.unexplained(completions)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_greedy_tokens_equal_transformers(name: str, settings: dict[str, Any], few: Any) -> None:
    """Every checkpoint; then one uncached, and one in chunks."""
    assert differences(few[name], BY_NAME[name], settings) == []


@pytest.mark.parametrize("name", ["gemma2", "phi3"])
def test_attention_features_give_transformers_tokens_through_graphs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows shorter than the prompts, soft caps, gelu gates, merged weights, in chunks of 24 tokens."""
    reference = reference_of(tmp_path, FAMILIES[name])
    reference.prompts = [reference.prompts[i] for i in (1, 4)]
    capture = simulate_graphs(monkeypatch)
    differing, _ = run(reference, "chunks", "triton")
    assert differing == []
    assert capture.replayed


@pytest.mark.parametrize(("name", "longest"), [("gqa4_tied", 200), ("gqa2_bias", 75)])
def test_through_graphs_padding_writes_nowhere_and_changes_nothing(
    name: str, longest: int, few: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens stay the same; the pool's last slot, which an index of -1 would hit, stays zero.

    Three prompts of up to `longest` tokens in graphs of four rows.
    """
    reference, shape, caches = copy(few[name]), BY_NAME[name], []
    by_length = sorted(range(len(reference.prompts)), key=lambda i: len(reference.prompts[i]))
    kept = [i for i in by_length if len(reference.prompts[i]) <= longest][-3:]
    reference.answers = [reference.answers[i] for i in kept]
    reference.prompts = [reference.prompts[i] for i in kept]
    capture = simulate_graphs(monkeypatch)
    settings = {"max_num_seqs": 4}
    assert differences(reference, shape, settings, lambda built: caches.append(cache_of(built))) == []
    assert capture.replayed
    assert (caches[0].pool != 0).any()
    for layer in caches[0].layers:
        assert (layer.keys[-1, -1] == 0).all()
        assert (layer.values[-1, -1] == 0).all()


def cache_of(built: Engine) -> KVCache:
    cache: KVCache = built._open_runner().cache  # type: ignore[union-attr]
    return cache
