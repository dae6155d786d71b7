"""On a GPU, and with GPU_TESTS_ON_CPU=1 in Triton's interpreter: transformers' tokens through every way of a step."""

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine import Engine, EngineConfig, SamplingParams
from tests.engine import families, family_runs
from tests.engine import test_determinism as determinism
from tests.engine.checkpoints import SHAPES, Shape, make_checkpoint, pool_bytes
from tests.engine.gpu import ON_CPU, needs_gpu, sized
from tests.engine.reference import Reference

DEVICE = "cpu" if ON_CPU else "cuda"
pytestmark = needs_gpu

NUM_NEW_TOKENS = sized(24, 3)
GREEDY = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
BY_NAME = {shape.name: shape for shape in SHAPES}
WAYS: dict[str, dict[str, Any]] = {
    "graphs, overlap": {"enforce_eager": False, "async_scheduling": True},
    "eager, overlap": {"enforce_eager": True, "async_scheduling": True},
    "graphs": {"enforce_eager": False, "async_scheduling": False},
    "eager": {"enforce_eager": True, "async_scheduling": False},
}
MODES: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks": {"max_num_seqs": 6, "max_num_batched_tokens": 23},
    "preempted": {"pool_blocks": 16, "max_num_batched_tokens": 65},
}


def config(folder: Path, shape: Shape, *, pool_blocks: int = 600, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "dtype": "float32", "device": DEVICE, "attention_backend": "triton", "max_model_len": 200,
        "max_num_seqs": 32, "max_num_batched_tokens": 2048, "kv_cache_bytes": pool_bytes(shape, pool_blocks),
    }  # fmt: skip
    return EngineConfig(str(folder), **{**values, **changes})


@pytest.fixture(scope="module")
def shortened(references: dict[str, Reference]) -> dict[str, Reference]:
    """The references; where the interpreter runs, four prompts of each and short answers."""
    if not ON_CPU:
        return references
    few = {name: copy(reference) for name, reference in references.items()}
    for reference in few.values():
        reference.prompts = [reference.prompts[i] for i in (0, 2, 7, 8)]
        reference.answers = [
            reference._generate(prompt)[:NUM_NEW_TOKENS] for prompt in reference.prompts
        ]
    return few


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_equal_transformers(
    way: str, mode: str, shortened: dict[str, Reference]
) -> None:
    """The checkpoint whose four heads share one KV head, in float32."""
    reference, shape = shortened["gqa4_tied"], BY_NAME["gqa4_tied"]
    with Engine(config(reference.folder, shape, **WAYS[way], **MODES[mode])) as engine:
        completions = engine.generate(reference.prompts, GREEDY)
        assert ON_CPU or (engine.stats().num_preemptions > 0) == (mode == "preempted")
    assert reference.unexplained(completions) == []


@pytest.mark.parametrize("name", BY_NAME)
def test_every_checkpoint_gives_transformers_tokens(
    name: str, shortened: dict[str, Reference]
) -> None:
    """The default way: graphs, overlap and prefix cache."""
    reference = shortened[name]
    with Engine(config(reference.folder, BY_NAME[name])) as engine:
        completions = engine.generate(reference.prompts, GREEDY)
    assert reference.unexplained(completions) == []


@pytest.mark.parametrize("name", ["mixtral_window", "qwen3_moe", "gpt_oss"])
def test_families_with_experts_give_transformers_tokens(name: str, tmp_path: Path) -> None:
    """Graphs that hold the choice of experts and their products, windows and sinks."""
    reference = family_runs.reference_of(tmp_path, families.BY_NAME[name])
    if ON_CPU:
        reference.prompts = reference.prompts[1:3]
    settings = family_runs.config_of(tmp_path, "chunks", "triton")
    greedy = replace(GREEDY, max_tokens=family_runs.NUM_NEW_TOKENS)
    with Engine(replace(settings, device=DEVICE)) as engine:
        completions = engine.generate(reference.prompts, greedy)
    assert reference.unexplained(completions) == []


def test_seeded_tokens_are_the_same_in_every_way_and_batch(folders: dict[str, Path]) -> None:
    """Alone and eagerly, then all together through each way: sampling depends on neither."""
    requests = determinism.requests()[: 2 if ON_CPU else 16]
    if ON_CPU:
        requests = [(prompt, replace(params, max_tokens=2)) for prompt, params in requests]
    changes: dict[str, Any] = {"device": DEVICE, "attention_backend": "triton"}
    alone = determinism.config(folders, max_num_seqs=1, **WAYS["eager"], **changes)
    expected, _ = determinism.run(alone, requests)
    for way in WAYS.values():
        together = determinism.config(folders, max_num_seqs=24, **way, **changes)
        assert determinism.run(together, requests)[0] == expected


def test_bfloat16_heads_of_128_follow_float32(tmp_path: Path) -> None:
    """Qwen3-0.6B's head shape in its own dtype: the first tokens, where float32 is sure of them."""
    shape = Shape(
        "wide", hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=128, tied=True, seed=7
    )
    reference = Reference(make_checkpoint(tmp_path / "wide", shape))
    reference.prompts = reference.prompts[: 3 if ON_CPU else 40]
    half = config(reference.folder, shape, dtype="bfloat16")
    with Engine(half) as engine:
        completions = engine.generate(reference.prompts, replace(GREEDY, max_tokens=1))
    sure = 0
    for prompt, completion in zip(reference.prompts, completions, strict=True):
        logits = reference.logits(prompt)
        best, second = logits.topk(2).values.tolist()
        if best - second > 0.1 * float(logits.std()):
            sure += 1
            assert completion.token_ids[0] == int(logits.argmax())
    assert sure > len(completions) // 2
