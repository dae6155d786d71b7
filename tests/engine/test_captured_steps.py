"""What may not happen while the engine serves or records: compiling a kernel, reading a tensor's values."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

import pytest
from torch import Tensor

from engine import EngineConfig
from engine.attention import prefix_groups
from engine.attention.base import ForwardBatch
from engine.attention.kv_cache import KVCache
from engine.attention.state_pool import StatePool
from engine.attention.triton_backend import TritonBackend
from engine.checkpoint.model_config import read_model_config
from engine.kernels.attention.kv_tile import INTERPRETED
from engine.layers.lora_tables import LowRankTables
from engine.layers.parallel import TensorParallel
from engine.layers.rotary import RotaryEmbedding
from engine.layers.weighted_module import WeightedModule
from engine.models.base import CausalModel
from engine.models.decoder import DecoderForCausalLM, DecoderParts
from engine.models.decoder_config import read_decoder_config
from engine.models.registry import decoder_flags
from engine.run.forward.adapter_loader import adapted_layers
from engine.run.forward.decode_graphs import Capture, DecodeGraphs, batch_sizes
from engine.run.forward.mixed_graphs import Attend, MixedGraphs, ReplayPieces
from engine.run.forward.model_runner import ModelRunner, choose
from engine.run.forward.rows import StaticRows
from engine.run.forward.warm_up import make_step, nucleus_sampling
from engine.schedule.sequence import NO_ADAPTER
from engine.schedule.step_batch import StepBatch
from tests.engine.families import BY_NAME, make_family
from tests.engine.graphs import SimulatedCapture, simulate_graphs
from tests.engine.launches import record_launches

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not INTERPRETED, reason="about CPUs: here the kernels run on a GPU"),
]


def mixed_step(rng: random.Random, num_blocks: int) -> StepBatch:
    """Up to nine sequences, decodes or chunks, at any place of contexts of up to 5,000 tokens."""
    query_lens = [rng.choice((1, 1, rng.randrange(1, 80))) for _ in range(rng.randrange(1, 10))]
    context_lens = [query_len + int(2 ** rng.uniform(0, 12)) for query_len in query_lens]
    return make_step(query_lens, context_lens, 16, num_blocks)


def decode_step(rng: random.Random, num_blocks: int, number: int) -> StepBatch:
    """One that a graph serves, of one to nine sequences that no step before had."""
    num_seqs = 1 + number % 9
    context_lens = [1 + int(2 ** rng.uniform(0, 12)) for _ in range(num_seqs)]
    seqs = np.arange(num_seqs)
    return replace(
        make_step([1] * num_seqs, context_lens, 16, num_blocks),
        slots=seqs,
        generations=9 * number + seqs,
    )


@pytest.fixture(scope="module")
def checkpoints(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Dense ones, of the families with experts, and of one with delta nets."""
    families = ("qwen3_moe", "gpt_oss", "qwen3_5")
    return folders | {
        name: make_family(tmp_path_factory.mktemp(name), BY_NAME[name]) for name in families
    }


@pytest.mark.parametrize("name", ["gqa4_tied", "qwen3_moe"])
def test_start_compiles_every_kernel_that_steps_use(
    name: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random steps, through graphs and without, launch no variant that the warm-up has not."""
    monkeypatch.setattr(prefix_groups, "LEAST_SPARED_BYTES", 1)
    simulate_graphs(monkeypatch)
    seen = record_launches(monkeypatch)
    limits = EngineConfig(
        str(checkpoints[name]), attention_backend="triton", max_num_seqs=9, max_num_batched_tokens=800,
        kv_cache_bytes=1 << 21,
    )  # fmt: skip
    monkeypatch.setattr(ModelRunner, "_longest", 6000)
    monkeypatch.setattr(
        ModelRunner, "_probe", lambda self: None
    )  # launches are recorded, nothing is computed
    folder = checkpoints[name]
    runner = ModelRunner(limits, read_model_config(folder), folder, TensorParallel())
    runner._graphs = None  # those are of its own, shorter sequences
    seen.clear()
    runner.warm_up(num_blocks=5)
    at_start = set(seen)
    runner._graphs = runner._capture_graphs(6000)
    assert {name for name, _ in seen - at_start} == {
        "write_rows_kernel", "advance_kernel", "decode_kernel",
    }, "of graphs alone"  # fmt: skip
    at_start = set(seen)
    experts = {"grouped_product_kernel", "choose_kernel", "group_kernel"}
    assert {name for name, _ in at_start} == (experts if name == "qwen3_moe" else set()) | {
        "decode_kernel", "prefix_kernel", "prefill_kernel", "shared_prefill_kernel", "rms_norm_kernel",
        "norm_rotate_store_kernel", "gate_and_mul_kernel", "write_rows_kernel", "advance_kernel",
        "tile_maxima_kernel", "choose_token_kernel", "edit_kernel", "score_kernel",
    }  # fmt: skip
    rng = random.Random(0)
    for i in range(60):
        runner.forward(runner._to_device(mixed_step(rng, 5))[0])
        decodes = decode_step(rng, 5, i)
        if i % 2:
            decodes = replace(decodes, sample_tops=np.zeros_like(decodes.query_lens))
        runner.launch(decodes, nucleus_sampling(len(decodes.query_lens)))
    assert seen == at_start


def test_start_compiles_every_kernel_that_adapters_use(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before any adapter is loaded, for steps of few rows and of many, through graphs and without."""
    simulate_graphs(monkeypatch)
    seen = record_launches(monkeypatch)
    folder = checkpoints["gqa4_tied"]
    limits = EngineConfig(
        str(folder), attention_backend="triton", max_num_seqs=9, max_num_batched_tokens=2000,
        kv_cache_bytes=1 << 21, adapters=str(tmp_path), max_adapters=2,
    )  # fmt: skip
    monkeypatch.setattr(ModelRunner, "_longest", 6000)
    monkeypatch.setattr(ModelRunner, "_probe", lambda self: None)
    runner = ModelRunner(limits, read_model_config(folder), folder, TensorParallel())
    runner._graphs = None
    seen.clear()
    runner.warm_up(num_blocks=5)
    runner._graphs = runner._capture_graphs(6000)
    at_start = set(seen)
    assert {"narrow_kernel", "widen_kernel"} <= {name for name, _ in at_start}
    assert runner._adapters.tables is not None
    runner._adapters.tables.put(1, {})
    rng = random.Random(0)
    for i in range(9):
        for step in (mixed_step(rng, 5), make_step([1500 + i], [1500 + i], 16, 5)):
            of_seq = np.array([rng.choice((NO_ADAPTER, 1)) for _ in step.query_lens])
            runner.forward(runner._to_device(replace(step, adapters=of_seq))[0])
        decodes = decode_step(rng, 5, i)
        of_seq = np.full(len(decodes.query_lens), 1)
        runner.launch(replace(decodes, adapters=of_seq), nucleus_sampling(len(of_seq)))
    assert seen == at_start


class NoHostReads(TorchDispatchMode):
    """Fails on an operation that takes a CPU tensor; reading a meta tensor's values fails by itself."""

    num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            assert not isinstance(value, torch.Tensor) or value.is_meta, func
        self.num_operations += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gqa2_tied_hub", "gqa2_bias", "qwen3_moe", "gpt_oss", "qwen3_5"])
def test_a_recorded_step_reads_nothing_on_the_host(
    name: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole model on the meta device, whose tensors have no values: a recording GPU reads none."""
    record_launches(monkeypatch)
    monkeypatch.setattr(prefix_groups, "LEAST_SPARED_BYTES", 1)
    backend = TritonBackend(torch.device("cpu"))
    model = model_without_values(checkpoints[name], backend)
    backend.share_prefixes(model.attention_layers, torch.bfloat16, 16)
    assert backend.prefix_limits is not None
    record_without_values(model, backend)


@pytest.mark.parametrize(("name", "num_sharing"), [("gqa2_tied_hub", 3), ("gpt_oss", 1)])
def test_a_recorded_step_launches_one_kernel_more_for_each_layer_that_shares_a_prefix(
    name: str, num_sharing: int, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside one copy of the step's hidden states. Layers with a window launch what they do without prefixes."""
    backend = TritonBackend(torch.device("cpu"))
    model = model_without_values(checkpoints[name], backend)
    monkeypatch.setattr(prefix_groups, "LEAST_SPARED_BYTES", 1)
    backend.share_prefixes(model.attention_layers, torch.bfloat16, 16)
    launches: list[str] = []
    record_launches(monkeypatch, launches)
    of_graphs: list[Counter[str]] = []

    def record(run: Any) -> Any:
        launches.clear()
        run()
        of_graphs.append(Counter(launches))
        return lambda: None

    with torch.inference_mode():
        cache = KVCache(
            model.attention_layers, num_blocks=3, block_size=16, dtype=torch.bfloat16,
            device=torch.device("meta"),
        )  # fmt: skip
        capture_steps(model, cache, backend, record)
    plain, sharing = of_graphs[0], of_graphs[2 * len(batch_sizes(9))]
    assert plain["decode_kernel"] == len(model.attention_layers)
    assert sharing - plain == {"prefix_kernel": num_sharing}
    assert not plain - sharing


@pytest.mark.parametrize("name", ["gqa2_bias", "qwen3_moe", "qwen3_5"])
def test_pieces_with_adapters_launch_two_kernels_more_for_each_linear_layer(
    name: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read nothing on the host. Pieces without adapters launch what they do where none is served."""
    meta = torch.device("meta")
    backend = TritonBackend(torch.device("cpu"))
    model = model_without_values(checkpoints[name], backend)
    layers = adapted_layers(model)
    assert backend.layer_kernels is not None
    tables = LowRankTables(layers.values(), 2, backend.layer_kernels, meta)
    cache = KVCache(
        model.attention_layers, num_blocks=3, block_size=16, dtype=torch.bfloat16, device=meta
    )
    cache.states = StatePool(model.states, 1, meta)
    launches: list[str] = []
    record_launches(monkeypatch, launches)
    of_sizes: list[Counter[str]] = []

    def record(run: Callable[[Attend], None]) -> ReplayPieces:
        launches.clear()
        with NoHostReads():
            run(lambda call: None)
        of_sizes.append(Counter(launches))
        return lambda attend: None

    def forward(batch: ForwardBatch) -> Tensor:
        return model.hidden_states(batch, cache)

    sizes = [64, 1280]
    with torch.inference_mode():
        MixedGraphs(forward, backend, record, sizes, meta)
        MixedGraphs(forward, backend, record, sizes, meta, tables)
    unserved, plain, adapted = of_sizes[:2], of_sizes[2:4], of_sizes[4:]
    assert plain == unserved
    # layers that keep states have no adapters
    num_adapted = sum(not name.endswith(".out_proj") for name in layers)
    added = Counter({"narrow_kernel": num_adapted, "widen_kernel": num_adapted})
    assert [more - less for more, less in zip(adapted, plain, strict=True)] == [added, added]
    assert [less - more for more, less in zip(adapted, plain, strict=True)] == [Counter()] * 2


def model_without_values(folder: Path, backend: TritonBackend) -> DecoderForCausalLM:
    """The model on the meta device, in bfloat16."""
    model_config, meta = read_model_config(folder), torch.device("meta")
    config = read_decoder_config(model_config, decoder_flags(model_config.architecture))
    with meta:
        rotaries = [
            RotaryEmbedding(rope, 200, dtype=torch.bfloat16, device=meta) for rope in config.ropes
        ]
        model = DecoderForCausalLM(
            DecoderParts(config, TensorParallel(), backend, torch.bfloat16), rotaries
        )
        for module in model.modules():
            if isinstance(module, WeightedModule):
                module.finish_loading()
    return model


@torch.inference_mode()
def record_without_values(model: CausalModel, backend: TritonBackend) -> None:
    """Capture the decode steps of a model on the meta device."""
    meta = torch.device("meta")
    cache = KVCache(
        model.attention_layers, num_blocks=3, block_size=16, dtype=torch.bfloat16, device=meta
    )
    cache.states = StatePool(model.states, 1, meta)
    mode, capture = NoHostReads(), SimulatedCapture()

    def record(run: Any) -> Any:
        with mode:
            return capture(run)

    capture_steps(model, cache, backend, record)
    with_prefixes = 0
    if backend.prefix_limits is not None:
        with_prefixes = sum(backend.prefix_limits.can_pay(size, 200) for size in batch_sizes(9))
    assert capture.num_captured == 2 * len(batch_sizes(9)) + with_prefixes
    assert mode.num_operations > 10 * capture.num_captured


def capture_steps(
    model: CausalModel, cache: KVCache, backend: TritonBackend, capture: Capture
) -> DecodeGraphs:
    """The graphs of such a model, up to nine rows."""
    return DecodeGraphs(
        lambda batch: model.hidden_states(batch, cache),
        lambda hidden, rows, edits, tokens, keep: choose(
            model.logits(hidden), rows, edits, tokens, tokens, backend, TensorParallel()
        ),
        backend,
        capture,
        StaticRows(
            9,
            13,
            16,
            torch.device("meta"),
            backend.write_rows,
            backend.prefix_limits,
            has_states=bool(model.states),
        ),
        200,
    )
