"""DecodeGraphs: steps in which every sequence has one new token, recorded once and replayed.

On a GPU starting the hundreds of kernels of a decode step takes longer than they run. A CUDA graph starts all
of them with one call, but replays the very addresses and sizes it recorded: so there is one graph for each of
a ladder of batch sizes, a step takes the next larger one, and all read the same static rows. A padding row
has slot -1 and context length 0: it stores nothing, attends to nothing, and its sample is never read.

A step is two graphs: one advances the rows (`attention.decode_state`) and computes them, the other samples
their next tokens into the state that the next step starts from. The host writes only rows of sequences that
joined or moved, padding where one left, and new blocks (`rows`). Where requests change logits, or want log
probabilities, the tokens are chosen without the second graph.

Where rows have prefixes in common that are worth it (`attention.prefix_groups`), another first graph is replayed, whose
layers read such a prefix once. It is recorded for the sizes in which a prefix can be worth it. Steps with adapters have
a first graph of their own. It sorts rows by adapter, and reads the tables of the adapters that are loaded then. It also
reads common prefixes once.
Source: https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import CapturableBackend, ForwardBatch
from engine.attention.prefix_groups import PrefixTensors
from engine.attention.state_pool import find_waves
from engine.errors import CaptureFailed, CollectiveFailed
from engine.layers.lora_tables import LowRankTables
from engine.layers.parallel import TensorParallel
from engine.run.forward.rows import StaticRows
from engine.run.forward.runner import Sampled
from engine.sampling.logit_edits import LogitEdits
from engine.sampling.sampling_batch import SamplingBatch
from engine.sampling.sampling_rows import SamplingRows
from engine.schedule.step_batch import StepBatch

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
Forward = Callable[[ForwardBatch], Tensor]
Keep = Callable[[Tensor, NDArray[np.int64]], None]
Choose = Callable[
    [Tensor, SamplingRows, LogitEdits | None, Tensor, Callable[[Tensor], None] | None], None
]

Told = ParamSpec("Told")
Recorded = TypeVar("Recorded")

logger = logging.getLogger(__name__)


class CudaCapture:
    """Records what a callable launches; all graphs share one memory pool, as they never run at the same time.

    Make a new one for another set of graphs: the pool is gone with the last graph in it.
    """

    def __init__(self, device: torch.device, *, may_wait: bool = False) -> None:
        """may_wait: whether the captured calls may wait for the device; if so, that is checked before recording."""
        self._may_wait = may_wait
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Run once, to compile and set up, then record. Raises RuntimeError if `run` waits for the device."""
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
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        replay: Replay = graph.replay
        return replay


def capture_on_all_ranks(
    capture: Callable[[Callable[Told, None]], Recorded], tp: TensorParallel
) -> Callable[[Callable[Told, None]], Recorded]:
    """Return a capture that raises CaptureFailed on every rank if it fails on one.

    Otherwise a rank without graphs would sum other rows than the ranks with graphs, and wait for them for ever. So the
    ranks agree after each capture. Two failures end the start instead: memory that runs out, and a step that fails on
    one of several ranks before it is recorded, as the others then wait in that step's sums.
    """

    def capture_and_agree(run: Callable[Told, None]) -> Recorded:
        recorded: Recorded | None = None
        problem = ""
        has_run = False

        def run_and_note(*args: Told.args, **kwargs: Told.kwargs) -> None:
            nonlocal has_run
            run(*args, **kwargs)
            has_run = True

        try:
            recorded = capture(run_and_note)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, CollectiveFailed) as error:
            if tp.size > 1 and not has_run:
                raise
            problem = str(error)
            if tp.rank != 0:  # rank 0 alone logs warnings, and does not know this rank's reason
                logger.error("rank %d cannot record a CUDA graph: %s", tp.rank, problem)
        everywhere = tp.minimum(int(recorded is not None))
        if recorded is None or not everywhere:
            raise CaptureFailed(problem or "another rank cannot record them")
        return recorded

    return capture_and_agree


def batch_sizes(max_num_seqs: int) -> list[int]:
    """List the sizes to capture: 1, 2, 4, then by 8 to 128, by 16 to 256, by 32, and max_num_seqs itself.

    Padding costs little: steps are bound by reading weights, and above 64 rows it is an eighth at most.
    """
    ladder = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, max_num_seqs, 32)]
    return [size for size in ladder if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Owns the graphs and the rows they read. The graphs hold the addresses of the weights and the KV pool."""

    def __init__(
        self,
        forward: Forward,
        choose: Choose,
        backend: CapturableBackend,
        capture: Capture,
        static: StaticRows,
        max_model_len: int,
        tables: LowRankTables | None = None,
    ) -> None:
        """Capture all sizes, and run each graph once with padding.

        forward: ForwardBatch -> hidden states [tokens, hidden_size].
        choose: takes hidden states [rows, hidden_size], sampling values, edits, and token ids [rows] int64, which it
        replaces by the chosen ones. Its last argument is None, or a function that is given the logits before the edits.
        tables: of adapters; without them steps with adapters are not recorded.
        """
        self._tables = tables
        self._forward = forward
        self._choose = choose
        self._backend = backend
        self._static = static
        self._hidden: dict[int, Tensor] = {}  # of each size, what its graph computed last
        self._sizes = batch_sizes(len(static.indices))
        # the largest first: the others fit into the memory it took
        largest_first = [
            [capture(run) for run in self._bind(size, max_model_len)]
            for size in reversed(self._sizes)
        ]
        self._replays = largest_first[::-1]
        # by size, the first graph where prefixes are read once
        self._sharing: dict[int, Replay] = {}
        for size in reversed(self._sizes):
            if self._prefixes(size, max_model_len) is not None:
                self._sharing[size] = capture(self._bind_sharing(size, max_model_len))
        # by size, the first graph of steps with adapters
        self._adapted: dict[int, Replay] = {}
        if tables is not None:
            for size in reversed(self._sizes):
                self._adapted[size] = capture(self._bind_adapted(size, max_model_len, tables))
        for compute, choose_tokens in self._replays:
            compute()  # the first replay takes longer, and shows if anything is wrong with a graph
            choose_tokens()
        for compute in [*self._sharing.values(), *self._adapted.values()]:
            compute()

    def fits(self, step: StepBatch) -> bool:
        """Return whether `run` can take this step: one token of each sequence, all of which sample.

        A step in which one sequence reads a state that another writes does not fit: a graph computes all rows at once.
        """
        num_seqs = len(step.slots)
        is_decode = (
            len(step.token_ids) == len(step.sample_rows) == num_seqs
            and not len(step.scored_rows)
            and not len(step.pooled_rows)
            and step.pictures is None
            and self._takes_adapters(step)
            and not find_waves(step.state_parts).any()
        )
        return is_decode and 0 < num_seqs <= self._sizes[-1]

    def _takes_adapters(self, step: StepBatch) -> bool:
        if not len(step.adapters):
            return True
        return self._tables is not None and self._tables.hold(step.adapters)

    def run(
        self,
        step: StepBatch,
        sampling: SamplingBatch,
        last: Sampled | None = None,
        keep: Keep | None = None,
    ) -> Sampled:
        """Compute the step without waiting for it. last: the tokens of the step launched before.

        keep: is given the logits before they are edited, [any, vocabulary], and the row of each sequence, [seqs].
        """
        graph = bisect_left(self._sizes, len(step.slots))
        size = self._sizes[graph]
        compute, choose_tokens = self._replays[graph]
        try:
            rows = self._static.write(step, sampling, last)
            if self._static.has_adapters:
                compute = self._adapted[size]
            elif self._static.has_prefixes:
                compute = self._sharing.get(size, compute)
            compute()
            edits = sampling.ready_edits()  # computes masks while the step runs
            if edits is None and keep is None:
                choose_tokens()
            else:
                if edits is not None:
                    # the pending token of a row is the one that the row has just computed, so it is read there
                    edited_rows = rows[edits.rows]
                    edits = edits.placed(edited_rows, edited_rows[edits.pending[:, 0]])
                state = self._static.state.first(size)
                keep_logits = None if keep is None else partial(_keep_of_rows, keep, rows)
                self._choose(
                    self._hidden[size], state.sampling, edits, state.next_token_ids, keep_logits
                )
        except BaseException:
            self._static.forget()
            raise
        return Sampled(self._static.state.next_token_ids[: len(rows)], rows)

    def _bind(
        self, size: int, max_context_len: int
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return two functions to capture, for a decode step of `size` static rows.

        The first computes the hidden states. The second chooses the next tokens by them.
        """
        forward = self._forward
        advance = self._backend.advance
        choose = self._choose
        state = self._static.state.first(size)
        outputs = self._hidden
        batch = self._batch(size, max_context_len, None)

        def run() -> None:
            advance(state)
            outputs[size] = forward(batch)

        return run, lambda: choose(outputs[size], state.sampling, None, state.next_token_ids, None)

    def _bind_sharing(self, size: int, max_context_len: int) -> Callable[[], None]:
        """Return _bind's first function, with prefixes read once. It writes its hidden states over that function's."""
        forward = self._forward
        advance = self._backend.advance
        state = self._static.state.first(size)
        outputs = self._hidden
        batch = self._batch(size, max_context_len, self._prefixes(size, max_context_len))

        def run() -> None:
            advance(state)
            outputs[size].copy_(forward(batch))

        return run

    def _bind_adapted(
        self, size: int, max_context_len: int, tables: LowRankTables
    ) -> Callable[[], None]:
        """Return _bind's first function, for steps with adapters. It writes its hidden states over that function's."""
        forward = self._forward
        advance = self._backend.advance
        state = self._static.state.first(size)
        outputs = self._hidden
        adapters = self._static.adapters[:size]
        # in a step without common prefixes, the kernel that reads them has nothing to do
        batch = self._batch(size, max_context_len, self._prefixes(size, max_context_len))

        def run() -> None:
            advance(state)
            outputs[size].copy_(forward(replace(batch, adapters=tables.sort(adapters))))

        return run

    def _prefixes(self, size: int, max_context_len: int) -> PrefixTensors | None:
        """Return the static prefixes of the first `size` rows; None if none can pay among them."""
        limits = self._static.limits
        prefixes = self._static.prefixes
        if limits is None or prefixes is None or not limits.can_pay(size, max_context_len):
            return None
        return prefixes._replace(begins=prefixes.begins[:size])

    def _batch(
        self, size: int, max_context_len: int, prefixes: PrefixTensors | None
    ) -> ForwardBatch:
        state = self._static.state.first(size)
        return ForwardBatch(
            token_ids=state.token_ids,
            positions=state.positions,
            slot_mapping=state.slot_mapping,
            sample_rows=self._static.indices[:0],  # the LM head is not a part of `forward`
            attention=self._backend.decode_metadata(
                self._static.indices[:size],
                state.context_lens,
                state.block_tables,
                max_context_len,
                self._static.order[:size],
                prefixes,
            ),
            states=None if self._static.states is None else self._static.states.first(size),
        )


def _keep_of_rows(keep: Keep, rows: NDArray[np.int64], logits: Tensor) -> None:
    keep(logits, rows)
