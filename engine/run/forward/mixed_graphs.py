"""MixedGraphs: steps with prompts in them, replayed from graphs between one layer's attention and the next.

What is said of attention here holds for delta nets too, which are computed between two recorded pieces likewise.

A decode step is one graph, see decode_graphs.py. Where prompts are computed beside decodes, the numbers of
sequences and tokens change from step to step, and only attention depends on them. So the parts between attention calls
are recorded, for a few numbers of tokens, and attention is launched between them. A step takes the next larger size.
Its padding has slot -1: it stores nothing, nothing attends to it, and its hidden states are never read.

Steps with adapters have pieces of their own, which read the tables of the adapters that are loaded at each replay. A
step's rows are sorted by adapter before its first piece; padding has no place in that order, so no adapter changes it.

Larger steps are not recorded. By estimate, a step of 5,000 tokens of a 0.6B model computes on an H200 for as long as
the host takes to start its kernels (13 ms). Steps between 2,048 and 5,000 tokens are rare, as prompts come in bulk.
Source: vLLM's piecewise graphs, https://docs.vllm.ai/en/latest/design/cuda_graphs.html.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from engine.attention.base import AttentionBreak, CapturableBackend, ForwardBatch
from engine.attention.features import AttentionFeatures
from engine.attention.kv_cache import LayerKVCache
from engine.attention.state_pool import Mix, StateBreak, StateParts
from engine.layers.lora_tables import LowRankTables, TabledRows

MOST_TOKENS = 2048
PADDING_SLOT = -1


@dataclass(frozen=True)
class AttentionCall:
    """A layer's attention between two recorded pieces.

    query, out: [tokens, heads, head_dim], what the piece before has written and what the piece behind reads.
    """

    query: Tensor
    out: Tensor
    cache: LayerKVCache
    features: AttentionFeatures
    sinks: Tensor | None
    slopes: Tensor | None


@dataclass(frozen=True)
class StateCall:
    """What advances a layer's states between two recorded pieces.

    x, out: [tokens, any], what the piece before has written and what the piece behind reads.
    """

    x: Tensor
    out: Tensor
    compute: Mix


Attend = Callable[[AttentionCall | StateCall], None]
ReplayPieces = Callable[[Attend], None]
CapturePieces = Callable[[Callable[[Attend], None]], ReplayPieces]


class CudaPieces:
    """Records what a callable launches between its attention calls, as one CUDA graph for each piece."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[Attend], None]) -> ReplayPieces:
        """Run once, to compile and set up, then record. run: is told what to do at each attention call.

        Raises RuntimeError if a piece waits for the device.
        """
        graphs: list[torch.cuda.CUDAGraph] = []
        calls: list[AttentionCall | StateCall] = []

        def begin_piece() -> None:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            graphs.append(graph)

        def end_piece(call: AttentionCall | StateCall) -> None:
            graphs[-1].capture_end()
            calls.append(call)
            begin_piece()

        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            run(lambda call: None)
            torch.cuda.synchronize(self._stream.device)
            gc.collect()
            torch.cuda.empty_cache()
            begin_piece()
            try:
                run(end_piece)
            finally:
                graphs[-1].capture_end()

        def replay(attend: Attend) -> None:
            for graph, call in zip_longest(graphs, calls):
                graph.replay()
                if call is not None:
                    attend(call)

        return replay


def step_sizes(max_num_batched_tokens: int) -> list[int]:
    """List the numbers of tokens to capture: by 64 to 512, by 128 to 1,024, by 256 to 2,048, and the largest step."""
    most = min(MOST_TOKENS, max_num_batched_tokens)
    ladder = [*range(64, 512, 64), *range(512, 1024, 128), *range(1024, MOST_TOKENS, 256)]
    return [size for size in ladder if size < most] + [most]


class MixedGraphs:
    """Owns the pieces and their buffers. Pieces hold the addresses of the weights and the KV pool."""

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        backend: CapturableBackend,
        capture: CapturePieces,
        sizes: list[int],
        device: torch.device,
        tables: LowRankTables | None = None,
    ) -> None:
        """Capture all sizes.

        forward: ForwardBatch -> hidden states [tokens, hidden_size].
        tables: of adapters; without them steps with adapters are not recorded.
        """
        self._forward = forward
        self._backend = backend
        self._sizes = sizes
        largest = sizes[-1]
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._token_ids)
        self._slot_mapping = torch.full_like(self._token_ids, PADDING_SLOT)
        self._no_rows = self._token_ids[:0]
        self._hidden: Tensor | None = None
        self._buffers: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._replays = self._capture(capture, None)
        # the pieces of steps with adapters, and the rows that they read
        self._adapted: list[ReplayPieces] = []
        self._adapters: TabledRows | None = None
        if tables is not None:
            self._adapters = tables.sort(torch.full_like(self._token_ids, tables.none))
            self._adapted = self._capture(capture, self._adapters)

    def fits(self, batch: ForwardBatch) -> bool:
        """Return whether `run` can take this step."""
        is_recorded = batch.pictures is None and self._takes_adapters(batch)
        return is_recorded and 0 < len(batch.token_ids) <= self._sizes[-1]

    def _takes_adapters(self, batch: ForwardBatch) -> bool:
        if batch.adapters is None:
            return True
        return self._adapters is not None and isinstance(batch.adapters, TabledRows)

    def run(self, batch: ForwardBatch) -> Tensor:
        """Return the hidden states of all rows, [tokens, hidden_size], which the next call overwrites."""
        num_tokens = len(batch.token_ids)
        index = bisect_left(self._sizes, num_tokens)  # of the smallest size that holds the step
        self._token_ids[:num_tokens].copy_(batch.token_ids)
        self._positions[:num_tokens].copy_(batch.positions)
        self._slot_mapping[:num_tokens].copy_(batch.slot_mapping)
        self._slot_mapping[num_tokens : self._sizes[index]].fill_(PADDING_SLOT)
        replay = self._replays[index]
        if isinstance(batch.adapters, TabledRows):
            assert self._adapters is not None, "the step fits"
            self._adapters.refill(batch.adapters)
            replay = self._adapted[index]

        def attend(call: AttentionCall | StateCall) -> None:
            if isinstance(call, StateCall):
                assert isinstance(batch.states, StateParts), "each step has parts"
                call.out[:num_tokens].copy_(call.compute(call.x[:num_tokens], batch.states))
                return
            attended = self._backend.forward(
                call.query[:num_tokens],
                call.cache,
                batch.attention,
                call.features,
                call.sinks,
                call.slopes,
            )
            call.out[:num_tokens].copy_(attended)

        replay(attend)
        assert self._hidden is not None
        return self._hidden[:num_tokens]

    def _capture(self, capture: CapturePieces, adapters: TabledRows | None) -> list[ReplayPieces]:
        """Capture all sizes, the largest first: its buffers and its memory hold the others."""
        largest_first = [
            capture(partial(self._run, size, adapters)) for size in reversed(self._sizes)
        ]
        return largest_first[::-1]

    def _run(self, size: int, adapters: TabledRows | None, attend: Attend) -> None:
        """Compute the first `size` rows of the buffers. attend: computes attention, or ends a recorded piece there."""
        batch = ForwardBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slot_mapping=self._slot_mapping[:size],
            sample_rows=self._no_rows,
            attention=_PieceEnd(self, attend),
            states=_StatePieceEnd(self, attend),
            adapters=adapters,
        )
        hidden = self._forward(batch)
        if self._hidden is None:
            self._hidden = torch.empty_like(hidden)
        self._hidden[:size].copy_(hidden)

    def buffers(self, x: Tensor, out_width: int) -> tuple[Tensor, Tensor]:
        """Return a buffer for an input and one for its output, [..., out_width]. Layers of equal shapes share them."""
        key = (*x.shape[1:], out_width)
        if key not in self._buffers:
            out = x.new_zeros(*x.shape[:-1], out_width)
            self._buffers[key] = torch.zeros_like(x), out
        inputs, outputs = self._buffers[key]
        return inputs[: len(x)], outputs[: len(x)]


class _PieceEnd(AttentionBreak):
    """Ends a piece at each attention call."""

    def __init__(self, graphs: MixedGraphs, attend: Attend) -> None:
        self._graphs = graphs
        self._attend = attend

    def attend(
        self,
        query: Tensor,
        cache: LayerKVCache,
        features: AttentionFeatures,
        sinks: Tensor | None,
        slopes: Tensor | None,
    ) -> Tensor:
        kept_query, out = self._graphs.buffers(query, query.shape[-1])
        kept_query.copy_(query)
        self._attend(AttentionCall(kept_query, out, cache, features, sinks, slopes))
        return out


class _StatePieceEnd(StateBreak):
    """Ends a piece where a layer's states are advanced."""

    def __init__(self, graphs: MixedGraphs, attend: Attend) -> None:
        self._graphs = graphs
        self._attend = attend

    def mix(self, x: Tensor, width: int, compute: Mix) -> Tensor:
        x_buffer, out = self._graphs.buffers(x, width)
        x_buffer.copy_(x)
        self._attend(StateCall(x_buffer, out, compute))
        return out
