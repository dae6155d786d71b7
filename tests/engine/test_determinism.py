"""A seeded completion depends on its prompt and parameters alone."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, EngineStats, SamplingParams
from tests.engine.checkpoints import SHAPES, pool_bytes
from tests.engine.graphs import simulate_graphs

SHAPE = next(shape for shape in SHAPES if shape.name == "gqa4_tied")
MIXES: list[dict[str, Any]] = [
    {"temperature": 0.8}, {"temperature": 1.3, "top_k": 20, "frequency_penalty": 0.5, "min_tokens": 4},
    {"top_p": 0.9, "repetition_penalty": 1.4, "allowed_token_ids": range(40, 300, 3)}, {"min_p": 0.05},
    {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.0, "logit_bias": {7: 3, 8: 2.5, 9: 2}, "bad_words": ["e", "th", " a b"]},
    {"n": 3}, {"n": 2, "top_p": 0.8, "presence_penalty": 1.0},
]  # fmt: skip


def requests() -> list[tuple[list[int], SamplingParams]]:
    """64 prompts of which some share a prefix, each with its own seed."""
    rng = random.Random(5)
    prefix = [rng.randrange(3, 500) for _ in range(20)]
    prompts = [
        prefix * (i % 2) + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 40))]
        for i in range(64)
    ]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    return [
        (prompt, replace(params, seed=1000 + i, **MIXES[i % len(MIXES)]))
        for i, prompt in enumerate(prompts)
    ]


def config(folders: dict[str, Path], *, pool_blocks: int = 2000, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "max_model_len": 96, "kv_cache_bytes": pool_bytes(SHAPE, pool_blocks), "attention_backend": "torch",
    }  # fmt: skip
    return EngineConfig(str(folders[SHAPE.name]), **{**values, **changes})


def run(
    config: EngineConfig, requests: list[tuple[list[int], SamplingParams]]
) -> tuple[list[Any], EngineStats]:
    with Engine(config) as engine:
        completions = engine.generate(
            [prompt for prompt, _ in requests], [params for _, params in requests]
        )
        return [
            (completion.index, completion.token_ids) for completion in completions
        ], engine.stats()


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> list[list[tuple[int, list[int]]]]:
    """Each request on its own, nothing cached."""
    with Engine(config(folders, enable_prefix_caching=False)) as engine:
        return [
            [
                (completion.index, completion.token_ids)
                for completion in engine.generate([prompt], params)
            ]
            for prompt, params in requests()
        ]


def flat(groups: list[list[Any]]) -> list[Any]:
    return [item for group in groups for item in group]


def test_the_same_in_a_batch_of_64(folders: dict[str, Path], alone: Any) -> None:
    """n > 1 included, whose samples differ from each other and share the prompt's blocks."""
    completions, stats = run(config(folders), requests())
    assert completions == flat(alone)
    assert stats.max_running >= 64
    assert stats.cached_tokens > 0
    assert all(len({tuple(token_ids) for _, token_ids in group}) == len(group) for group in alone)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_after_preemption_and_chunked_prefill(
    folders: dict[str, Path], alone: Any, overlap: bool
) -> None:
    """A small pool and a small budget: sequences are thrown out half-way and computed again."""
    limits = {"pool_blocks": 18, "max_num_seqs": 16, "max_num_batched_tokens": 37}
    small = config(folders, **limits, async_scheduling=overlap)
    completions, stats = run(small, requests())
    assert completions == flat(alone)
    assert stats.num_preemptions > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_from_graphs(
    folders: dict[str, Path],
    alone: Any,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whose rows hold each sequence's seed, sample and position, and are told of changes alone."""
    capture = simulate_graphs(monkeypatch)
    limits = {"pool_blocks": 18, "max_num_seqs": 9, "max_num_batched_tokens": 37}
    completions, stats = run(config(folders, **limits, async_scheduling=overlap), requests())
    assert completions == flat(alone)
    assert stats.num_preemptions > 0
    assert len(set(capture.replayed)) > 5
    assert "a step raised" not in caplog.text


@pytest.mark.long
def test_the_same_with_the_cpu_backend(folders: dict[str, Path]) -> None:
    """Alone, in a batch of 64 that shares prefixes, and in a pool so small that sequences are preempted."""
    pytest.importorskip(
        "numba", reason="numba is not installed, so the CPU kernels cannot be compiled"
    )
    with Engine(config(folders, enable_prefix_caching=False, attention_backend="cpu")) as engine:
        expected = [
            (completion.index, completion.token_ids)
            for prompt, params in requests()
            for completion in engine.generate([prompt], params)
        ]
    small = {"pool_blocks": 20, "max_num_seqs": 16, "max_num_batched_tokens": 37}
    for settings in ({}, small):
        completions, stats = run(config(folders, attention_backend="cpu", **settings), requests())
        assert completions == expected
        assert (stats.num_preemptions > 0) == (settings is small)


def test_a_request_without_seed_gets_a_fresh_one(folders: dict[str, Path]) -> None:
    """Two such requests differ; the engine's own seed repeats the run."""
    params = SamplingParams(max_tokens=12, temperature=2.0, ignore_eos=True)
    runs = [run(config(folders, seed=seed), [([5, 6, 7], params)] * 2)[0] for seed in (1, 1, 2)]
    assert runs[0][0] != runs[0][1]
    assert runs[0] == runs[1] != runs[2]
