"""Hits that end inside a block: keys and values are copied, whatever the cache holds, whatever goes wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, SamplingParams
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import FP8, KVCache
from engine.run.forward.model_runner import ModelRunner
from tests.engine.accounting import check_accounting
from tests.engine.reference import Reference
from tests.engine.test_logprobs import NAME, config

PROMPT = [11, 12, 13, 14, 15] * 4 + [16]  # a block and five tokens
GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize("heads", [[(2, 4), (2, 4), (2, 4)], [(1, 3), (2, 8), (2, 8), (1, 3)]])
def test_slots_are_copied_in_all_layers(dtype: torch.dtype, heads: list[tuple[int, int]]) -> None:
    """Also where layers are of different shapes; no other slot changes."""
    layers = [AttentionFeatures(2, *each, scale=1.0) for each in heads]
    cache = KVCache(layers, num_blocks=3, block_size=4, dtype=dtype, device=torch.device("cpu"))
    raw = cache.pool.view(torch.uint8)
    raw.copy_(torch.randint(0, 100, raw.shape, generator=torch.Generator().manual_seed(0)))
    before = [
        side.float().flatten(0, 1) for layer in cache.layers for side in (layer.keys, layer.values)
    ]
    sources, targets = [1, 2, 0, 1], [9, 10, 5, 6]
    cache.copy(torch.tensor(sources), torch.tensor(targets))
    after = [
        side.float().flatten(0, 1) for layer in cache.layers for side in (layer.keys, layer.values)
    ]
    for old, new in zip(before, after, strict=True):
        expected = old.clone()
        expected[targets] = old[sources]
        assert torch.equal(new, expected)


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [completion.token_ids for completion in engine.generate(prompts, GREEDY)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_answers_are_those_without_prefix_caching(
    folders: dict[str, Path], overlap: bool, dtype: str
) -> None:
    """Behind the first one each of the others computes one token, and not six."""
    prompts = [[*PROMPT, 20 + i] for i in range(4)]
    values = {"async_scheduling": overlap, "kv_cache_dtype": dtype, "attention_backend": "torch"}
    with Engine(config(folders[NAME], enable_prefix_caching=False, **values)) as engine:
        expected = answers(engine, prompts)
    with Engine(config(folders[NAME], **values)) as engine:
        assert answers(engine, prompts[:1]) + answers(engine, prompts[1:]) == expected
        assert engine.stats().prefill_tokens == 22 + 3 * 1
        assert answers(engine, [[*PROMPT[:19], 30], prompts[2]])[1] == expected[2]
        assert engine.stats().prefill_tokens == 22 + 3 * 1 + 1 + 1


def test_a_step_that_is_repeated_copies_the_same(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises behind all it has written, then by halves; one raises alone and fails, the others go on."""
    launch = ModelRunner.launch

    def breaking(runner: ModelRunner, step: Any, sampling: Any) -> Any:
        pending = launch(runner, step, sampling)
        if (step.token_ids == 23).any():
            raise ValueError("23")
        return pending

    monkeypatch.setattr(ModelRunner, "launch", breaking)
    reference = Reference(
        folders[NAME],
        [[*PROMPT, 20 + i] for i in range(6) if i != 3],
        num_new_tokens=GREEDY.max_tokens,
    )
    with Engine(config(folders[NAME], max_num_seqs=8)) as engine:
        done = engine.generate([[*PROMPT, 20 + i] for i in range(6)], GREEDY)
        assert done.pop(3).finish_reason == "error"
        assert reference.unexplained(done) == []
        check_accounting(engine._scheduler)
