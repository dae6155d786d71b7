"""The Triton backend reads a prefix once for several sequences, and each gets what float64 gives it."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine import Engine, EngineConfig, SamplingParams
from engine.attention import prefix_groups
from engine.attention.prefix_groups import PrefixLimits, PrefixTensors
from engine.attention.triton_backend import TritonBackend, TritonMetadata
from engine.kernels.attention import decode, prefix
from engine.kernels.attention.kv_tile import INTERPRETED
from engine.kernels.attention.prefix import PREFIX_TILE, TILE_QUERIES
from tests.engine.graphs import SimulatedCapture, simulate_graphs
from tests.engine.paged import BLOCK, DEVICE, TOLERANCE, PagedBatch, attend_by, sharing


def sharing_backend(batch: PagedBatch) -> TritonBackend:
    """A backend that reads every common prefix of these sequences once."""
    backend = TritonBackend(DEVICE)
    backend.share_prefixes([batch.features], batch.key_cache.dtype, BLOCK)
    assert backend.prefix_limits is not None
    backend.prefix_limits = replace(backend.prefix_limits, least_spared_bytes=1)
    return backend


def begins_of(backend: TritonBackend, batch: PagedBatch) -> list[int]:
    """The tokens of each sequence's prefix, in the order of the sequences."""
    metadata, _ = backend.build_metadata(batch.block_tables, batch.context_lens, batch.query_lens)
    assert isinstance(metadata, TritonMetadata)
    rows, prefixes = metadata.decode.rows, metadata.decode.prefixes
    if prefixes is None:
        return [0] * len(rows)
    return prefixes.begins[torch.argsort(rows)].tolist()


SHAPES = {
    "all rows": ([9] * 9, list(range(1, 10)), None, [128] * 9),
    "two groups": ([8, 8, 8, 8, 5, 5], [9, 1, 1, 1, 40, 3], [0, 0, 0, 0, 4, 4], [128] * 4 + [64] * 2),
    "rows outside": ([4, 0, 4, 0, 4], [20, 30, 1, 150, 16], None, [64, 0, 64, 0, 64]),
    "an odd number of blocks": ([11, 11, 7], [5, 1, 33], None, [128, 128, 0]),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_equal_float64(shape: str) -> None:
    """One group, two, and rows with no prefix; a prefix is read by whole tiles of keys."""
    shared, own, firsts, begins = SHAPES[shape]
    batch = sharing(shared, own, [1] * len(own), firsts=firsts, head_dim=32)
    backend = sharing_backend(batch)
    assert begins_of(backend, batch) == begins
    assert batch.error(attend_by(backend, batch)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16], ids=str
)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (128, 4), (256, 8), (40, 5)])
def test_heads_of_every_size(head_dim: int, group: int, dtype: torch.dtype) -> None:
    """With more sequences than fill a tile of the largest groups."""
    batch = sharing(
        [5] * 9, list(range(1, 10)), [1] * 9, head_dim=head_dim, group=group, dtype=dtype
    )
    assert batch.error(attend_by(sharing_backend(batch), batch)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "features",
    [{"has_sinks": True, "soft_cap": 1.5, "has_slopes": True}, {"window": 70}, {"chunk": 64}],
    ids=str,
)
def test_layers_of_every_kind(features: dict[str, Any]) -> None:
    """Windows and chunks hide tokens of a prefix from some rows: such layers read each row alone."""
    batch = sharing([5] * 4, [30, 1, 2, 20], [1] * 4, head_dim=32, **features)
    plain = replace(batch, window=None, chunk=None)
    backend = sharing_backend(plain)
    metadata, _ = backend.build_metadata(batch.block_tables, batch.context_lens, batch.query_lens)
    assert batch.error(attend_by(backend, batch, metadata)) < TOLERANCE[torch.float32]


def test_keys_and_values_of_8_bits() -> None:
    """Queries that float16 does not hold give the same bits as others."""
    batch = sharing([5] * 4, [30, 1, 2, 20], [1] * 4, head_dim=32, dtype=torch.bfloat16).as_fp8()
    assert batch.scales is not None
    keys, values = batch.scales
    out = attend_by(sharing_backend(batch), batch)
    assert batch.error(out) < TOLERANCE[torch.bfloat16]
    large = replace(batch, query=batch.query * 2.0**40, scales=(keys * 2.0**-40, values))
    assert torch.equal(attend_by(sharing_backend(large), large), out)


def test_a_query_that_is_far_larger_changes_nothing_for_its_neighbours_behind_the_prefix() -> None:
    batch = sharing([5] * 4, [30, 1, 2, 20], [1] * 4, head_dim=32, dtype=torch.bfloat16).as_fp8()
    backend = sharing_backend(batch)
    expected = attend_by(backend, batch)
    query = batch.query.clone()
    query[1] *= 2.0**60
    out = attend_by(backend, replace(batch, query=query))
    assert torch.equal(out[[0, 2, 3]], expected[[0, 2, 3]])


def test_prefixes_and_contexts_of_many_splits() -> None:
    """Longer than one split has tokens, where rows have splits of their own beside the prefix."""
    batch = sharing([70] * 3, [700, 1, 40], [1] * 3, head_dim=16, kv_heads=1)
    backend = sharing_backend(batch)
    assert begins_of(backend, batch) == [1088] * 3
    assert batch.error(attend_by(backend, batch)) < TOLERANCE[torch.float32]


def test_prompts_beside_decodes_change_nothing() -> None:
    batch = sharing([5, 5, 5, 5], [30, 20, 2, 40], [1, 20, 1, 40], head_dim=32)
    backend = sharing_backend(batch)
    metadata, _ = backend.build_metadata(batch.block_tables, batch.context_lens, batch.query_lens)
    assert isinstance(metadata, TritonMetadata)
    assert metadata.decode.prefixes is not None
    assert batch.error(attend_by(backend, batch, metadata)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("change", [-PREFIX_TILE, -1, 1])
def test_a_wrong_length_of_the_prefix_shows(change: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows' own tokens begin elsewhere than the prefix ends: what the tests above would miss."""
    batch = sharing([9] * 4, [70, 3, 2, 20], [1] * 4, head_dim=32)
    backend = sharing_backend(batch)
    attend = prefix.attend_to_prefixes

    def with_other_begins(query: Any, cache: Any, prefixes: Any, *rest: Any, **kind: Any) -> None:
        attend(query, cache, prefixes, *rest, **kind)
        prefixes.begins[prefixes.begins > 0] += change

    monkeypatch.setattr(decode, "attend_to_prefixes", with_other_begins)
    assert batch.error(attend_by(backend, batch)) > 1e-3


def test_a_recorded_step_follows_groups_that_shrink_and_grow() -> None:
    """Over tensors that are refilled: the same metadata with three members, two, none, and then all five rows."""
    batch = sharing([9] * 5, [70, 3, 2, 20, 1], [1] * 5, head_dim=32)
    backend = sharing_backend(batch)
    limits = backend.prefix_limits
    assert limits is not None
    rows, lens, tables = (
        batch.tensor(x) for x in (range(5), batch.context_lens, batch.block_tables)
    )
    memory = PrefixTensors(*map(batch.tensor, limits.arrange([], 5)))
    recorded = backend.decode_metadata(rows, lens, tables, 500, None, memory)
    for seqs in ([0, 2, 4], [2, 4], [], [0, 1, 2, 3, 4]):
        chosen = np.array(seqs, np.int64)
        found = limits.find(batch.block_tables[chosen], batch.context_lens[chosen]) if seqs else []
        found = [replace(each, seqs=chosen[each.seqs]) for each in found]
        for tensor, array in zip(memory, limits.arrange(found, 5), strict=True):
            tensor.copy_(torch.from_numpy(array))
        assert (memory.begins > 0).nonzero().flatten().tolist() == seqs
        assert batch.error(attend_by(backend, batch, recorded)) < TOLERANCE[torch.float32]


def limits(**changes: Any) -> PrefixLimits:
    values = {
        "token_bytes": 4096,
        "least_spared_bytes": 16 * 2**20,
        "block_size": BLOCK,
        "tile": 64,
    }
    return PrefixLimits(**{**values, "tile_seqs": 32, **changes})


def step_behind(blocks: int, num_seqs: int) -> tuple[Any, Any]:
    """Block tables and context lengths of sequences behind so many common blocks."""
    tables = np.arange(num_seqs * (blocks + 1), dtype=np.int32).reshape(num_seqs, -1)
    tables[:, :blocks] = tables[0, :blocks]
    return tables, np.full(num_seqs, blocks * BLOCK + 3)


@pytest.mark.parametrize(
    ("blocks", "num_seqs", "pays"), [(128, 3, True), (128, 2, False), (4, 65, True), (4, 64, False)]
)
def test_a_prefix_is_read_once_where_that_spares_enough(
    blocks: int, num_seqs: int, pays: bool
) -> None:
    """2,048 tokens of 4 KiB in a layer are 8 MiB: two sequences fewer read 16."""
    assert (len(limits().find(*step_behind(blocks, num_seqs))) == 1) is pays
    assert limits().can_pay(num_seqs, blocks * BLOCK + 3) is pays


@pytest.mark.parametrize("tile_seqs", [2, 4, 32])
def test_every_sequence_of_a_prefix_is_in_one_tile(tile_seqs: int) -> None:
    """Many small groups, too; where tiles run out, the prefix that spares least is left out."""
    small = limits(least_spared_bytes=1, tile_seqs=tile_seqs)
    for sizes in ([5, 1, 7], [2] * 9, [3] * 5, [33, 2]):
        tables = np.concatenate(
            [step_behind(4, size)[0] + 10_000 * i for i, size in enumerate(sizes)]
        )
        num_seqs = len(tables)
        found = small.find(tables, np.full(num_seqs, 4 * BLOCK + 1))
        begins, members, (num_tiles,) = small.arrange(found, num_seqs)
        in_tiles = members[:num_tiles]
        assert (in_tiles[:, 0] >= 0).all()
        assert sorted(in_tiles[in_tiles >= 0].tolist()) == np.flatnonzero(begins).tolist()
        for tile in in_tiles:
            assert len(np.unique(tables[tile[tile >= 0], 0])) == 1
        if tile_seqs > 2:
            assert np.count_nonzero(begins) == sum(size for size in sizes if size > 1)


def test_models_without_such_layers_share_nothing() -> None:
    """Windows in every layer, or so many heads in a group that one sequence fills a tile."""
    batch = sharing([5] * 2, [30, 1], [1] * 2, head_dim=32)
    backend = TritonBackend(DEVICE)
    for features in (
        replace(batch.features, window=64),
        replace(batch.features, num_heads=TILE_QUERIES, num_kv_heads=1),
    ):
        backend.share_prefixes([features], torch.float32, BLOCK)
        assert backend.prefix_limits is None


PREFIX = [7 * i % 90 + 5 for i in range(5 * BLOCK)]
LIMITS: dict[str, Any] = {
    "dtype": "float32", "kv_cache_bytes": 1 << 20, "max_model_len": 112, "max_num_seqs": 4,
    "max_num_batched_tokens": 112,
}  # fmt: skip


def answer(folder: Path, backend: str, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers; the first prompt is answered before the others, so that they find its blocks."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with Engine(EngineConfig(str(folder), attention_backend=backend, **LIMITS)) as engine:
        engine.generate(prompts[:1], params)
        return [completion.token_ids for completion in engine.generate(prompts, params)]


@pytest.mark.long
@pytest.mark.parametrize("has_graphs", [True, False])
def test_answers_are_those_of_the_cpu(
    has_graphs: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with other prompts among those behind the prefix; they end at the same time, so groups shrink and grow."""
    prompts = [PREFIX + [100 + i, 3] * (i + 1) for i in range(4)] + [[9, 8, 7]]
    expected = answer(folder, "cpu", prompts)
    monkeypatch.setattr(prefix_groups, "LEAST_SPARED_BYTES", 1)
    capture = simulate_graphs(monkeypatch) if has_graphs else SimulatedCapture()
    launches = count_launches(monkeypatch)
    assert answer(folder, "triton", prompts) == expected
    assert launches["prefix_kernel"] > 0
    sizes_with_prefixes = 2  # 2 and 4 rows; one row shares with nobody
    first_sharing = capture.num_captured - sizes_with_prefixes
    later = capture.replayed[
        capture.num_captured :
    ]  # each graph has been replayed once at the start
    assert any(number >= first_sharing for number in later) is has_graphs


def count_launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count each kernel's launches from now on."""
    launches: Counter[str] = Counter()
    launch = InterpretedFunction.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launches[kernel.fn.__name__] += 1
        return launch(kernel, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return launches


@pytest.mark.skipif(not INTERPRETED, reason="launches are counted in the interpreter")
@pytest.mark.parametrize("least_spared_bytes", [1, 1 << 40])
def test_a_layer_launches_one_kernel_more(
    least_spared_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a prefix pays; elsewhere it launches what it launched before."""
    batch = sharing([5] * 4, [30, 1, 2, 20], [1] * 4, head_dim=16)
    backend = sharing_backend(batch)
    assert backend.prefix_limits is not None
    backend.prefix_limits = replace(backend.prefix_limits, least_spared_bytes=least_spared_bytes)
    launches = count_launches(monkeypatch)
    attend_by(backend, batch)
    pays = least_spared_bytes == 1
    assert launches == {"decode_kernel": 1} | ({"prefix_kernel": 1} if pays else {})
