"""DecodeGraphs: steps in which every sequence has one new token, recorded once and replayed.

On a GPU a decode step is hundreds of short kernels, and starting them from Python takes longer than they
run. A CUDA graph starts all of them with one call, but replays the very addresses and sizes it recorded: so
there is one graph for each of a ladder of batch sizes, a step takes the next larger one, and all of them read
the same static buffers. A padding row has slot -1 and context length 0: it stores nothing and attends to
nothing, and its hidden state is never read.

The LM head stays outside. It runs on the rows that sample and no others, its logits (max_num_seqs *
vocabulary float32, 150 MiB for Qwen3 at 256) are not held once more for the graphs, and its few launches
are queued while the graph still runs. Source: https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import CapturableBackend
from engine.attention.forward_batch import ForwardBatch
from engine.kernels.upload import pack, starts, unpack
from engine.run.to_device import fill_pending
from engine.schedule.step_batch import StepBatch

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
Forward = Callable[[ForwardBatch], Tensor]


class CudaCapture:
    """Records what a callable launches; all graphs share one memory pool, so only the largest one takes any.

    They may share it because they never run at the same time and nothing in it outlives a replay. Make a new
    one for another set of graphs: the pool is gone with the last graph in it.
    """

    def __init__(self, device: torch.device, *, may_wait: bool = False) -> None:
        """may_wait: what is captured may wait for the device, which is found out before it is recorded."""
        self._may_wait = may_wait
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Run once, so that kernels are compiled and loaded and libraries set up, then record.

        Raises RuntimeError for what waits for the device.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            run()
            if self._may_wait:
                mode = torch.cuda.get_sync_debug_mode()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    run()
                finally:
                    torch.cuda.set_sync_debug_mode(mode)
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog thread asks for the state of events meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        replay: Replay = graph.replay
        return replay


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Ladder of sizes to capture: 1, 2, 4, then by 8 to 128, by 16 to 256, by 32, and max_num_seqs itself.

    Padding costs nothing where a step is bound by reading the weights; above 64 rows it is at most an eighth.
    """
    ladder = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, max_num_seqs, 32)]
    return [size for size in ladder if size < max_num_seqs] + [max_num_seqs]


class StaticInputs:
    """The buffers that graphs read, max_num_seqs rows of each, filled by one transfer for each step.

    token_ids, positions, slot_mapping: [rows] int64.  context_lens, rows (0, 1, 2, ...): [rows] int32.
    block_tables: [rows, blocks of the longest sequence] int32; what lies past a row's context is stale, and
    nothing reads it.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        kinds = (np.int64, np.int64, np.int64, np.int32)
        self._padded = [np.zeros(max_num_seqs, kind) for kind in kinds]  # on the host, filled by each step
        largest = [*self._padded, np.zeros((max_num_seqs, max_blocks), np.int32)]
        self._arrived = torch.zeros(
            starts(array.nbytes for array in largest)[-1], dtype=torch.uint8, device=device
        )
        self.token_ids, self.positions, self.slot_mapping, self.context_lens = unpack(
            self._arrived, self._padded
        )
        self.slot_mapping.fill_(-1)  # all padding, so that a capture writes nowhere
        self.rows = torch.arange(max_num_seqs, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device)

    def fill(self, step: StepBatch) -> None:
        """Copy the step's rows, and padding into all rows after them."""
        num_seqs, width = step.block_tables.shape
        rows = (step.token_ids, step.positions, step.slot_mapping, step.context_lens)
        for place, values, padding in zip(self._padded, rows, (0, 0, -1, 0), strict=True):
            place[:num_seqs] = values
            place[num_seqs:] = padding
        arrays = [*self._padded, step.block_tables]
        # Pinned, so that the copy does not wait; torch reuses pinned memory only when its copies are done.
        packed = pack(arrays, pin_memory=self._on_gpu)
        arrived = self._arrived[: len(packed)]
        arrived.copy_(packed, non_blocking=True)
        self.block_tables[:num_seqs, :width].copy_(unpack(arrived, arrays)[-1])


class DecodeGraphs:
    """Owner of the graphs and of their buffers. They read the weights and the KV pool where those are now."""

    def __init__(
        self,
        forward: Forward,
        backend: CapturableBackend,
        capture: Capture,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """forward: ForwardBatch -> hidden states [tokens, hidden_size]; this captures all of its calls."""
        self._forward, self._backend = forward, backend
        self._inputs = StaticInputs(max_num_seqs, -(-max_model_len // block_size), device)
        # one output for all graphs: a captured result of its own would keep its part of the pool for ever
        self._hidden = torch.zeros((max_num_seqs, hidden_size), dtype=dtype, device=device)
        self._sizes = batch_sizes(max_num_seqs)
        # the largest first: the others fit into the memory it took
        largest_first = [capture(self._bind(size, max_model_len)) for size in reversed(self._sizes)]
        self._replays = largest_first[::-1]

    @property
    def num_graphs(self) -> int:
        """One for each size."""
        return len(self._replays)

    def fits(self, step: StepBatch) -> bool:
        """Whether `run` can take this step: one token of each sequence."""
        return len(step.token_ids) == len(step.query_lens) <= self._sizes[-1]

    def run(self, step: StepBatch, sampled: Tensor | None = None) -> Tensor:
        """Hidden states [sequences, hidden_size] of the step, stored keys and values included.

        They stay valid until the next call. sampled: as in `fill_pending`.
        """
        num_seqs = len(step.query_lens)
        self._inputs.fill(step)
        fill_pending(self._inputs.token_ids, step, sampled)
        self._replays[bisect_left(self._sizes, num_seqs)]()
        return self._hidden[:num_seqs]

    def _bind(self, size: int, max_context_len: int) -> Callable[[], None]:
        """What to capture: one decode step of `size` rows out of the static buffers."""
        inputs, forward, hidden = self._inputs, self._forward, self._hidden[:size]
        batch = ForwardBatch(
            token_ids=inputs.token_ids[:size],
            positions=inputs.positions[:size],
            slot_mapping=inputs.slot_mapping[:size],
            sample_rows=inputs.rows[:0],  # logits are no part of it
            attention=self._backend.decode_metadata(
                inputs.rows[:size], inputs.context_lens[:size], inputs.block_tables[:size], max_context_len
            ),
        )

        def run() -> None:
            hidden.copy_(forward(batch))

        return run
