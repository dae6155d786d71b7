"""Graphs without a GPU: what is captured is called again on each replay, over the same static buffers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.layers.gated_delta_net
import engine.run.forward.model_runner
from engine.attention.base import AttentionBreak, AttentionMetadata, CapturableBackend
from engine.attention.decode_state import DecodeState, RowMemory, RowWrites
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import LayerKVCache
from engine.attention.prefix_groups import PrefixTensors
from engine.attention.state_pool import StatePart, StateParts
from engine.attention.torch_backend import TorchBackend
from engine.layers.gated_delta_net import mix
from engine.models.decoder import DecoderForCausalLM
from engine.run.forward.checks.plain_kernels import plain_advance, plain_write_rows
from engine.run.forward.decode_graphs import Replay
from engine.run.forward.mixed_graphs import Attend, AttentionCall, ReplayPieces, StateCall


@dataclass
class SimulatedCapture:
    """Counts captures and replays."""

    num_captured: int = 0
    replayed: list[int] = field(default_factory=list)

    def __call__(self, run: Callable[[], None]) -> Replay:
        number = self.num_captured
        self.num_captured += 1
        run()

        def replay() -> None:
            self.replayed.append(number)
            run()

        return replay


@dataclass(frozen=True)
class StaticDecodes(AttentionMetadata):
    """Tensors that hold another step's values at each replay."""

    context_lens: Tensor
    block_tables: Tensor
    order: Tensor


class ReplayedTorch(TorchBackend, CapturableBackend):
    """The torch backend over static buffers, which it reads on the host; padding stores nothing and gets NaN."""

    def write_rows(self, memory: RowMemory, writes: RowWrites, sampled: Tensor | None) -> None:
        plain_write_rows(memory, writes, sampled)

    def advance(self, state: DecodeState) -> None:
        plain_advance(state)

    def decode_metadata(
        self,
        rows: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        max_context_len: int,
        order: Tensor | None,
        prefixes: PrefixTensors | None = None,
    ) -> StaticDecodes:
        assert rows.tolist() == list(range(len(context_lens)))
        assert order is not None
        assert prefixes is None
        return StaticDecodes(context_lens, block_tables, order)

    def store(
        self, keys: Tensor, values: Tensor, cache: LayerKVCache, slot_mapping: Tensor
    ) -> None:
        kept = slot_mapping >= 0
        super().store(keys[kept], values[kept], cache, slot_mapping[kept])

    def forward(
        self,
        query: Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        features: AttentionFeatures,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        if isinstance(metadata, AttentionBreak):
            return metadata.attend(query, cache, features, sinks, slopes)
        if not isinstance(metadata, StaticDecodes):
            return super().forward(query, cache, metadata, features, sinks, slopes)
        in_order = metadata.context_lens[metadata.order.long()].tolist()
        assert sorted(metadata.order.tolist()) == list(range(len(in_order)))
        assert in_order == sorted(in_order, reverse=True), "the longest start first"
        rows = metadata.context_lens > 0
        out = torch.full_like(query, torch.nan)
        if rows.any():
            context_lens = metadata.context_lens[rows].long().numpy()
            tables = metadata.block_tables[rows].numpy()
            spans, _ = self.build_metadata(tables, context_lens, context_lens**0)
            out[rows] = super().forward(query[rows], cache, spans, features, sinks, slopes)
        return out


@dataclass
class SimulatedPieces:
    """Counts captures and replays of steps that are recorded between attention calls."""

    num_captured: int = 0
    num_calls: int = 0
    replayed: list[int] = field(default_factory=list)

    def __call__(self, run: Callable[[Attend], None]) -> ReplayPieces:
        number = self.num_captured
        self.num_captured += 1

        def count(call: AttentionCall | StateCall) -> None:
            self.num_calls += 1

        run(count)

        def replay(attend: Attend) -> None:
            self.replayed.append(number)
            run(attend)

        return replay


def simulate_mixed_graphs(monkeypatch: pytest.MonkeyPatch) -> SimulatedPieces:
    """Beside `simulate_graphs`: steps with prompts are recorded too."""
    capture = SimulatedPieces()
    monkeypatch.setattr(
        engine.run.forward.model_runner, "choose_piece_capture", lambda *args: capture
    )
    return capture


def simulate_graphs(monkeypatch: pytest.MonkeyPatch) -> SimulatedCapture:
    """From now on engines on a CPU capture: those of the torch backend, or of one that can be captured."""
    if torch.cuda.is_available():
        pytest.skip("a GPU records graphs itself: test_gpu.py")
    capture = SimulatedCapture()
    load = engine.run.forward.model_runner.load_backend

    def load_capturable(
        name: str, device: torch.device, *rest: Any, **options: Any
    ) -> CapturableBackend:
        backend = load(name, device, *rest, **options)
        return backend if isinstance(backend, CapturableBackend) else ReplayedTorch(device)

    monkeypatch.setattr(engine.run.forward.model_runner, "load_backend", load_capturable)
    monkeypatch.setattr(
        engine.run.forward.model_runner, "choose_capture", lambda *args, **options: capture
    )
    monkeypatch.setattr(engine.run.forward.model_runner, "choose_piece_capture", lambda *args: None)
    return capture


def mix_by_table(x: Tensor, memory: Sequence[Tensor], parts: StateParts, *weights: Any) -> Tensor:
    """Compute delta nets in plain torch by what the table says, as kernels do. Padding gets NaN.

    weights: what else `mix` of engine.layers.gated_delta_net takes.
    """
    listed = [StatePart(*row) for row in parts.table.tolist()]
    used = [part for part in listed if part.target >= 0]
    mixed = mix(x, memory, replace(parts, decodes=parts.decodes[:0], others=used), *weights)
    is_padding = torch.ones(len(x), dtype=torch.bool)
    for part in used:
        is_padding[part.start : part.end] = False
    return mixed.masked_fill(is_padding[:, None], torch.nan)


def simulate_state_graphs(monkeypatch: pytest.MonkeyPatch) -> SimulatedCapture:
    """Capture steps of models with states too."""
    monkeypatch.setattr(engine.layers.gated_delta_net, "mix", mix_by_table)
    monkeypatch.setattr(DecoderForCausalLM, "can_record_states", True)
    return simulate_graphs(monkeypatch)
