"""The triton backend's engine: transformers' tokens, padding that leaves no trace, and faults that show."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine import Engine, EngineConfig, SamplingParams
from engine.attention.kv_cache import KVCache
from engine.attention.triton_backend import TritonBackend
from engine.kernels.products import fused_heads
from engine.layers.activation import SiluAndMul
from engine.layers.norm import RMSNorm
from engine.run.forward.model_runner import ModelRunner
from engine.schedule.scheduler import Scheduler
from tests.engine import test_determinism as determinism
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


def test_heads_projected_whole_give_transformers_tokens(few: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As steps of many rows have them: here every step, through graphs where it may."""
    monkeypatch.setattr(fused_heads, "MIN_ROWS", 1)
    capture = simulate_graphs(monkeypatch)
    reference = copy(few["gqa2_bias"])
    reference.answers, reference.prompts = reference.answers[:2], reference.prompts[:2]
    assert differences(reference, BY_NAME["gqa2_bias"], {"max_num_seqs": 2}) == []
    assert capture.replayed


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are admitted into the last free blocks: few short ones would not preempt each other else."""
    monkeypatch.setattr(Scheduler, "_num_growing", lambda scheduler: 0)


def test_greedy_tokens_equal_transformers_after_preemption(few: Any, crowded: None) -> None:
    """A pool that the prompts fill, in blocks of 4: the next token preempts."""
    short = copy(few["gqa4_tied"])
    kept = [i for i, prompt in enumerate(short.prompts) if len(prompt) < 65]
    short.answers = [short.answers[i] for i in kept]
    short.prompts = [short.prompts[i] for i in kept]
    settings = {"pool_blocks": 26, "block_size": 4, "max_model_len": 104}
    assert differences(short, BY_NAME["gqa4_tied"], settings) == []


def test_the_layers_use_the_fused_kernels(few: Any) -> None:
    """Or the parity above would say nothing of them. With the torch backend they use none."""
    for name, expected in (("triton", True), ("torch", False)):
        with Engine(config(few["gqa4_tied"].folder, BY_NAME["gqa4_tied"], attention_backend=name)) as built:
            model = built._open_runner().model
            layers = [module for module in model.modules() if isinstance(module, RMSNorm | SiluAndMul)]
            used = [layer for layer in layers if layer.kernels is not None]
            assert used == (layers if expected else [])


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


def test_one_wrong_slot_is_caught(few: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of each step goes to the slot after its own."""
    store = TritonBackend.norm_rotate_and_store

    def store_wrongly(self: Any, *parts: Any) -> torch.Tensor:
        *others, slot_mapping = parts
        wrong = slot_mapping.clone()
        wrong[0] += 1 if wrong[0] % 16 < 15 else -1
        return store(self, *others, wrong)

    monkeypatch.setattr(TritonBackend, "norm_rotate_and_store", store_wrongly)
    monkeypatch.setattr(ModelRunner, "_probe", lambda self: None)  # it sees it too
    assert differences(few["gqa4_tied"], BY_NAME["gqa4_tied"], {"enable_prefix_caching": False})


def test_a_context_one_too_short_is_caught(few: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes that do not see their own token."""
    build = TritonBackend.build_and_upload

    def build_short(self: Any, tables: Any, context_lens: Any, query_lens: Any, *rest: Any) -> Any:
        return build(self, tables, context_lens - (query_lens == 1), query_lens, *rest)

    monkeypatch.setattr(TritonBackend, "build_and_upload", build_short)
    assert differences(few["gqa4_tied"], BY_NAME["gqa4_tied"], {})


def test_a_seeded_completion_does_not_depend_on_its_batch(folders: dict[str, Path], crowded: None) -> None:
    """Alone, together, and together in a pool so small that sequences are preempted."""
    mixes = [determinism.requests()[i] for i in (2, 0, 1, 4)]
    requests = [(prompt, replace(params, max_tokens=5)) for prompt, params in mixes]
    settings: dict[str, Any] = {"attention_backend": "triton", "max_num_seqs": 8}
    alone = determinism.config(folders, enable_prefix_caching=False, pool_blocks=50, **settings)
    with Engine(alone) as built:
        expected = [
            (completion.index, completion.token_ids)
            for prompt, params in requests
            for completion in built.generate([prompt], params)
        ]
    for pool_blocks, budget in ((50, 1024), (6, 23)):
        together = determinism.config(
            folders, pool_blocks=pool_blocks, max_num_batched_tokens=budget, **settings
        )
        completions, stats = determinism.run(together, requests)
        assert completions == expected
        assert (stats.num_preemptions > 0) == (pool_blocks == 6)
