"""Greedy tokens equal transformers', whatever path the scheduler takes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig, EngineStats, SamplingParams
from tests.engine.checkpoints import SHAPES, Shape, pool_bytes
from tests.engine.reference import NUM_NEW_TOKENS, Reference

GREEDY = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
BY_NAME = {shape.name: shape for shape in SHAPES}
MODES: dict[str, dict[str, Any]] = {
    "cached": {},
    "uncached": {"enable_prefix_caching": False},
    "chunked": {"max_num_seqs": 6, "max_num_batched_tokens": 13, "enable_prefix_caching": False},
    "chunked_cached": {"max_num_seqs": 6, "max_num_batched_tokens": 13},
    "preempted": {"pool_blocks": 16, "enable_prefix_caching": False},
    "preempted_chunked_cached": {"pool_blocks": 14, "max_num_batched_tokens": 33},
    "blocks_of_4": {"block_size": 4},
    "overlapped": {"async_scheduling": True, "pool_blocks": 14, "max_num_batched_tokens": 33},
}


def config(folder: Path, shape: Shape, *, pool_blocks: int = 600, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 200, "max_num_seqs": 32, "max_num_batched_tokens": 2048,
        "kv_cache_bytes": pool_bytes(shape, pool_blocks, changes.get("block_size", 16)),
        "attention_backend": "torch",
    }  # fmt: skip
    return EngineConfig(str(folder), **{**values, **changes})


def generate(
    reference: Reference, shape: Shape, mode: dict[str, Any]
) -> tuple[list[str], EngineStats]:
    """Run all prompts; return the differences that no tie explains, and the stats."""
    with Engine(config(reference.folder, shape, **mode)) as built:
        completions = built.generate(reference.prompts, GREEDY)
        return reference.unexplained(completions), built.stats()


#: Each checkpoint, and each mode with one of them; the rest of the grid is long.
EACH_ONCE = {*((name, "cached") for name in BY_NAME), *(("gqa4_tied", mode) for mode in MODES)}
GRID = [
    (name, mode) if (name, mode) in EACH_ONCE else pytest.param(name, mode, marks=pytest.mark.long)
    for name in BY_NAME
    for mode in MODES
]


@pytest.mark.parametrize(("name", "mode"), GRID)
def test_greedy_tokens_equal_transformers(
    name: str, mode: str, references: dict[str, Reference]
) -> None:
    """Every token of every prompt, and the mode did what its name says."""
    reference, settings = references[name], MODES[mode]
    differences, stats = generate(reference, BY_NAME[name], settings)
    assert differences == []
    assert stats.free_blocks == stats.num_blocks
    assert (stats.cached_tokens > 0) == settings.get("enable_prefix_caching", True)
    assert (stats.num_preemptions > 0) == ("pool_blocks" in settings)
    if mode == "chunked":
        num_prompt_tokens = sum(map(len, reference.prompts))
        assert stats.prefill_tokens == num_prompt_tokens
        assert stats.num_steps * settings["max_num_batched_tokens"] >= num_prompt_tokens


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("gqa2_tied_hub", "cached"),
        ("gqa4_tied", "overlapped"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in sorted(EACH_ONCE)),
    ],
)
def test_the_cpu_backend_gives_the_same_tokens(
    name: str, mode: str, references: dict[str, Reference]
) -> None:
    """Every checkpoint; one of them in every mode."""
    pytest.importorskip(
        "numba", reason="numba is not installed, so the CPU kernels cannot be compiled"
    )
    settings = {**MODES[mode], "attention_backend": "cpu"}
    differences, stats = generate(references[name], BY_NAME[name], settings)
    assert differences == []
    assert (stats.num_preemptions > 0) == ("pool_blocks" in settings)


def test_float32_logits_equal_transformers(references: dict[str, Reference]) -> None:
    """The same comparison in float32 is three orders of magnitude closer."""
    for name, reference in references.items():
        with Engine(config(reference.folder, BY_NAME[name])) as built:
            for prompt in reference.prompts[:8]:
                torch.testing.assert_close(
                    prefill_logits(built, prompt), reference.logits(prompt), rtol=1e-4, atol=2e-4
                )


def prefill_logits(built: Engine, prompt: list[int]) -> torch.Tensor:
    """Logits [vocabulary] of the token after the prompt."""
    seen: list[torch.Tensor] = []
    runner = built._open_runner()
    run_model = runner.forward
    runner.forward = lambda batch: seen.append(run_model(batch)) or seen[-1].clone()  # type: ignore[method-assign]
    built.add("logits", prompt, replace(GREEDY, max_tokens=1))
    built.step()
    del runner.forward
    return seen[0][0].cpu()
