"""On a GPU, and with GPU_TESTS_ON_CPU=1 in Triton's interpreter: kernels in 16 bits, in the sizes of published models.

Each result may differ from float64 by what rounding explains. The interpreter takes fewer heads and shorter contexts.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine.attention.kv_cache import FP8, LayerKVCache
from engine.attention.layer_kernels import LayerKernels
from engine.attention.triton_backend import TritonBackend
from engine.layers.gated_delta_net import DeltaHeads
from engine.layers.grouped_linear import ExpertGroups
from engine.layers.linear import ColumnParallelLinear
from engine.layers.lora import Block, LowRank
from engine.layers.lora_tables import LowRankTables
from engine.layers.parallel import Share
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows
from tests.engine import float64
from tests.engine.float64 import share_of_rounding
from tests.engine.gpu import needs_gpu, sized
from tests.engine.paged import DEVICE, PagedBatch, attend_by, make_batch, sharing
from tests.engine.sampler_cases import by_triton, rows_of
from tests.engine.test_delta_net import PARTS, Case, triton
from tests.engine.test_packed_experts import EXPERTS, make_layer
from tests.engine.test_packed_weights import make_product
from tests.engine.test_prefix_attention import begins_of, sharing_backend

pytestmark = needs_gpu


@dataclass(frozen=True)
class Heads:
    """A model's heads, and what its attention has besides, as make_batch takes it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    features: dict[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Of make_batch, without window, soft cap and sinks. The interpreter takes two KV heads."""
        group = self.num_heads // self.num_kv_heads
        return {"head_dim": self.head_dim, "group": group, "kv_heads": sized(self.num_kv_heads, 2)}


HEADS = {
    "Llama-3.2-1B": Heads(32, 8, 64),
    "gpt-oss-20b": Heads(64, 8, 64, {"window": 128, "has_sinks": True}),
    "Qwen3-0.6B": Heads(16, 8, 128),
    "Qwen3-8B": Heads(32, 8, 128),
    "Gemma-2-9B": Heads(16, 8, 256, {"window": sized(4096, 40), "soft_cap": 50.0}),
}
#: Contexts, and how many of each context's last tokens ask.
STEPS = {
    "decodes": (sized([1, 2, 17, 130, 600, 1500, 4500], [1, 17, 130, 600]), None),
    "prompts": (sized([700, 130, 64, 2], [70, 2]), sized([700, 130, 64, 2], [70, 2])),
    "chunks": (sized([4500, 900, 300], [300, 90]), sized([130, 65, 2], [70, 2])),
}
#: Scores are then as different as those of trained models, and a soft cap of 50 counts.
QUERY_LENGTH = 3.0
KV_DTYPES = {
    "bfloat16": (torch.bfloat16, False),
    "float16": (torch.float16, False),
    "bfloat16 over FP8": (torch.bfloat16, True),
    **sized({"float16 over FP8": (torch.float16, True)}, {}),
}
DTYPES = [torch.bfloat16, torch.float16]
in_both = pytest.mark.parametrize("dtype", DTYPES, ids=str)
over_every_cache = pytest.mark.parametrize("cached", KV_DTYPES)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random numbers on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)


def kernels() -> LayerKernels:
    found = TritonBackend(DEVICE).layer_kernels
    assert found is not None
    return found


def prepared(batch: PagedBatch, is_fp8: bool) -> PagedBatch:
    """The batch with longer queries, and with a cache of FP8 numbers if the GPU reads them."""
    batch.query.mul_(QUERY_LENGTH)
    if is_fp8 and (problem := TritonBackend.fp8_problem(DEVICE)):
        pytest.skip(problem)
    return batch.as_fp8() if is_fp8 else batch


def attention_error(backend: TritonBackend, batch: PagedBatch) -> float:
    """As a share of what rounding explains: of the result, and of the weights that meet the values."""
    found = attend_by(backend, batch)
    return share_of_rounding(found, batch.expected(), batch.rounded_inside())


@pytest.mark.parametrize("model", HEADS)
@pytest.mark.parametrize("step", STEPS)
@over_every_cache
def test_attention(model: str, step: str, cached: str) -> None:
    dtype, is_fp8 = KV_DTYPES[cached]
    contexts, queries = STEPS[step]
    heads = HEADS[model]
    batch = make_batch(contexts, queries, dtype=dtype, **heads.options, **heads.features)
    assert attention_error(TritonBackend(DEVICE), prepared(batch, is_fp8)) <= 1


@pytest.mark.parametrize("model", HEADS)
@over_every_cache
def test_attention_behind_a_common_prefix(model: str, cached: str) -> None:
    """In layers without windows. More sequences than a tile holds; some have a longer prefix, one has none."""
    dtype, is_fp8 = KV_DTYPES[cached]
    heads = HEADS[model]
    features = {name: value for name, value in heads.features.items() if name != "window"}
    shared = sized([66] * 40 + [40] * 3 + [0], [9] * 3 + [5] * 2 + [0])
    own = [1 + i % 40 for i in range(len(shared))]
    firsts = sized([0] * 40 + [40] * 3 + [43], [0] * 3 + [3] * 2 + [5])
    batch = sharing(
        shared, own, [1] * len(own), firsts=firsts, dtype=dtype, **heads.options, **features
    )
    batch = prepared(batch, is_fp8)
    backend = sharing_backend(batch)
    assert len(set(begins_of(backend, batch))) == 3
    assert attention_error(backend, batch) <= 1


#: Heads, KV heads, numbers of a head, those that are rotated, and whether heads are normalised.
ROTATED = {
    "Llama-3.2-1B": (32, 8, 64, 64, False),
    "gpt-oss-20b": (64, 8, 64, 64, False),
    "Qwen3-0.6B": (16, 8, 128, 128, True),
    "Qwen3-30B-A3B": (32, 4, 128, 128, True),
    "Gemma-2-9B": (16, 8, 256, 256, False),
    "Qwen3.5-9B": (16, 4, 256, 64, True),
}


@pytest.mark.parametrize("model", ROTATED)
@over_every_cache
def test_norm_rotate_and_store(model: str, cached: str) -> None:
    """Queries, keys and values are parts of one projection's rows. Every fifth token is padding."""
    dtype, is_fp8 = KV_DTYPES[cached]
    if is_fp8 and (problem := TritonBackend.fp8_problem(DEVICE)):
        pytest.skip(problem)
    num_heads, num_kv_heads, head_dim, width, has_norms = ROTATED[model]
    num_tokens = sized(300, 20)
    merged = draw(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    query, key, value = merged.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    query_norm = draw(head_dim, dtype=dtype, seed=1)
    key_norm = draw(head_dim, dtype=dtype, seed=2)
    angles = 1000 * draw(num_tokens, 1, width // 2, dtype=torch.float32, seed=3).repeat(1, 1, 2)
    rotation = angles.cos().to(dtype), angles.sin().to(dtype)
    num_blocks = num_tokens // 16 + 2
    slots = torch.randperm(num_blocks * 16, generator=torch.Generator().manual_seed(4))
    slots = slots[:num_tokens]
    slots[2::5] = -1
    slots = slots.to(DEVICE)
    pool = torch.zeros(2, num_blocks, 16, num_kv_heads, head_dim, device=DEVICE)
    pool = pool.to(FP8 if is_fp8 else dtype)
    exponents = torch.arange(num_kv_heads, device=DEVICE)
    scales = (2.0 ** (exponents - 8), 2.0 ** -(exponents + 5)) if is_fp8 else None
    found = kernels().norm_rotate_and_store(
        query, key, value, rotation, (query_norm, key_norm) if has_norms else None, 1e-6,
        LayerKVCache(pool[0], pool[1], scales), slots,
    )  # fmt: skip

    if has_norms:
        query = float64.rms_norm(query, query_norm, 1e-6)
        key = float64.rms_norm(key, key_norm, 1e-6)
    assert share_of_rounding(found, float64.rotate(query, *rotation)) <= 1
    is_kept = slots >= 0
    expected = float64.rotate(key, *rotation)[is_kept], value[is_kept].double()
    for side, wanted in enumerate(expected):
        stored = pool[side].flatten(0, 1)[slots[is_kept]]
        if scales is not None:
            # the largest FP8 number is 448
            wanted = (wanted / scales[side].double()[:, None]).clamp(-448, 448)
        assert share_of_rounding(stored, wanted) <= 1
    others = torch.ones(num_blocks * 16, dtype=torch.bool, device=DEVICE)
    others[slots[is_kept]] = False
    assert not pool.flatten(1, 2)[:, others].float().any()


@in_both
@pytest.mark.parametrize("hidden", [1024, 2880, 3584, 4096])
def test_norms(hidden: int, dtype: torch.dtype) -> None:
    """Alone, and with the residual addition before: then the norm is of the sum as it is stored."""
    num_rows = sized(300, 7)
    x = draw(num_rows, hidden, dtype=dtype)
    residual = draw(num_rows, hidden, dtype=dtype, seed=1)
    weight = draw(hidden, dtype=dtype, seed=2)
    normed = kernels().rms_norm(x, weight, 1e-6)
    assert share_of_rounding(normed, float64.rms_norm(x, weight, 1e-6)) <= 1
    normed, total = kernels().add_rms_norm(x, residual, weight, 1e-6)
    assert share_of_rounding(total, x.double() + residual.double()) <= 1
    assert share_of_rounding(normed, float64.rms_norm(total, weight, 1e-6)) <= 1


@in_both
@pytest.mark.parametrize("columns", [768, 2880, 14_336])
def test_gated_activations(columns: int, dtype: torch.dtype) -> None:
    gate_up = 4 * draw(sized(300, 5), 2 * columns, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    own = kernels()
    assert own.experts is not None
    assert share_of_rounding(own.silu_and_mul(gate_up), gate * gate.sigmoid() * up) <= 1
    assert share_of_rounding(own.gelu_and_mul(gate_up), float64.gelu_tanh(gate) * up) <= 1
    clamped = own.experts.clamped_swiglu_and_mul(gate_up, 1.702, 7.0)
    assert share_of_rounding(clamped, float64.clamped_swiglu(gate, up, 1.702, 7.0)) <= 1


@dataclass(frozen=True)
class ExpertSizes:
    """A model's mixture of experts."""

    num_experts: int
    num_chosen: int
    hidden: int
    columns: int
    has_bias: bool


MIXTURES = {
    "Qwen3-30B-A3B": sized(
        ExpertSizes(128, 8, 2048, 768, has_bias=False), ExpertSizes(16, 8, 128, 96, has_bias=False)
    ),
    "gpt-oss-20b": sized(
        ExpertSizes(32, 4, 2880, 2880, has_bias=True), ExpertSizes(8, 4, 180, 180, has_bias=True)
    ),
}


@in_both
@pytest.mark.parametrize("model", MIXTURES)
@pytest.mark.parametrize("num_tokens", sized([1, 40, 1000], [1, 40]))
def test_experts(model: str, num_tokens: int, dtype: torch.dtype) -> None:
    """The choice, and both products of the chosen experts: with few rows for each, and with more than a tile."""
    sizes = MIXTURES[model]
    own = kernels().experts
    assert own is not None
    scores = draw(num_tokens, sizes.num_experts, dtype=dtype)
    weights, chosen = own.choose(scores, sizes.num_chosen, normalised=True)
    highest = scores.double().gather(1, chosen)
    assert torch.equal(highest, scores.double().topk(sizes.num_chosen).values)
    assert all(len(set(row)) == sizes.num_chosen for row in chosen.tolist())
    torch.testing.assert_close(weights.double(), highest.softmax(-1), rtol=1e-5, atol=1e-6)

    tokens, places, ends = own.group(chosen, sizes.num_experts)
    experts = chosen.new_full((chosen.numel(),), -1)
    experts[places.flatten()] = chosen.flatten()
    counts = torch.bincount(experts, minlength=sizes.num_experts)
    assert torch.equal(experts, experts.sort().values)
    assert torch.equal(ends, counts.cumsum(0).int())
    assert torch.equal(
        tokens[places], torch.arange(num_tokens, device=DEVICE)[:, None].expand_as(places)
    )

    hidden = draw(num_tokens, sizes.hidden, dtype=dtype, seed=1)
    inner = draw(len(tokens), sizes.columns, dtype=dtype, seed=2)
    for x, out_features, seed in ((hidden[tokens], 2 * sizes.columns, 3), (inner, sizes.hidden, 4)):
        shape = (sizes.num_experts, out_features, x.shape[1])
        weight = draw(*shape, dtype=dtype, seed=seed)
        bias = draw(*shape[:2], dtype=dtype, seed=5) if sizes.has_bias else None
        found = own.product(x, weight, bias, ends)
        expected = float64.grouped_product(x, weight, bias, counts.tolist())
        assert share_of_rounding(found, expected) <= 1


@in_both
@pytest.mark.parametrize(("kind", "group"), [("int4", 128), ("fp8", 128)])
def test_products_with_packed_weights(kind: str, group: int, dtype: torch.dtype) -> None:
    """Qwen3-8B's keys, from 4096 numbers: for rows that meet each of the tiles."""
    out_features, in_features = sized((1024, 4096), (70, 256))
    product, weight = make_product(kind, out_features, in_features, group, "triton", dtype)
    for num_rows in (1, 17, sized(300, 70)):
        x = draw(num_rows, in_features, dtype=dtype)
        bias = draw(out_features, dtype=dtype, seed=1)
        found = product(x, bias)
        expected = x.double() @ weight.to(DEVICE).T + bias.double()
        assert share_of_rounding(found, expected) <= 1


@in_both
@pytest.mark.parametrize(("kind", "group"), [("int4", 128), ("fp4", 32)])
def test_products_of_experts_with_packed_weights(kind: str, group: int, dtype: torch.dtype) -> None:
    """Five experts of gpt-oss-20b's size, or nearly so: one without a row, one with a few, one with many."""
    out_features, in_features = sized((2880, 2816), (70, 256))
    layer, weights = make_layer(kind, out_features, in_features, group, "triton", dtype)
    counts = [3, 0, sized(200, 70), 1, 17]
    assert len(counts) == EXPERTS
    experts = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(counts))
    groups = ExpertGroups.of(experts[:, None].to(DEVICE), EXPERTS)
    x = draw(sum(counts), in_features, dtype=dtype)
    bias = draw(EXPERTS, out_features, dtype=dtype, seed=1)
    expected = float64.grouped_product(x, weights.to(DEVICE), bias, counts)
    assert share_of_rounding(layer(x, bias, groups), expected) <= 1


@in_both
def test_the_delta_net(dtype: torch.dtype) -> None:
    """Qwen3.5-9B's heads: decodes, prompts in chunks, snapshots of states, and what continues from these."""
    heads = sized(DeltaHeads(16, 2, 128, 128, 4, 1e-6), DeltaHeads(2, 2, 64, 64, 4, 1e-6))
    case = Case(heads, dtype)
    found, memory = case.run(triton(), PARTS)
    x = case.x.view(len(case.x), heads.num_heads, -1)
    kept, states = case.memory
    expected, after = float64.delta_net(x, (kept, states), PARTS, case.weights, heads.eps)
    assert share_of_rounding(found.view(expected.shape), expected) <= 1
    written = sorted({row for part in PARTS for row in part[3:] if row >= 0})
    difference = (memory[1][written].double() - after[written]).norm(dim=-1)
    # the matrices are float32, like all that they are computed from
    assert (difference <= float64.FLOAT32 * after[written].norm(dim=-1)).all()


#: Rows of Llama-3.2-1B's queries, keys and values, from its hidden size.
HIDDEN = sized(2048, 128)
QKV = sized({"q": 2048, "k": 512, "v": 512}, {"q": 128, "k": 64, "v": 64})
RANKS = (16, 64, 8)


@in_both
@pytest.mark.parametrize("num_rows", sized([1, 40, 1100], [1, 40]))
def test_products_of_adapters(num_rows: int, dtype: torch.dtype) -> None:
    """Rows of three adapters and of none, in any order. What a rank finds is rounded before it is spread."""
    shares = {name: Share(0, length, length) for name, length in QKV.items()}
    layer = ColumnParallelLinear(HIDDEN, shares, bias=False, dtype=dtype)
    tables = LowRankTables([layer], len(RANKS), kernels(), DEVICE)
    numbers = torch.randint(
        0, len(RANKS) + 1, (num_rows,), generator=torch.Generator().manual_seed(2)
    ).to(DEVICE)
    numbers[0] = 1
    x = draw(num_rows, HIDDEN, dtype=dtype)
    y = draw(num_rows, sum(QKV.values()), dtype=dtype, seed=1)
    expected = y.double()
    inside = torch.zeros_like(expected)
    held = []  # a table has the addresses of matrices alone
    for number, rank in enumerate(RANKS):
        is_own = numbers == number
        a = draw(len(QKV) * rank, HIDDEN, dtype=dtype, seed=10 + number) / HIDDEN**0.5
        blocks = []
        first_row = 0
        for i, length in enumerate(QKV.values()):
            rows = slice(first_row, first_row + length)
            ranks = slice(i * rank, (i + 1) * rank)
            b = draw(length, rank, dtype=dtype, seed=20 + 3 * number + i)
            scale = 0.5 + number
            blocks.append(Block(rows, ranks, b, scale))
            narrow = x[is_own].double() @ a[ranks].double().T
            expected[is_own, rows] += scale * narrow @ b.double().T
            inside[is_own, rows] = scale * (narrow.square() @ b.double().square().T).sqrt()
            first_row += length
        held.append(LowRank(a, tuple(blocks)))
        tables.put(number, {layer: held[-1]})
    found = y.clone()
    tables.sort(numbers).add_to(found, layer, x)
    assert share_of_rounding(found, expected, inside) <= 1
    assert torch.equal(found[numbers == tables.none], y[numbers == tables.none])


@in_both
@pytest.mark.parametrize("vocab_size", sized([151_936, 201_088, 256_000], [151_936]))
def test_greedy_choice(vocab_size: int, dtype: torch.dtype) -> None:
    """The first of the highest logits, which several tokens have: within a tile, and in the last."""
    logits = draw(6, vocab_size, dtype=dtype)
    for row, places in enumerate(([0], [vocab_size - 1], [5, 6], [4095, 4096], [9000, 70_000])):
        logits[row, places] = 9.0
    values = neutral_rows(len(logits))
    values["temperature"] = 0.0
    rows = rows_of(SamplingBatch(values, np.zeros(len(logits), np.uint64)))
    expected = [int((row == row.max()).nonzero()[0]) for row in logits.double()]
    assert by_triton(DEVICE)(logits, rows).tolist() == expected
