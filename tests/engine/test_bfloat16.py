"""In bfloat16 on the cpu backend every token is chosen as float32 would, within what its rounding explains.

Logits of bfloat16 move with the batch, so tokens are not compared: of each token that the engine chose, the
float32 model's logit after the same tokens is held against its best one. The checkpoints are those of the
parity tests, whose float32 greedy tokens equal transformers'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba", reason="numba is not installed, so the CPU kernels cannot be compiled")

from engine import Engine, SamplingParams
from tests.engine.checkpoints import SHAPES
from tests.engine.families import BY_NAME as FAMILIES
from tests.engine.family_runs import config_of, prompts, reference_of
from tests.engine.reference import Reference

NUM_NEW_TOKENS = 12
LARGEST = 0.12  # of models without experts; measured 0.056
LARGEST_MEAN = (
    0.04  # with experts, of which a near tie of the router takes another; transformers' own has 0.035
)
GREEDY = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)


def shortfalls(reference: Reference, answers: list[list[int]]) -> Tensor:
    """By how much each chosen token's logit is below the best one, over the spread of the logits."""
    found = []
    for prompt, answer in zip(reference.prompts, answers, strict=True):
        with torch.inference_mode():
            logits = reference.model(torch.tensor([prompt + answer]), use_cache=False).logits[0]
        logits = logits[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        found.append((logits.amax(-1) - chosen) / logits.std(-1))
    return torch.cat(found)


def engine_answers(reference: Reference, **settings: Any) -> list[list[int]]:
    config = config_of(reference.folder, backend="cpu", **settings)
    config = replace(config, dtype="bfloat16", kv_cache_bytes=config.kv_cache_bytes // 2)
    with Engine(config) as built:
        completions = built.generate(reference.prompts, GREEDY)
        assert built.stats().num_preemptions > 0
        assert built.stats().cached_tokens > 0
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """The reference of a family, made when it is first asked for."""
    made: dict[str, Reference] = {}

    def find(name: str) -> Reference:
        if name not in made:
            made[name] = reference_of(tmp_path_factory.mktemp(name), FAMILIES[name])
        return made[name]

    return find


def is_near(found: Tensor, *, has_experts: bool = False) -> bool:
    return bool(found.mean() < LARGEST_MEAN if has_experts else found.max() < LARGEST)


@pytest.mark.parametrize("name", [shape.name for shape in SHAPES])
def test_qwen3_chooses_as_float32_does(name: str, references: dict[str, Reference]) -> None:
    """In chunks of 24 tokens, behind cached prefixes, with preemptions, all at once."""
    reference = Reference(references[name].folder, prompts())
    assert is_near(shortfalls(reference, engine_answers(reference)))


@pytest.mark.parametrize("name", ["gemma2", "mistral", "gpt_oss", "qwen3_moe"])
def test_families_choose_as_float32_does(name: str, family: Callable[[str], Reference]) -> None:
    """Soft caps and windows, sinks, experts."""
    found = shortfalls(family(name), engine_answers(family(name)))
    assert is_near(found, has_experts=name in ("gpt_oss", "qwen3_moe"))
