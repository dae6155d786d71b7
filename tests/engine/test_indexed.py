"""Attention to tokens that an index chooses: its keys are paged, and its tokens are transformers'."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import engine.attention.indexers
import engine.attention.torch_backend
from engine import (
    AttentionRefused,
    Engine,
    NotDeterministic,
    SamplingParams,
    UnsupportedModel,
    check_up,
)
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import FP8, KVCache
from engine.attention.state_pool import StatePool, StateShape
from engine.attention.torch_backend import TorchBackend
from engine.checkpoint.model_config import read_model_config
from engine.layers.parallel import TensorParallel
from engine.run.describe import describe_model
from engine.run.forward.model_runner import ModelRunner
from ops.models.__main__ import differences_of
from tests.engine.accounting import check_accounting
from tests.engine.architectures import Architectures, make_architecture, small
from tests.engine.paged import attend
from tests.engine.reference import Reference, mixed_prompts

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture
def folder(architecture: Architectures) -> Path:
    """Of three layers, of which two have an index, of 12 tokens."""
    found: Path = architecture("glm_moe_dsa").reference.folder
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "hy_v4"])
def test_tokens_are_transformers_in_six_modes(name: str, architecture: Architectures) -> None:
    assert differences_of(architecture(name).reference, six_modes=True)[1] == []


@pytest.mark.long
def test_an_index_that_holds_all_tokens_is_exact(tmp_path: Path) -> None:
    folder = make_architecture(tmp_path / "model", "deepseek_v32", index_topk=512)
    reference = Reference(folder, mixed_prompts(seed=3)[:6], num_new_tokens=12, use_cache=False)
    assert differences_of(reference, six_modes=False)[1] == []


@pytest.mark.parametrize("overlap", [False, True])
def test_hits_that_end_inside_a_block_bring_their_index_keys(
    folder: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two samples of a prompt share its blocks, too; an index scores some rows at a time."""
    monkeypatch.setattr(engine.attention.indexers, "SCORES_AT_ONCE", 200)
    asked = [[7 * i % 500 + 3 for i in range(37)] + tail for tail in ([], [9], [8, 8, 8], [9])]
    reference = Reference(folder, asked, num_new_tokens=12, use_cache=False)
    with Engine(small(folder, dtype="float32", async_scheduling=overlap)) as built:
        for i in range(len(asked)):
            found = built.generate(asked[i : i + 1], replace(GREEDY, n=2, seed=1))
            assert [each.token_ids for each in found] == [reference.answers[i]] * 2
        assert built.stats().cached_tokens >= 3 * 36
        check_accounting(built._scheduler)


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_index_keys_are_counted(folder: Path, dtype: str) -> None:
    """In their own dtype, whatever keys and values are in; as foretold without weights."""
    with Engine(
        small(folder, dtype="float32", kv_cache_dtype=dtype, attention_backend="torch")
    ) as built:
        runner = built._open_runner()
        assert isinstance(runner, ModelRunner)
        cache, size = runner.cache, runner.pool_size
        assert cache.index is not None
        assert cache.index.num_bytes == size.num_blocks * built.config.block_size * 2 * 16 * 4
        assert cache.num_bytes == size.num_bytes == cache.pool.nbytes + cache.index.num_bytes
        (foretold,) = (each.text for each in check_up(built.config) if each.subject == "memory")
        assert f" {size.num_blocks * built.config.block_size} tokens in all" in foretold
    assert f"{3 * 2 * 4 * 24 * 4 + 2 * 16 * 4:,} bytes a token" in describe_model(str(folder))


def test_index_keys_are_copied_with_their_slots() -> None:
    cache = KVCache(
        [AttentionFeatures(2, 1, 4, 1.0)],
        num_blocks=3,
        block_size=4,
        dtype=torch.float32,
        device=CPU,
    )
    shapes = [StateShape(layer, "index_keys", 0, (3,), torch.bfloat16) for layer in (0, 2)]
    cache.index = StatePool(shapes, 12, CPU)
    rows = torch.arange(12)
    cache.index.write(rows, [torch.rand(12, 3).bfloat16() for _ in shapes])
    before = cache.index.read(rows)
    cache.copy(torch.tensor([1, 2]), torch.tensor([9, 10]))
    moved = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 11])
    assert all(
        torch.equal(new, old[moved])
        for old, new in zip(before, cache.index.read(rows), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_a_query_sees_its_chosen_tokens_alone(
    dtype: torch.dtype, num_groups: int, sinks: Tensor | None
) -> None:
    """For all heads or each KV head, of one row or many; never what comes after it."""
    rng, features = (
        torch.Generator().manual_seed(1),
        AttentionFeatures(4, 2, 8, 0.3, is_indexed=True),
    )
    backend = TorchBackend(CPU)
    for context_len, query_len in ((1, 1), (9, 1), (30, 1), (30, 7), (17, 17)):
        cache = KVCache(
            [features], num_blocks=9, block_size=4, dtype=dtype, device=CPU,
            scales=[(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.0]))] if dtype == FP8 else None,
        )  # fmt: skip
        layer = cache.layers[0]
        table = torch.randperm(9, generator=rng)[: -(-context_len // 4)]
        slots = torch.tensor([int(table[i // 4]) * 4 + i % 4 for i in range(context_len)])
        layer.write(*torch.randn(2, context_len, 2, 8, generator=rng), slots)
        stored = [pool.flatten(0, 1)[slots].float() for pool in (layer.keys, layer.values)]
        if layer.scales is not None:
            stored = [
                each * scale[:, None] for each, scale in zip(stored, layer.scales, strict=True)
            ]
        query = torch.randn(query_len, 4, 8, generator=rng)
        places = torch.arange(context_len - query_len, context_len)
        chosen = torch.full((num_groups, query_len, 7), -1)
        for group, row in np.ndindex(num_groups, query_len):
            place = int(places[row])
            before = torch.randperm(place + 1, generator=rng)[:4]
            chosen[group, row, : len(before)] = before
            chosen[group, row, 5] = place + 1 if place + 1 < context_len else -1
        metadata, _ = backend.build_metadata(
            table[None].numpy().astype(np.int32), np.array([context_len]), np.array([query_len])
        )
        found = backend.forward(query, layer, replace(metadata, chosen=chosen), features, sinks)
        for row, place in enumerate(places.tolist()):
            for head in range(4):
                own = sorted(
                    {int(i) for i in chosen[head // 2 % num_groups, row] if 0 <= i <= place}
                )
                keys, values = (each[own, head // 2][:, None].double() for each in stored)
                sink = None if sinks is None else sinks[head : head + 1].double()
                rows = query[row, head][None, None].double()
                expected = attend(rows, keys, values, 0.3, sinks=sink)[0, 0]
                assert torch.allclose(found[row, head].double(), expected, atol=1e-5)


def test_other_tokens_than_the_chosen_are_found_at_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By comparing the model with itself as transformers runs it, beyond the index's tokens."""
    choose = engine.attention.torch_backend._chosen

    def all_tokens(span: Any, cache: Any, features: Any, dtype: torch.dtype, tokens: Tensor) -> Any:
        every = torch.arange(span.context_len, device=tokens.device)
        return choose(span, cache, features, dtype, every.expand(*tokens.shape[:2], -1))

    monkeypatch.setattr(engine.attention.torch_backend, "_chosen", all_tokens)
    with pytest.raises(
        UnsupportedModel, match="attends differently here than in transformers' own code"
    ):
        Engine(small(folder))


def test_what_is_not_built_is_refused(folder: Path) -> None:
    with pytest.raises(
        AttentionRefused, match=r"tokens that an index chooses.* use attention_backend='torch'"
    ):
        Engine(small(folder, attention_backend="cpu"))
    with pytest.raises(
        (AttentionRefused, NotDeterministic), match=re.compile("index|deterministic")
    ):
        Engine(small(folder, deterministic=True, dtype="float32"))
    with pytest.raises(
        UnsupportedModel, match=r"tensor_parallel_size=2: .*set tensor_parallel_size=1"
    ):
        ModelRunner(small(folder), read_model_config(folder), folder, TensorParallel(0, 2))
