"""Adapters on GPUs: two launches a layer for the rows of all adapters, within CUDA graphs."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine import Engine, EngineConfig, SamplingParams, ScoringParams
from engine.attention import prefix_groups
from engine.attention.adapter_rows import AdapterGroup, GroupedRows
from engine.attention.base import ForwardBatch
from engine.attention.triton_backend import TritonBackend
from engine.checkpoint.adapter_folder import AdapterFolder
from engine.checkpoint.model_config import read_model_config
from engine.kernels.adapter_tables import MOST_RANKS
from engine.kernels.attention import decode as decode_kernels
from engine.kernels.products import low_rank
from engine.layers import lora_tables
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.lora import Block, LowRank
from engine.layers.lora_tables import Linear, LowRankTables
from engine.layers.parallel import Share, TensorParallel
from engine.models.decoder import DecoderForCausalLM, DecoderParts
from engine.models.load import choose_path
from engine.run.forward.loaded_adapters import LoadedAdapters, adapter_rows
from engine.run.forward.mixed_graphs import MixedGraphs
from engine.run.forward.model_runner import ModelRunner
from engine.run.forward.warm_up import make_step
from engine.schedule.sequence import NO_ADAPTER
from engine.schedule.step_batch import StepBatch
from tests.engine.adapters import make_adapter
from tests.engine.checkpoints import Shape, make_checkpoint, pool_bytes
from tests.engine.graphs import simulate_graphs, simulate_mixed_graphs
from tests.engine.paged import DEVICE

HIDDEN = 80
SHARDS = {"q": 48, "k": 16, "v": 16}
SHAPE = Shape("for_adapter_kernels", num_heads=4, num_kv_heads=2, seed=7)
#: With three blocks of 16 tokens, the first prompt's answer takes a block from the second's.
PROMPTS = [[*range(40, 55)], [*range(7, 21)], [*range(90, 104)], [*range(60, 74)], [200, 4, 9, 5]]
NAMES = ("all", None, "mlp", "attention", None)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def layers_of(dtype: torch.dtype) -> list[Linear]:
    """A layer of three stacked matrices, and one whose input is split over ranks."""
    rows = {name: Share(0, length, length) for name, length in SHARDS.items()}
    return [
        ColumnParallelLinear(HIDDEN, rows, bias=False, dtype=dtype),
        RowParallelLinear(96, HIDDEN, TensorParallel(), bias=False, dtype=dtype),
    ]


def low_rank_of(
    layer: Linear, ranks: list[int], dtype: torch.dtype, generator: torch.Generator
) -> LowRank:
    """A random adapter's product for a layer; of several ranks, one for each stacked matrix."""
    lengths = list(SHARDS.values()) if isinstance(layer, ColumnParallelLinear) else [HIDDEN]
    blocks = []
    first_rank = first_row = 0
    for length, rank in zip(lengths, ranks, strict=False):
        b = torch.randn(length, rank, generator=generator).to(DEVICE, dtype)
        rows = slice(first_row, first_row + length)
        blocks.append(Block(rows, slice(first_rank, first_rank + rank), b, 0.5 + rank / 7))
        first_rank += rank
        first_row += length
    a = torch.randn(first_rank, layer.in_features, generator=generator).to(DEVICE, dtype)
    return LowRank(a, tuple(blocks))


def make_tables(layers: list[Linear], num_adapters: int) -> LowRankTables:
    kernels = TritonBackend(DEVICE).layer_kernels
    assert kernels is not None
    return LowRankTables(layers, num_adapters, kernels, DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 37, pytest.param(1200, marks=pytest.mark.long)])
def test_rows_of_many_adapters_have_what_each_adapter_adds(
    num_rows: int, dtype: torch.dtype
) -> None:
    """With ranks that fill no tile, layers that an adapter leaves alone, and rows without an adapter."""
    generator = torch.Generator().manual_seed(num_rows)
    layers = layers_of(dtype)
    tables = make_tables(layers, 4)
    loaded: dict[int, dict[nn.Module, LowRank]] = {
        0: {layer: low_rank_of(layer, [3, 5, 8], dtype, generator) for layer in layers},
        1: {layers[1]: low_rank_of(layers[1], [40], dtype, generator)},
        3: {layers[0]: low_rank_of(layers[0], [16, 2], dtype, generator)},
    }
    for number, products in loaded.items():
        tables.put(number, products)
    numbers = np.random.default_rng(1).choice([0, 1, 3, 4], num_rows)
    rows = tables.sort(torch.from_numpy(numbers).to(DEVICE))
    groups = [
        AdapterGroup(products, torch.from_numpy(np.flatnonzero(numbers == number)).to(DEVICE))
        for number, products in loaded.items()
    ]
    for layer in layers:
        x = torch.randn(num_rows, layer.in_features, generator=generator).to(DEVICE, dtype)
        y = torch.randn(num_rows, layer.out_features, generator=generator).to(DEVICE, dtype)
        found, expected = y.clone(), y.clone()
        rows.add_to(found, layer, x)
        GroupedRows(tuple(groups)).add_to(expected, layer, x)
        assert num_rows < 3 or not torch.equal(expected, y)
        difference = (found.double() - expected.double()).norm(dim=1)
        allowed = 1e-6 if dtype == torch.float32 else 2**-6
        assert (difference <= allowed * expected.double().norm(dim=1)).all()


def test_an_adapter_of_more_ranks_than_a_table_holds_multiplies_by_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    layers = layers_of(torch.float32)
    tables = make_tables(layers, 2)
    tables.put(0, {layers[1]: low_rank_of(layers[1], [4], torch.float32, generator)})
    wide = low_rank_of(layers[1], [MOST_RANKS + 1], torch.float32, generator)
    tables.put(1, {layers[1]: wide})
    assert tables.hold(np.array([0, -1]))
    assert not tables.hold(np.array([0, 1]))
    tables.drop(0)
    assert not tables.hold(np.array([0]))


def test_an_adapter_of_too_many_ranks_is_logged_by_name(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are not."""
    monkeypatch.setattr(lora_tables, "MOST_RANKS", 8)  # `all` has three times 4 in a layer
    kernels = TritonBackend(DEVICE).layer_kernels
    model_config = read_model_config(folders[0])
    path = choose_path(model_config, "native")
    assert path.decoder is not None
    parts = DecoderParts(path.decoder, TensorParallel(), TritonBackend(DEVICE), torch.float32)
    adapters = LoadedAdapters(DecoderForCausalLM(parts, []), 2, kernels, DEVICE, torch.float32)
    folder = AdapterFolder(str(folders[1]))
    for number, name in enumerate(("mlp", "all")):
        adapters.load(number, folder.find(name))
    assert [record.args[0] for record in caplog.records if record.args] == ["all"]


def test_nothing_stays_of_an_adapter_that_is_entered_only_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its matrices are freed, so the next adapter of that number must not find their addresses."""
    generator = torch.Generator().manual_seed(0)
    layers = layers_of(torch.float32)
    tables = make_tables(layers, 2)
    products = {layer: low_rank_of(layer, [4], torch.float32, generator) for layer in layers}
    enter = lora_tables._enter
    monkeypatch.setattr(lora_tables, "_enter", raise_behind(enter, num_calls=1))
    with pytest.raises(RuntimeError):
        tables.put(0, products)
    monkeypatch.setattr(lora_tables, "_enter", enter)
    tables.drop(0)
    tables.put(0, {layers[1]: products[layers[1]]})
    x = torch.randn(3, layers[0].in_features, device=DEVICE)
    y = torch.zeros(3, layers[0].out_features, device=DEVICE)
    tables.sort(torch.zeros(3, dtype=torch.int64, device=DEVICE)).add_to(y, layers[0], x)
    assert not y.any()


def raise_behind(function: Callable[..., None], num_calls: int) -> Callable[..., None]:
    """The function, whose calls raise after the first num_calls."""
    calls = count()

    def call(*arguments: Any) -> None:
        if next(calls) >= num_calls:
            raise RuntimeError("the device is gone")
        function(*arguments)

    return call


@pytest.fixture
def few_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of 16 ranks at most: fewer programs for the interpreter."""
    for module in (low_rank, lora_tables):
        monkeypatch.setattr(module, "MOST_RANKS", 16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and a folder of three adapters for it."""
    root = tmp_path_factory.mktemp("adapter_kernels")
    model = make_checkpoint(root / "model", SHAPE)
    make_adapter(root / "folder" / "all", model, seed=1)
    make_adapter(root / "folder" / "attention", model, seed=2, rank=3, targets=("q_proj", "o_proj"))
    make_adapter(root / "folder" / "mlp", model, seed=3, rank=8, targets=("up_proj", "down_proj"))
    return model, root / "folder"


def config(folders: tuple[Path, Path], **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 24, "max_num_seqs": 3, "max_num_batched_tokens": 10,
        "kv_cache_bytes": pool_bytes(SHAPE, 100), "adapters": str(folders[1]), "max_adapters": 2,
    }  # fmt: skip
    return EngineConfig(str(folders[0]), **{**values, **changes})


def answers(engine: Engine) -> list[list[int]]:
    """Prompts with three adapters and without one, where two adapters are loaded at a time."""
    params = [replace(GREEDY, adapter=name) for name in NAMES]
    return [each.token_ids for each in engine.generate(PROMPTS, params)]


def scores(engine: Engine) -> list[float]:
    """The log probability of the same two tokens behind each prompt, with its adapter."""
    params = [ScoringParams([[11, 12]], adapter=name) for name in NAMES]
    found = []
    for completion in engine.generate(PROMPTS, params):
        assert completion.loglikelihoods is not None
        found += [each.logprob for each in completion.loglikelihoods]
    return found


@pytest.mark.long
@pytest.mark.usefixtures("few_ranks")
def test_every_step_with_adapters_is_replayed_while_adapters_come_and_go(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come in chunks beside decodes, and rows are preempted.

    No step runs without graphs, and a layer takes two launches for the rows of all adapters.
    """
    few_blocks = pool_bytes(SHAPE, 3)
    with Engine(config(folders)) as plain:
        expected = answers(plain)
        expected_scores = scores(plain)
        assert len({tuple(each) for each in expected}) == len(expected)

    graphs = simulate_graphs(monkeypatch)
    mixed = simulate_mixed_graphs(monkeypatch)
    eager: list[int] = []
    states_of = DecoderForCausalLM.states_of

    def count_step(model: DecoderForCausalLM, rows: Any, batch: Any, cache: Any) -> Any:
        eager.append(len(batch.token_ids))
        return states_of(model, rows, batch, cache)

    launched: Counter[str] = Counter()
    for name in ("narrow_kernel", "widen_kernel"):
        monkeypatch.setattr(low_rank, name, CountedKernel(getattr(low_rank, name), launched, name))
    with Engine(config(folders, attention_backend="triton", kv_cache_bytes=few_blocks)) as engine:
        num_layers = len(engine._open_runner().model.model.layers)
        monkeypatch.setattr(DecoderForCausalLM, "states_of", count_step)
        launched.clear()
        graphs.replayed.clear()
        mixed.replayed.clear()
        assert answers(engine) == expected
        assert scores(engine) == pytest.approx(expected_scores, abs=1e-4)
        stats = engine.stats()
    assert eager == []
    assert graphs.replayed
    assert mixed.replayed
    assert stats.num_preemptions > 0
    assert launched["narrow_kernel"] == launched["widen_kernel"]
    assert launched["narrow_kernel"] == 4 * num_layers * stats.adapter_steps


@pytest.mark.long
@pytest.mark.usefixtures("few_ranks")
def test_rows_with_adapters_read_a_common_prefix_once(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In replayed steps, while a row of another adapter stands beside them. Later rows have no such prefix."""
    shared = [7 * i % 90 + 5 for i in range(80)]
    together = [*([*shared, 50 + i, 3] for i in range(3)), [9, 8, 7]]
    apart = [[*range(20 + i, 100 + i)] for i in range(4)]
    names = ["all", "all", "all", "mlp"]
    params = [replace(GREEDY, max_tokens=4, adapter=name) for name in names]
    sizes = {"max_model_len": 112, "max_num_seqs": 4, "max_num_batched_tokens": 112}

    def answer(engine: Engine) -> list[list[int]]:
        engine.generate(together[:1], params[:1])  # so that the others find its blocks
        done = engine.generate(together, params) + engine.generate(apart, params)
        return [completion.token_ids for completion in done]

    with Engine(config(folders, **sizes)) as plain:
        expected = answer(plain)
    monkeypatch.setattr(prefix_groups, "LEAST_SPARED_BYTES", 1)
    simulate_graphs(monkeypatch)
    attend_to_prefixes = decode_kernels.attend_to_prefixes
    num_sharing: list[int] = []

    def count_sharing(query: Any, cache: Any, prefixes: Any, *rest: Any, **options: Any) -> None:
        num_sharing.append(int((prefixes.begins > 0).sum()))
        attend_to_prefixes(query, cache, prefixes, *rest, **options)

    with Engine(config(folders, attention_backend="triton", **sizes)) as engine:
        monkeypatch.setattr(decode_kernels, "attend_to_prefixes", count_sharing)
        assert answer(engine) == expected
    assert 3 in num_sharing
    assert num_sharing[-1] == 0


@pytest.mark.long
@pytest.mark.usefixtures("few_ranks")
def test_rows_of_a_replayed_step_have_only_the_adapters_of_that_step(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever adapters the longer step before had, and where padding stands now. Others are not replayed."""
    simulate_graphs(monkeypatch)
    mixed = simulate_mixed_graphs(monkeypatch)
    with Engine(config(folders, attention_backend="triton")) as engine:
        runner: Any = engine._open_runner()
        adapters = AdapterFolder(str(folders[1]))
        for number, name in enumerate(("all", "mlp")):
            runner.load_adapter(number, adapters.find(name))
        mixed.replayed.clear()
        check_replayed(runner, [5, 2, 3], [1, NO_ADAPTER, 0])
        check_replayed(runner, [2, 1], [NO_ADAPTER, 1])
        check_replayed(runner, [3], [])
        runner.load_adapter(1, adapters.find("attention"))
        check_replayed(runner, [2, 5], [0, 1])
        check_replayed(runner, [4], [NO_ADAPTER])
        assert mixed.replayed == [1, 1, 0, 1, 1]
        runner._adapters.tables.drop(0)  # as of an adapter of too many ranks
        assert not runner._mixed_graphs.fits(runner._to_device(step_of([3], [0]))[0])


@pytest.mark.long
@pytest.mark.usefixtures("few_ranks")
def test_graphs_that_give_other_states_with_adapters_are_not_used(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start also compares the pieces of steps with adapters."""
    simulate_graphs(monkeypatch)
    simulate_mixed_graphs(monkeypatch)
    replay = MixedGraphs.run

    def run(graphs: MixedGraphs, batch: ForwardBatch) -> torch.Tensor:
        hidden = replay(graphs, batch)
        return hidden if batch.adapters is None else hidden.flip(1)

    monkeypatch.setattr(MixedGraphs, "run", run)
    with Engine(config(folders, attention_backend="triton")) as engine:
        assert engine._open_runner()._mixed_graphs is None  # type: ignore[union-attr]


def step_of(query_lens: list[int], adapters: list[int]) -> StepBatch:
    """A step of whole prompts, each with its adapter; [] for a step without adapters."""
    step = make_step(query_lens, query_lens, 16, len(query_lens))
    first_slots = np.arange(len(query_lens)) * 16
    return replace(
        step,
        token_ids=np.arange(len(step.token_ids)) * 7 + 5,
        slot_mapping=np.repeat(first_slots, query_lens) + step.positions,
        adapters=np.array(adapters, np.int64),
    )


@torch.inference_mode()
def check_replayed(runner: ModelRunner, query_lens: list[int], adapters: list[int]) -> None:
    """Check that graphs take such a step, and give the hidden states that each adapter by itself makes."""
    step = step_of(query_lens, adapters)
    batch, _ = runner._to_device(step)
    assert runner._mixed_graphs is not None
    assert runner._mixed_graphs.fits(batch)
    found = runner._mixed_graphs.run(batch).clone()
    if adapters:
        batch = replace(batch, adapters=adapter_rows(step, runner._adapters._products, DEVICE))
    expected = runner.model.hidden_states(batch, runner.cache)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


class CountedKernel:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any, launched: Counter[str], name: str) -> None:
        self._kernel, self._launched, self._name = kernel, launched, name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._launched[self._name] += 1
        return self._kernel[grid]
