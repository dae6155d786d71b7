"""deterministic=True: all bits of a completion depend on its request alone; what cannot so is refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import (
    Completion,
    Engine,
    EngineConfig,
    EngineStats,
    NotDeterministic,
    SamplingParams,
    ScoringParams,
)
from engine.layers.embedding import ParallelLMHead
from engine.layers.linear import ReplicatedLinear
from engine.layers.onednn import linear, pack_weight
from engine.layers.parallel import TensorParallel
from engine.layers.row_tiles import TiledProduct, find_tiles
from engine.models.deterministic import check_deterministic
from engine.models.load import read_supported
from tests.engine.checkpoints import SHAPES, VOCAB_SIZE, pool_bytes
from tests.engine.families import FAMILIES, make_family

pytest.importorskip("numba", reason="numba is not installed, so the CPU kernels cannot be compiled")
SHAPE = next(shape for shape in SHAPES if shape.name == "gqa2_bias")
CPU = torch.device("cpu")


def config(folder: Path, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "device": "cpu", "deterministic": True, "max_model_len": 384,
        "kv_cache_bytes": pool_bytes(SHAPE, 1500),
    }  # fmt: skip
    return EngineConfig(str(folder), **{**values, **changes})


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(NotDeterministic) as caught:
        Engine(config(folder, **changes))
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_on_the_request_alone(folders: dict[str, Path], dtype: str) -> None:
    """Alone, and in a shuffled batch with preemption, chunks, cached prefixes and overlap."""
    small = pool_bytes(SHAPE, 28) // (1 if dtype == "float32" else 2)
    settings, requests = config(folders[SHAPE.name], dtype=dtype), make_requests(24)
    limits = {"max_num_batched_tokens": 61, "max_num_seqs": 24, "kv_cache_bytes": small}
    found, stats = run_all(replace(settings, **limits, async_scheduling=True), requests)
    assert found == run_alone(settings, requests)
    assert stats.num_preemptions > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_a_model_with_states_depend_on_the_request_alone(
    tmp_path: Path, dtype: str
) -> None:
    """States are computed alike in chunks, from snapshots and token by token."""
    folder = make_family(tmp_path, next(family for family in FAMILIES if family.name == "qwen3_5"))
    settings, requests = config(folder, dtype=dtype), make_requests(24)
    limits = {
        "max_num_batched_tokens": 61,
        "max_num_seqs": 24,
        "kv_cache_bytes": 1 << (17 if dtype == "float32" else 16),
    }
    found, stats = run_all(replace(settings, **limits, async_scheduling=True), requests)
    assert found == run_alone(settings, requests)
    assert stats.num_preemptions > 0
    assert stats.cached_tokens > 0


def test_every_product_of_the_model_is_tiled(folders: dict[str, Path]) -> None:
    """Which a small model's bits would not tell: oneDNN sums few inputs alike in any batch."""
    for is_deterministic in (True, False):
        with Engine(config(folders[SHAPE.name], deterministic=is_deterministic)) as engine:
            model = engine._open_runner().model  # type: ignore[attr-defined]
            products = [
                m for m in model.modules() if isinstance(m, (ReplicatedLinear, ParallelLMHead))
            ]
            assert len(products) == 4 * SHAPE.num_layers + 1
            assert {isinstance(product.instead, TiledProduct) for product in products} == {
                is_deterministic
            }


def test_a_request_without_a_seed_draws_one_from_its_prompt(folders: dict[str, Path]) -> None:
    params = SamplingParams(max_tokens=8, temperature=2.0, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9], [5, 6, 7]]

    def tokens(order: list[int], **changes: Any) -> dict[int, list[int]]:
        with Engine(config(folders[SHAPE.name], **changes)) as engine:
            found = engine.generate([prompts[i] for i in order], params)
        return {i: completion.token_ids for i, completion in zip(order, found, strict=True)}

    straight = tokens([0, 1, 2])
    assert straight == tokens([2, 1, 0])
    assert straight[0] == straight[2] != straight[1]
    assert straight != tokens([0, 1, 2], seed=1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attention_backend": "torch"}, "'torch' on cpu"),
        ({"dtype": "float16"}, "'torch' on cpu"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype='auto'"),
        ({"model_path": "transformers"}, "transformers"),
    ],
)
def test_refused_by_name(folder: Path, changes: dict[str, Any], told: str) -> None:
    assert told in refusal(folder, **changes)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_mixtures_of_experts_are_refused(tmp_path: Path, model_type: str) -> None:
    family = next(family for family in FAMILIES if family.model_type == model_type)
    assert "mixture of experts" in refusal(make_family(tmp_path, family))


def test_more_ranks_than_two_are_refused(folder: Path) -> None:
    _, path = read_supported(folder, "auto")
    check_deterministic("it", path.decoder, TensorParallel(0, 2))
    with pytest.raises(NotDeterministic, match="tensor_parallel_size=3"):
        check_deterministic("it", path.decoder, TensorParallel(0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiled_product_gives_each_row_the_same_bits(dtype: torch.dtype) -> None:
    """2,048 inputs, of which oneDNN sums a single row in another order."""
    generator = torch.Generator().manual_seed(1)
    weight = pack_weight(
        torch.nn.Parameter(
            torch.randn(33, 2048, generator=generator).to(dtype), requires_grad=False
        )
    )
    x = torch.randn(300, 2048, generator=generator).to(dtype)
    bias = torch.randn(33, generator=generator).to(dtype)

    def product(rows: Tensor, bias: Tensor | None) -> Tensor:
        return linear(rows, weight, bias)

    tiled = TiledProduct(product, find_tiles(product, 2048, dtype, bias))
    whole = tiled(x, bias)
    torch.testing.assert_close(whole, product(x, bias))
    for num_rows in (0, 1, 7, 9, 41, 257):
        assert torch.equal(tiled(x[3 : 3 + num_rows], bias), whole[3 : 3 + num_rows])


def test_sums_that_differ_below_the_rounding_are_found() -> None:
    """As with AMX: the last bit of a float32 sum hangs on the number of rows, and bfloat16 seldom shows it."""
    weight = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))

    def product(rows: Tensor, bias: Tensor | None) -> Tensor:
        sums = torch.cat([row.float() @ weight.T for row in rows.split(1)])
        sums = torch.nextafter(sums, sums + 1) if len(rows) > 32 else sums
        return (sums if bias is None else sums + bias.float()).to(torch.bfloat16)

    assert find_tiles(product, 64, torch.bfloat16, None) == [8, 16, 32]


Request = tuple[list[int], SamplingParams | ScoringParams]
Bits = tuple[
    object, ...
]  # all that a completion says, so that two are equal when all their bits are
MIXES: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 5}, {"temperature": 0.8, "logprobs": 0},
    {"temperature": 1.3, "top_k": 20, "frequency_penalty": 0.5, "min_tokens": 4, "logprobs": 1},
    {"top_p": 0.9, "repetition_penalty": 1.4, "prompt_logprobs": 2}, {"n": 2, "logprobs": 3, "min_p": 0.05},
    {"temperature": 0.0, "logit_bias": {7: 3, 8: 2.5, 9: 2}, "prompt_logprobs": 0, "logprobs": 0},
]  # fmt: skip


def make_requests(number: int) -> list[Request]:
    """Prompts of 1 to 260 tokens, of which many begin alike, some of them scored alone; each with a seed."""
    rng = random.Random(3)
    prefixes = [
        [rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (0, 30, 70, 190)
    ]
    requests: list[Request] = []
    for i in range(number):
        tail = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 70))]
        prompt = prefixes[i % len(prefixes)] + tail
        values = MIXES[i % len(MIXES)]
        params = SamplingParams(max_tokens=rng.randrange(4, 13), seed=1000 + i, ignore_eos=True)
        if i % 7 == 6:
            continuations = [[tail[0], 9], [tail[0], 9, 11], [12, *tail]]
            requests.append((prompt, ScoringParams(continuations, score_end="auto")))
        else:
            requests.append((prompt, replace(params, **values)))
    return requests


def bits_of(completion: Completion) -> Bits:
    """Log probabilities as they are, whose floats compare by value."""
    return (
        completion.index,
        tuple(completion.token_ids),
        completion.text,
        completion.finish_reason,
        repr(completion.logprobs),
        repr(completion.prompt_logprobs),
        repr(completion.loglikelihoods),
    )


def run_all(
    config: EngineConfig, requests: Sequence[Request]
) -> tuple[list[list[Bits]], EngineStats]:
    """Each request's completions, all in the engine at once, in any order; a fifth comes later and thrusts some out."""
    found: list[list[Bits]] = [[] for _ in requests]
    order = random.Random(4).sample(range(len(requests)), len(requests))
    with Engine(config) as engine:
        done: list[Completion] = []
        first = order[: len(order) * 4 // 5]
        for i in first:
            engine.add(str(i), *requests[i], lane=1)
        for i in order[len(first) :]:
            done += engine.step()
            engine.add(str(i), *requests[i])
        while engine.has_unfinished:
            done += engine.step()
        for completion in done:
            found[int(completion.request_id)].append(bits_of(completion))
        return [sorted(each, key=lambda bits: str(bits[0])) for each in found], engine.stats()


def run_alone(config: EngineConfig, requests: Sequence[Request]) -> list[list[Bits]]:
    """Each request's completions, one request after another and nothing cached."""
    with Engine(replace(config, enable_prefix_caching=False)) as engine:
        found: list[list[Bits]] = []
        for prompt, params in requests:
            engine.add("alone", prompt, params)
            done: list[Bits] = []
            while engine.has_unfinished:
                done += map(bits_of, engine.step())
            found.append(sorted(done, key=lambda bits: str(bits[0])))
        return found
