"""What may not happen while the engine serves or records: compiling a kernel, reading a tensor's values."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine import EngineConfig
from engine.attention.forward_batch import ForwardBatch
from engine.attention.kv_cache import KVCache
from engine.attention.triton_backend import TritonBackend
from engine.checkpoint.model_config import read_model_config
from engine.kernels.attention.kv_tile import INTERPRETED
from engine.layers import packed
from engine.layers.base import WeightedModule
from engine.layers.parallel import TensorParallel
from engine.layers.rotary import RotaryEmbedding
from engine.models.base import CausalModel, ModelPlace
from engine.models.decoder import DecoderForCausalLM, DecoderParts
from engine.models.decoder_config import read_decoder_config
from engine.models.load import load_model
from engine.models.registry import decoder_flags
from engine.run.forward.decode_graphs import Capture, DecodeGraphs, batch_sizes
from engine.run.forward.model_runner import ModelRunner, choose
from engine.run.forward.pending_tokens import DeviceTokens, Sampled
from engine.run.forward.to_device import to_device
from engine.run.forward.warm_up import make_step, nucleus_sampling
from engine.sampling.logit_edits import EditParts
from engine.schedule.batch.step_batch import StepBatch
from tests.engine.architectures import make_architecture
from tests.engine.families import BY_NAME, make_family
from tests.engine.graphs import SimulatedCapture, simulate_graphs
from tests.engine.launches import LaunchCount, record_launches

META = torch.device("meta")

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
        make_step([1] * num_seqs, context_lens, 16, num_blocks), slots=seqs, generations=9 * number + seqs
    )


@pytest.fixture(scope="module")
def checkpoints(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Dense ones, and of the families with experts."""
    experts = ("qwen3_moe", "gpt_oss")
    return folders | {name: make_family(tmp_path_factory.mktemp(name), BY_NAME[name]) for name in experts}


@pytest.mark.parametrize("name", ["gqa4_tied", "qwen3_moe"])
def test_start_compiles_every_kernel_that_steps_use(
    name: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random steps, through graphs and without, launch no variant that the warm-up has not."""
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
    experts, dense = (
        {"grouped_product_kernel", "choose_kernel", "group_kernel"},
        {"fused_product_kernel", "project_heads_kernel"},
    )
    assert {name for name, _ in at_start} == (experts if name == "qwen3_moe" else dense) | {
        "decode_kernel", "prefill_kernel", "rms_norm_kernel", "norm_rotate_store_kernel",
        "gate_and_mul_kernel", "write_rows_kernel", "advance_kernel", "tile_maxima_kernel",
        "choose_token_kernel", "edit_kernel",
    }  # fmt: skip
    rng = random.Random(0)
    for i in range(60):
        runner.logits(mixed_step(rng, 5))
        runner.launch(decode_step(rng, 5, i), nucleus_sampling(1 + i % 9))
    assert seen == at_start


class NoHostReads(TorchDispatchMode):
    """Fails on an operation that takes a CPU tensor; reading a meta tensor's values fails by itself."""

    num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            assert not isinstance(value, torch.Tensor) or value.is_meta, func
        self.num_operations += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gqa2_tied_hub", "gqa2_bias", "qwen3_moe", "gpt_oss"])
def test_a_recorded_step_reads_nothing_on_the_host(
    name: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole model on the meta device, whose tensors have no values: a recording GPU reads none."""
    record_launches(monkeypatch)
    backend = TritonBackend(torch.device("cpu"))
    model = model_without_values(checkpoints[name], backend)
    record_without_values(model, backend)


def model_without_values(folder: Path, backend: TritonBackend, times: int = 1) -> DecoderForCausalLM:
    """The model on the meta device, in bfloat16, with its layers that many times over."""
    model_config, meta = read_model_config(folder), torch.device("meta")
    config = read_decoder_config(model_config, decoder_flags(model_config.architecture))
    with meta:
        rotaries = [RotaryEmbedding(rope, 200, dtype=torch.bfloat16, device=meta) for rope in config.ropes]
        config = replace(config, layers=times * config.layers)
        model = DecoderForCausalLM(DecoderParts(config, TensorParallel(), backend, torch.bfloat16), rotaries)
        for module in model.modules():
            if isinstance(module, WeightedModule):
                module.finish_loading()
    return model


@pytest.mark.parametrize("name", ["gqa2_tied_hub", "gqa2_bias", "llama3"])
@pytest.mark.parametrize(("num_rows", "expected"), [(1, 6), (24, 6), (64, 6), (65, 5), (256, 5)])
@torch.inference_mode()
def test_a_decode_step_has_at_most_six_launches_a_layer_and_few_beside(
    num_rows: int,
    expected: int,
    name: str,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of Qwen3 and Llama, from token ids to logits: embedding, rotation, the norms before the first layer and
    after the last one, LM head; the sampler's launches come to those."""
    folder = make_family(tmp_path, BY_NAME[name]) if name in BY_NAME else checkpoints[name]
    backend, meta = TritonBackend(torch.device("cpu")), torch.device("meta")
    counts = []
    for times in (1, 2):
        model = model_without_values(folder, backend, times)
        cache = KVCache(
            model.attention_layers, num_blocks=3, block_size=16, dtype=torch.bfloat16, device=meta
        )
        ids, rows = (
            torch.zeros(num_rows, dtype=torch.int64, device=meta),
            torch.zeros(num_rows, dtype=torch.int32, device=meta),
        )
        metadata = backend.decode_metadata(
            rows, rows, torch.zeros((num_rows, 8), dtype=torch.int32, device=meta), 128
        )
        for _ in range(2):  # the first step makes the counters that decode attention keeps
            with LaunchCount(monkeypatch) as launched:
                model.logits(model.hidden_states(ForwardBatch(ids, ids, ids, ids[:0], metadata), cache))
        counts.append(len(launched.names))
    num_layers = len(model.model.layers) // 2
    assert counts[1] - counts[0] == expected * num_layers, launched.names
    # the first layer's norm stands alone, and in its place the projection and the rest are two launches
    assert 2 * counts[0] - counts[1] <= 5 + (6 - expected), launched.names


@pytest.mark.parametrize("name", ["gemma2", "qwen2_moe"])
def test_a_recorded_step_of_transformers_reads_nothing_on_the_host(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense model of its, and one with experts."""
    folder = make_architecture(tmp_path / "model", name)
    backend = TritonBackend(torch.device("cpu"))
    record_launches(monkeypatch)
    monkeypatch.setattr(packed, "_can_pack", lambda dtype: False)  # no packed weight moves to another device
    model = load_model(
        read_model_config(folder), folder,
        ModelPlace(TensorParallel(), backend, torch.device("cpu"), torch.bfloat16, max_positions=200),
        model_path="transformers",
    )  # fmt: skip
    record_without_values(model.to("meta"), backend)


@torch.inference_mode()
def record_without_values(model: CausalModel, backend: TritonBackend) -> None:
    """Capture the decode steps of a model on the meta device."""
    meta = torch.device("meta")
    cache = KVCache(model.attention_layers, num_blocks=3, block_size=16, dtype=torch.bfloat16, device=meta)
    mode, capture = NoHostReads(), SimulatedCapture()

    def record(run: Any) -> Any:
        with mode:
            return capture(run)

    capture_steps(model, cache, backend, record)
    assert capture.num_captured == 2 * len(batch_sizes(9))
    assert mode.num_operations > 10 * capture.num_captured


def capture_steps(
    model: CausalModel, cache: KVCache, backend: TritonBackend, capture: Capture
) -> DecodeGraphs:
    """The graphs of such a model, up to nine rows."""
    return DecodeGraphs(
        lambda batch: model.hidden_states(batch, cache),
        lambda hidden, rows, edits, tokens: choose(
            model.logits(hidden), rows, edits, tokens, tokens, backend, TensorParallel()
        ),
        backend,
        capture,
        max_num_seqs=9,
        max_model_len=200,
        block_size=16,
        device=torch.device("meta"),
    )


Take = Callable[[], object]


@torch.inference_mode()
def count_launches(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps_of: Callable[[DecoderForCausalLM, KVCache, TritonBackend], dict[str, Take]],
) -> tuple[dict[str, float], dict[str, int]]:
    """What each step starts a layer, and beside the layers, with transfers, of a model and one twice as deep.

    steps_of: the steps of such a model, taken in their order.
    """
    counts: list[dict[str, int]] = []
    for times in (1, 2):
        backend = TritonBackend(torch.device("meta"))
        model = model_without_values(folder, backend, times)
        cache = KVCache(
            model.attention_layers, num_blocks=3, block_size=16, dtype=torch.bfloat16, device=META
        )
        launched, found = LaunchCount(monkeypatch), {}
        for name, take in steps_of(model, cache, backend).items():
            launched.names.clear()
            with launched:
                take()
            found[name] = len(launched.names)
        counts.append(found)
    once, twice = counts
    num_layers = len(model.model.layers) // 2
    return (
        {name: (twice[name] - once[name]) / num_layers for name in once},
        {name: 2 * once[name] - twice[name] for name in once},
    )


def test_a_replayed_step_has_few_launches_beside_its_layers(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight in the graphs and the copy of the tokens to the host; before, where sequences joined, left or
    moved or blocks are new, one transfer and one kernel; where logits are edited, one more of each."""
    sampled = Sampled(torch.zeros(2, dtype=torch.int64, device=META), np.arange(2))
    lens = np.array([16, 20])
    join = replace(make_step([1, 1], [16, 20], 16, 3), slots=np.arange(2), generations=np.arange(2))
    join = replace(join, pending_rows=np.array([1]), pending_samples=np.array([0]))
    blocks = replace(join, positions=lens, context_lens=lens + 1, block_tables=np.ones((2, 2), np.int32))
    steady = replace(blocks, positions=lens + 1, context_lens=lens + 2)
    leave = replace(
        make_step([1], [23], 16, 3), slots=np.array([1]), generations=np.array([1]), positions=np.array([22])
    )

    def steps_of(model: DecoderForCausalLM, cache: KVCache, backend: TritonBackend) -> dict[str, Take]:
        graphs = capture_steps(model, cache, backend, SimulatedCapture())

        def take(step: StepBatch, *, bans: bool = False) -> Take:
            batch = nucleus_sampling(len(step.slots))
            if bans:
                parts = EditParts(banned=[(0, np.array([7]))], pending=[(0, 0)])
                parts.penalize(0, (1.0, 1.0, 2.0), np.array([[-1, 0]], np.int32))
                batch = replace(batch, edits=parts.joined(np.array([0])))
            return lambda: DeviceTokens(graphs.run(step, batch, sampled))

        return {
            "first": take(join), "new block": take(blocks), "steady": take(steady),
            "leave and move": take(leave), "join with edits": take(join, bans=True),
            "and goes on": take(blocks), "with edits": take(steady, bans=True),
        }  # fmt: skip

    of_layer, beside = count_launches(checkpoints["gqa2_tied_hub"], monkeypatch, steps_of)
    assert set(of_layer.values()) == {6}
    assert beside == {
        "first": 11, "new block": 11, "steady": 9, "leave and move": 11, "join with edits": 13,
        "and goes on": 11, "with edits": 11,
    }  # fmt: skip


def test_launches_of_a_mixed_step(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not recorded: a transfer, embedding, rotation, two norms, the rows that sample cut out twice, LM
    head, two of the sampler and the copy to the host; where the step before still runs, one that fetches its
    tokens. Attention is two launches in a layer, and in a step of
    many tokens norms and gates are launches of their own; its last layer has fewer, as it has few rows."""
    sampled = Sampled(torch.zeros(2, dtype=torch.int64, device=META), np.arange(2))
    short, long = (make_step([length, 1], [length, 20], 16, 3) for length in (5, 300))
    follows = replace(short, pending_rows=np.array([5]), pending_samples=np.array([0]))

    def steps_of(model: DecoderForCausalLM, cache: KVCache, backend: TritonBackend) -> dict[str, Take]:
        def take(step: StepBatch) -> Take:
            def run() -> None:
                batch, rows = to_device(step, backend, META, sampled, nucleus_sampling(2))
                assert rows is not None
                logits = model(batch, cache)
                chosen = torch.empty(2, dtype=torch.int64, device=META)
                choose(logits, rows, None, None, chosen, backend, TensorParallel())
                DeviceTokens(Sampled(chosen, np.arange(2)))

            return run

        return {"room": take(long), "long": take(long), "short": take(short), "overlapping": take(follows)}

    of_layer, beside = count_launches(checkpoints["gqa2_tied_hub"], monkeypatch, steps_of)
    assert (of_layer["short"], of_layer["long"]) == (7, 10)
    assert (beside["short"], beside["overlapping"], beside["long"]) == (11, 12, 8)
