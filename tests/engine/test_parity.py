"""Greedy tokens equal transformers', whatever path the scheduler takes; and the check can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.models.rope_config
import engine.run.forward.model_runner
from engine import Engine, EngineConfig, EngineStats, SamplingParams
from engine.attention.forward_batch import ForwardBatch
from engine.layers.norm import RMSNorm
from engine.run.forward.to_device import to_device
from engine.sampling.sampling_rows import SamplingRows
from engine.schedule.batch.step_batch import StepBatch
from tests.engine.checkpoints import SHAPES, Shape, pool_bytes
from tests.engine.reference import NUM_NEW_TOKENS, NUM_PROMPTS, Reference

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
    "overlapped": {
        "async_scheduling": True,
        "pool_blocks": 14,
        "max_num_batched_tokens": 33,
    },
}


def config(folder: Path, shape: Shape, *, pool_blocks: int = 600, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 200, "max_num_seqs": 32, "max_num_batched_tokens": 2048,
        "kv_cache_bytes": pool_bytes(shape, pool_blocks, changes.get("block_size", 16)),
        "attention_backend": "torch",
    }  # fmt: skip
    return EngineConfig(str(folder), **{**values, **changes})


def generate(
    reference: Reference,
    shape: Shape,
    mode: dict[str, Any],
    change: Callable[[Engine], None] = lambda engine: None,
) -> tuple[list[str], EngineStats]:
    """Run all prompts; return the differences that no tie explains, and the stats."""
    with Engine(config(reference.folder, shape, **mode)) as built:
        change(built)
        completions = built.generate(reference.prompts, GREEDY)
        return reference.unexplained(completions), built.stats()


def test_enough_prompts_are_compared() -> None:
    """Issue: at least 200 prompts on at least 4 checkpoints."""
    assert len(SHAPES) >= 4
    assert len(SHAPES) * NUM_PROMPTS >= 200


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BY_NAME)
def test_greedy_tokens_equal_transformers(name: str, mode: str, references: dict[str, Reference]) -> None:
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
    ("name", "mode"), [*((name, "cached") for name in BY_NAME), *(("gqa4_tied", mode) for mode in MODES)]
)
def test_the_cpu_backend_gives_the_same_tokens(
    name: str, mode: str, references: dict[str, Reference]
) -> None:
    """Every checkpoint; one of them in every mode."""
    pytest.importorskip("numba", reason="numba is not installed, so the CPU kernels cannot be compiled")
    settings = {**MODES[mode], "attention_backend": "cpu"}
    differences, stats = generate(references[name], BY_NAME[name], settings)
    assert differences == []
    assert (stats.num_preemptions > 0) == ("pool_blocks" in settings)


def test_parity_catches_a_context_one_too_short(
    references: dict[str, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes of the cpu backend that do not see their own token."""
    pytest.importorskip("numba", reason="numba is not installed, so the CPU kernels cannot be compiled")
    from engine.attention.cpu_backend import CpuBackend

    build = CpuBackend.build_metadata

    def build_short(self: Any, tables: Any, context_lens: Any, query_lens: Any) -> Any:
        return build(self, tables, context_lens - (query_lens == 1), query_lens)

    monkeypatch.setattr(CpuBackend, "build_metadata", build_short)
    differences, _ = generate(references["gqa4_tied"], BY_NAME["gqa4_tied"], {"attention_backend": "cpu"})
    assert differences


def test_answers_are_not_one_token_repeated(references: dict[str, Reference]) -> None:
    """A model that repeats itself would hide a wrong position; these do not."""
    for reference in references.values():
        kinds = [len(set(answer)) for answer in reference.answers]
        assert sum(kinds) / len(kinds) > NUM_NEW_TOKENS / 3


@pytest.mark.parametrize("name", ["gqa2_tied_hub", "gqa4_tied"])
def test_bfloat16_logits_stay_near_float32(name: str, references: dict[str, Reference]) -> None:
    """bfloat16 has 8 bits of mantissa: logits within a few percent of their spread, not equal."""
    reference = references[name]
    with Engine(config(reference.folder, BY_NAME[name], dtype="bfloat16", pool_blocks=1200)) as built:
        for prompt in reference.prompts[:12]:
            logits = prefill_logits(built, prompt)
            expected = reference.logits(prompt)
            assert logits.dtype == torch.bfloat16
            error = (logits - expected).pow(2).mean().sqrt() / expected.std()
            assert error < 0.06


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
    return seen[0][0]


# Mutations: each is a fault someone made before; the parity check must see it on every checkpoint.


def shifted_decode_positions(batch: ForwardBatch, num_new: list[int]) -> ForwardBatch:
    """Decode tokens are placed one position too far."""
    is_decode = torch.repeat_interleave(torch.tensor([n == 1 for n in num_new]), torch.tensor(num_new))
    return replace(batch, positions=batch.positions + is_decode.long())


def one_wrong_slot(batch: ForwardBatch, num_new: list[int]) -> ForwardBatch:
    """The first token of each step's last sequence is stored in the slot after its own."""
    slot_mapping = batch.slot_mapping.clone()
    slot_mapping[-num_new[-1]] += 1 if slot_mapping[-num_new[-1]] % 16 < 15 else -1
    return replace(batch, slot_mapping=slot_mapping)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("mutate", [shifted_decode_positions, one_wrong_slot])
def test_parity_catches_a_faulty_batch(
    name: str, mutate: Any, references: dict[str, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Position off by one; one wrong slot."""

    def build(step: StepBatch, *args: Any) -> tuple[ForwardBatch, SamplingRows | None]:
        batch, rows = to_device(step, *args)
        return mutate(batch, step.query_lens.tolist()), rows

    monkeypatch.setattr(engine.run.forward.model_runner, "to_device", build)
    monkeypatch.setattr(
        engine.run.forward.model_runner.ModelRunner, "_probe", lambda self: None
    )  # it sees a slot too
    differences, _ = generate(references[name], BY_NAME[name], MODES["uncached"])
    assert len(differences) > NUM_PROMPTS // 4 if mutate is shifted_decode_positions else differences


def skip_norm(layer_name: str) -> Callable[[Engine], None]:
    def change(built: Engine) -> None:
        for name, module in built._open_runner().model.named_modules():
            if isinstance(module, RMSNorm) and name.rpartition(".")[2] == layer_name:
                module.forward = lambda x: x  # type: ignore[method-assign]

    return change


def swap_q_and_k_norm(built: Engine) -> None:
    for layer in built._open_runner().model.model.layers:
        layer.self_attn.q_norm, layer.self_attn.k_norm = layer.self_attn.k_norm, layer.self_attn.q_norm


FAULTS = {
    **{
        f"{name} skipped": skip_norm(name)
        for name in ("q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "norm")
    },
    "q_norm and k_norm swapped": swap_q_and_k_norm,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", BY_NAME)
def test_parity_catches_a_faulty_model(name: str, fault: str, references: dict[str, Reference]) -> None:
    """Norms skipped one kind at a time; q_norm and k_norm swapped."""
    differences, _ = generate(references[name], BY_NAME[name], MODES["uncached"], FAULTS[fault])
    assert len(differences) > NUM_PROMPTS // 4


@pytest.mark.parametrize("name", [name for name, shape in BY_NAME.items() if shape.rope_theta != 10_000.0])
def test_parity_catches_a_fixed_rope_theta(
    name: str, references: dict[str, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """rope_theta fixed at 10,000."""
    read = engine.models.rope_config.number

    def read_number(values: Any, name: str) -> float:
        return 10_000.0 if name == "rope_theta" else read(values, name)

    monkeypatch.setattr(engine.models.rope_config, "number", read_number)
    differences, _ = generate(references[name], BY_NAME[name], MODES["uncached"])
    assert len(differences) > NUM_PROMPTS // 4
