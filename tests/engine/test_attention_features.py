"""Windows, chunks, soft caps, sinks and slopes equal float64 in every backend that runs here."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.attention.torch_backend
from engine.attention.base import KernelBackend
from engine.attention.cpu_backend import CpuBackend
from engine.attention.torch_backend import ROWS_AT_ONCE, TorchBackend
from tests.engine.paged import DEVICE, TOLERANCE, attend_by, make_batch

#: Each of them counts: scores are near 1.
ALL = {"window": 21, "chunk": 64, "soft_cap": 1.5, "has_sinks": True, "has_slopes": True}
# decodes at the edges of blocks, windows and chunks; a whole prompt; chunks behind cached contexts
CONTEXTS = [1, 16, 17, 64, 65, 300, 90, 130, 97]
QUERIES = [1, 1, 1, 1, 1, 1, 90, 50, 2]
BACKENDS = ["torch", "cpu", pytest.param("triton", marks=pytest.mark.long)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    return load(request.param)


def load(name: str) -> KernelBackend:
    if name == "torch":
        return TorchBackend(DEVICE)
    if name == "triton":
        pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")
        from engine.attention.triton_backend import TritonBackend

        return TritonBackend(DEVICE)
    pytest.importorskip(
        "numba", reason="numba is not installed, so the CPU kernels cannot be compiled"
    )
    if DEVICE.type != "cpu":
        pytest.skip("the batches are on the GPU here")
    from engine.attention.cpu_backend import CpuBackend

    return CpuBackend(torch.device("cpu"))


@pytest.mark.parametrize(
    "features",
    [
        *({"window": window} for window in (1, 16, 17, 40, 300)),
        *({"chunk": chunk} for chunk in (7, 64, 300)),
        {"soft_cap": 0.5},
        {"soft_cap": 50.0},
        pytest.param({"has_sinks": True}, marks=pytest.mark.long),
        pytest.param({"has_slopes": True}, marks=pytest.mark.long),
        ALL,
    ],
    ids=str,
)
def test_each_feature_equals_float64(backend: KernelBackend, features: dict[str, Any]) -> None:
    """Decodes, prompts and chunks in one step; NaN in every block that none of a sequence's queries sees."""
    batch = make_batch(CONTEXTS, QUERIES, head_dim=32, **features)
    assert batch.error(attend_by(backend, batch)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("head_dim", "group", "kv_heads"),
    [
        (40, 5, 1),
        *(
            pytest.param(*sizes, marks=pytest.mark.long)
            for sizes in [(16, 1, 3), (128, 3, 2), (256, 1, 1)]
        ),
    ],
)
def test_all_features_at_once_with_heads_of_any_size(
    backend: KernelBackend, head_dim: int, group: int, kv_heads: int
) -> None:
    batch = make_batch(CONTEXTS, QUERIES, head_dim=head_dim, group=group, kv_heads=kv_heads, **ALL)
    assert batch.error(attend_by(backend, batch)) < TOLERANCE[torch.float32]


decodes = st.integers(1, 300).map(lambda context: (1, context))
prompts = st.integers(2, 150).map(lambda query: (query, query))
chunks = st.tuples(st.integers(2, 100), st.integers(1, 200)).map(lambda pair: (pair[0], sum(pair)))
padding = st.just((1, 0))
sequences = st.lists(st.one_of(decodes, padding, prompts, chunks), min_size=1, max_size=12)
limits = st.one_of(st.none(), st.sampled_from([1, 3, 4, 5, 16, 17, 50]), st.integers(1, 320))
drawn_features = st.fixed_dictionaries(
    {
        **dict.fromkeys(("window", "chunk"), limits),
        **dict.fromkeys(("has_sinks", "has_slopes"), st.booleans()),
        "soft_cap": st.sampled_from([None, 1.5, 30.0]),
    }
)


# Each step compiles kernels of its own for the CPU; the fixed features above share theirs.
@pytest.mark.parametrize("name", ["torch", pytest.param("cpu", marks=pytest.mark.long), "triton"])
@settings(max_examples=12, deadline=None)
@given(sequences, drawn_features, st.sampled_from([4, 16, 32]), st.booleans(), st.integers(0, 99))
def test_random_steps_equal_float64(
    name: str,
    lens: list[tuple[int, int]],
    features: dict[str, Any],
    block_size: int,
    half: bool,
    seed: int,
) -> None:
    """In any order; for the compiled kernels also padding, and half of the time bfloat16 on two threads."""
    dtype = torch.float32
    if name != "cpu":
        lens = [each for each in lens if each[1]] or [(1, 1)]
    elif half:
        dtype = torch.bfloat16
        torch.set_num_threads(2)
    contexts, queries = [context for _, context in lens], [query for query, _ in lens]
    batch = make_batch(
        contexts, queries, head_dim=32, block_size=block_size, dtype=dtype, seed=seed, **features
    )
    # prompts' weights are rounded to bfloat16, those of fewer tokens are not
    tolerance = TOLERANCE[dtype if max(queries) >= CpuBackend.least_prefill else torch.float32]
    try:
        assert batch.error_beyond_rounding(attend_by(load(name), batch)) < tolerance
    finally:
        torch.set_num_threads(1)


def test_one_step_serves_layers_of_every_kind(backend: KernelBackend) -> None:
    plain = make_batch(CONTEXTS, QUERIES, head_dim=32)  # holds what every layer sees
    metadata, _ = backend.build_metadata(plain.block_tables, plain.context_lens, plain.query_lens)
    layers = [
        {},
        {"window": 5},
        {"chunk": 20},
        {"window": 5, "soft_cap": 1.5},
        {"window": 5, "sinks": torch.tensor([0.0, 3.0, -1.0, 2.0], device=DEVICE)},
    ]
    for layer in layers * 2:
        batch = replace(plain, **layer)
        assert batch.error(attend_by(backend, batch, metadata)) < TOLERANCE[torch.float32]


@pytest.fixture
def _few_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.attention.torch_backend, "SCORES_AT_ONCE", 5000)


@pytest.mark.usefixtures("_few_scores")
@pytest.mark.parametrize("features", [{"window": 20}, {"soft_cap": 1.5}, ALL], ids=str)
def test_long_prefills_are_cut(backend: KernelBackend, features: dict[str, Any]) -> None:
    """By rows that share a mask, and by scores that are written out at once."""
    lens = [2 * ROWS_AT_ONCE + 7, ROWS_AT_ONCE + 1]
    batch = make_batch([lens[0], lens[1] + 33], lens, head_dim=16, group=1, **features)
    assert batch.error(attend_by(backend, batch)) < TOLERANCE[torch.float32]


def test_a_decode_gets_the_same_bits_in_every_batch(backend: KernelBackend) -> None:
    batch = make_batch([70, 33, 5, 260, 12, 1, 90, 17], head_dim=32, **ALL)
    together = attend_by(backend, batch)
    for i in range(8):
        rows = slice(i, i + 1)
        alone = replace(
            batch,
            query=batch.query[rows],
            block_tables=batch.block_tables[rows],
            context_lens=batch.context_lens[rows],
            query_lens=batch.query_lens[rows],
        )
        assert torch.equal(attend_by(backend, alone)[0], together[i])
