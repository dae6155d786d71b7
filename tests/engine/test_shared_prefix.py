"""Sequences whose first tokens lie in the same blocks attend to them together, as float64 does to each."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="numba is not installed, so the CPU kernels cannot be compiled")

from engine.attention.cpu_backend import CpuBackend, CpuMetadata
from engine.cpu_kernels.prefill_attention import TILE
from engine.kernels.attention.shared_prefix import find_shared_prefixes
from tests.engine.paged import BLOCK, TOLERANCE, PagedBatch, sharing
from tests.examples import examples


def attend(batch: PagedBatch) -> tuple[torch.Tensor, CpuMetadata]:
    backend = CpuBackend(torch.device("cpu"))
    metadata, _ = backend.build_metadata(batch.block_tables, batch.context_lens, batch.query_lens)
    return backend.forward(
        batch.query, batch.cache, metadata, batch.features, batch.sinks, batch.slopes
    ), metadata


members = st.tuples(
    st.sampled_from([0, 3, 4, 9, 14, 14, 14]),
    st.integers(1, 90),
    st.sampled_from([1, 1, 1, 2, 15, 40]),
)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=str
)
@settings(max_examples=examples(10), deadline=None)
@given(
    st.lists(members, min_size=8, max_size=20),
    st.sampled_from(
        [
            {},
            {"has_sinks": True, "soft_cap": 1.5, "has_slopes": True},
            {"window": 150},
            {"chunk": 64},
        ]
    ),
    st.integers(0, 99),
)
def test_random_prefixes_equal_float64(
    dtype: torch.dtype, seqs: list[tuple[int, int, int]], features: dict[str, Any], seed: int
) -> None:
    """Decodes, short and long chunks, behind as much of the prefix as each has, in layers of any kind."""
    seqs = [(14, 20, 1), *((shared, max(own, query), query) for shared, own, query in seqs)]
    batch = sharing(
        *map(list, zip(*seqs, strict=True)),
        head_dim=32,
        group=8,
        dtype=dtype,
        seed=seed,
        **features,
    )
    assert batch.error_beyond_rounding(attend(batch)[0]) < TOLERANCE[batch.query.dtype]


@pytest.mark.parametrize(
    ("features", "shares"), [({}, True), ({"has_sinks": True}, True), ({"window": 99}, False)]
)
def test_the_prefix_is_read_once(features: dict[str, Any], shares: bool) -> None:
    """Where no layer hides its first tokens from a query."""
    count = 16
    batch = sharing(
        [12] * count, list(range(1, count + 1)), [1] * count, head_dim=32, group=8, **features
    )
    output, metadata = attend(batch)
    (parts,) = metadata.parts.values()
    assert batch.error_beyond_rounding(output) < TOLERANCE[batch.query.dtype]
    assert (parts.shared is not None) is shares
    if parts.shared is not None:
        assert int(parts.shared.count.sum()) == count * 8
        assert set(parts.decode.begins.tolist()) == {12 * BLOCK}


tables = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=30
)


@given(tables, st.integers(0, 12))
def test_prefixes_hold_what_their_members_share(
    rows: list[tuple[int, int, int]], least_queries: int
) -> None:
    """rows: which prefix, how many of its blocks, and queries."""
    block_tables = np.array(
        [
            [1000 * kind + i if i < blocks else 10_000 + 100 * seq + i for i in range(12)]
            for seq, (kind, blocks, _) in enumerate(rows)
        ],
        np.int32,
    )
    lens_before = np.array(
        [max(0, blocks * BLOCK + 30 - 40 * (seq % 3)) for seq, (_, blocks, _) in enumerate(rows)]
    )
    query_lens = np.array([queries for *_, queries in rows])
    found = find_shared_prefixes(
        block_tables, lens_before, query_lens, BLOCK, tile=TILE, least_queries=least_queries
    )
    seen = [seq for prefix in found for seq in prefix.seqs]
    assert len(set(seen)) == len(seen)
    for prefix in found:
        assert len(prefix.seqs) > 1
        assert prefix.num_tokens in range(TILE, 12 * BLOCK + 1, TILE)
        assert query_lens[prefix.seqs].min() > 0
        assert query_lens[prefix.seqs].sum() >= least_queries
        assert (lens_before[prefix.seqs] >= prefix.num_tokens).all()
        shared = block_tables[prefix.seqs, : prefix.num_tokens // BLOCK]
        assert (shared == shared[0]).all()
