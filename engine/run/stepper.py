"""Stepper: takes the engine's steps and, if one raises, finds the sequence to blame.

All steps in flight are withdrawn and computed again, one at a time. A step that raises again is halved, and
halved again, until one sequence raises alone. Then the engine takes the control, a short step of its own. If that
succeeds, the sequence is to blame: it fails and all others go on. The engine is to blame (StepFailed) if the control
raises too, memory runs out, a rank dies, or several steps in a row raise. So a fault of the device is found after
about log2(sequences) tries.
"""

import logging
import time
import traceback
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import OutOfBlocks, RankFailed, StepFailed
from engine.run.forward.runner import PendingTokens, Runner
from engine.sampling.sampling_params import SamplingParams
from engine.schedule.drafts import Drafts
from engine.schedule.logprobs import RowLogprobs
from engine.schedule.outputs import EngineStats
from engine.schedule.scheduled_batch import ScheduledBatch
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Sequence, SequenceStatus
from engine.schedule.step_batch import build_sampling_batch, build_step_batch
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NEVER_A_SEQUENCE = (MemoryError, torch.OutOfMemoryError, RankFailed, StepFailed, OutOfBlocks)
MAX_UNEXPLAINED = 3  # steps in a row that raise with nobody to blame

#: Sequences with a grammar miss every other step if they are at most 1 / CONSTRAINED_SHARE of those that run. Then an
#: eighth of the tokens of a step are missing. If all waited, a step of 256 would take 7.7 ms on an H200, not 5.4.
CONSTRAINED_SHARE = 4

CONTROL = SamplingParams(max_tokens=2, top_p=0.5, seed=0)

#: A step's tokens, log probabilities and pooled states.
Arrived = tuple[NDArray[np.int64], RowLogprobs | None, NDArray[np.float32] | None]


_NUM_SIZES = 13
"""The sizes of batches that are counted apart: 1, 2, up to 4, up to 8, ... up to 2,048, and all larger ones."""


class Stopwatch:
    """Adds up the seconds that are spent inside `with`."""

    __slots__ = ("_began", "seconds")

    def __init__(self) -> None:
        self.seconds = self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


class StepStats:
    """Counts steps since the start, with a stopwatch for each part: see EngineStats.step_seconds."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_scheduled = 0  # sequences, over all steps
        self.num_adapter_steps = 0
        self.batch_sizes = [0] * _NUM_SIZES
        self.schedule = Stopwatch()
        self.prepare = Stopwatch()
        self.launch = Stopwatch()
        self.wait = Stopwatch()
        self.update = Stopwatch()
        self.detokenize = Stopwatch()

    def count(self, num_seqs: int) -> None:
        """Count a step of num_seqs sequences."""
        self.num_steps += 1
        self.num_scheduled += num_seqs
        # of the smallest power of two that is at least num_seqs
        exponent = max(num_seqs - 1, 0).bit_length()
        self.batch_sizes[min(exponent, _NUM_SIZES - 1)] += 1

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each part."""
        return {
            name: part.seconds for name, part in vars(self).items() if isinstance(part, Stopwatch)
        }


class Stepper:
    """Takes steps, and owns those that are launched and not yet waited for.

    overlaps: launch a step before the tokens of the one before are there; there are no drafts then.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, tokenizer: Tokenizer, *, overlaps: bool
    ) -> None:
        self.overlaps = overlaps
        self.stats = StepStats()
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self.drafts: Drafts | None = None if overlaps else Drafts()
        self._pending: deque[PendingTokens] = deque()  # of launched steps, the oldest first
        self._finished: list[Sequence] = []
        # of each suspect, the number of tokens that it had when its step was withdrawn
        self._suspects: dict[Sequence, int] = {}
        self._num_unexplained = 0

    @property
    def in_flight(self) -> bool:
        """Whether a launched step has not been waited for."""
        return bool(self._pending)

    def close(self) -> None:
        """Close the runner without waiting for steps in flight. No call may follow."""
        self._pending.clear()
        del self._runner

    def finish(self, seq: Sequence) -> None:
        """Have the next `take` return a sequence that has ended outside a step."""
        seq.status = SequenceStatus.FINISHED
        self._finished.append(seq)

    def engine_stats(self) -> EngineStats:
        """Return the counters since the start, and the current state."""
        scheduler = self._scheduler
        steps = self.stats
        return EngineStats(
            num_steps=steps.num_steps,
            num_running=len(scheduler.running),
            max_running=scheduler.max_running,
            num_waiting=scheduler.num_waiting,
            num_preemptions=scheduler.num_preemptions,
            prefill_tokens=scheduler.prefill_tokens,
            cached_tokens=scheduler.cached_tokens,
            decode_tokens=scheduler.decode_tokens,
            num_blocks=scheduler.blocks.num_blocks,
            free_blocks=scheduler.blocks.num_free_blocks,
            cpu_threads=torch.get_num_threads(),
            generation_tokens=scheduler.generation_tokens,
            step_seconds=steps.seconds,
            num_scheduled=steps.num_scheduled,
            batch_sizes=tuple(steps.batch_sizes),
            adapter_steps=steps.num_adapter_steps,
        )

    def take(self, launches: bool = True) -> list[Sequence]:
        """Compute one batch; return the sequences that finished, or failed, in it or in the one before.

        launches: False launches nothing and waits for the steps in flight. Raises StepFailed if no sequence is to
        blame, and RankFailed; sequences that finished before are then returned by the next call.
        """
        try:
            if launches:
                self._take()
            else:
                self._receive_all_but(0)
            with self.stats.detokenize:
                for seq in self._finished:
                    self._write_text(seq)
        except BaseException as error:
            self._pending.clear()
            self._scheduler.withdraw()
            if isinstance(error, Exception) and not isinstance(error, (RankFailed, StepFailed)):
                raise StepFailed(f"a step failed: {error!r}") from error
            raise
        finished = self._finished
        self._finished = []
        return finished

    def _take(self) -> None:
        """Schedule a step and launch it; while sequences are suspected, compute it by halves instead."""
        if self._pending and not self._few_are_constrained():
            # a grammar must know each token before it can say what may follow
            is_received = self._receive_all_but(0)
            if not is_received:
                return
        with self.stats.schedule:
            drafts = None if self._suspects or self._pending else self.drafts
            batch = self._scheduler.schedule(drafts)
        began = time.perf_counter()
        if self._suspects and self._has_suspects():
            self._run_by_halves()
        else:
            self._run(batch)
        if drafts is not None and batch.launched and not batch.prefills:
            drafts.timed(batch.num_tokens, time.perf_counter() - began)

    def _few_are_constrained(self) -> bool:
        """Return whether few sequences have a grammar.

        Those sequences then miss every other step, and the others need not wait for them.
        """
        num_constrained = self._scheduler.slots.num_constrained
        return num_constrained * CONSTRAINED_SHARE <= len(self._scheduler.running)

    def _run(self, batch: ScheduledBatch) -> None:
        """Launch the batch; take in the results of the steps before it, or of all if steps do not overlap."""
        try:
            if batch.num_tokens:
                self._pending.append(self._launch(batch))
                self._scheduler.advance(batch)
        except Exception as error:  # noqa: BLE001 - whatever one sequence makes a step raise
            self._start_over(error)
            return
        if self._receive_all_but(1 if self.overlaps and batch.num_tokens else 0):
            self._num_unexplained = 0

    def _receive_all_but(self, num_left: int) -> bool:
        """Wait for the oldest steps in flight until num_left are left; return False if one raised."""
        arrived: list[Arrived] = []
        try:
            while len(self._pending) > num_left:
                arrived.append(self._wait(self._pending.popleft()))
        except Exception as error:  # noqa: BLE001 - whatever one sequence makes a step raise
            self._start_over(error)
            return False
        for step in arrived:
            self._receive(step)
        return True

    def _run_by_halves(self) -> None:
        """Compute the scheduled step; if it raises, halve it again and again, down to the sequence to blame."""
        while self._scheduler.in_flight:
            batch = self._scheduler.in_flight[0]
            try:
                arrived = self._wait(self._launch(batch, repeatable=True))
            except Exception as error:  # noqa: BLE001 - whatever one sequence makes a step raise
                if len(batch.seqs) > 1:
                    self._raise_engines_fault(error)
                    self._scheduler.split()
                else:
                    self._blame(batch.seqs[0], error)
            else:
                self._scheduler.advance(batch)
                self._receive(arrived)

    def _launch(self, batch: ScheduledBatch, *, repeatable: bool = False) -> PendingTokens:
        slots = self._scheduler.slots
        with self.stats.prepare:
            step = build_step_batch(batch, slots)
            sampling = build_sampling_batch(batch, slots)
        if len(step.adapters):
            self.stats.num_adapter_steps += 1
        with self.stats.launch:
            return self._runner.launch(step.repeatable() if repeatable else step, sampling)

    def _wait(self, pending: PendingTokens) -> Arrived:
        """Wait for a step's tokens, log probabilities and pooled states."""
        with self.stats.wait:
            return pending.wait(), pending.logprobs, pending.pooled

    def _receive(self, arrived: Arrived) -> None:
        self.stats.count(len(self._scheduler.in_flight[0].seqs))
        with self.stats.update:
            finished = self._scheduler.receive(*arrived)
            if self.drafts is not None:
                self.drafts.learn(finished)
            self._finished += finished

    def _write_text(self, seq: Sequence) -> None:
        """Write the text of a finished sequence; if that raises, this sequence alone fails."""
        try:
            if seq.error is not None:
                raise seq.error
            seq.text = self._text_of(seq)
        except Exception as error:  # noqa: BLE001 - whatever its text raises
            self._raise_engines_fault(error)
            seq.fail(error)
            logger.error(  # without the error's text, which may hold a part of the prompt
                "request %s, sample %d failed alone, with %s in %s: its neighbours go on",
                seq.request_id, seq.index, type(error).__name__, traceback.extract_tb(error.__traceback__)[-1:],
            )  # fmt: skip

    def _text_of(self, seq: Sequence) -> str:
        if not seq.generates:
            return ""
        cut = seq.stop_strings.text if seq.stop_strings is not None else None
        if cut is not None:
            return cut
        return self._tokenizer.decode(
            seq.generated_token_ids,
            follows_text=seq.follows_text,
            skip_special_tokens=seq.params.skip_special_tokens,
            spaces_between_special_tokens=seq.params.spaces_between_special_tokens,
        )

    def _start_over(self, error: Exception) -> None:
        """Withdraw all steps in flight and suspect their sequences. Raises StepFailed if a search is of no use."""
        self._raise_engines_fault(error)
        self._num_unexplained += 1
        if self._num_unexplained > MAX_UNEXPLAINED:
            raise StepFailed(
                f"{self._num_unexplained} steps in a row raised, and no sequence alone: {error!r}"
            ) from error
        logger.warning("a step raised %s: looking for the sequence to blame", type(error).__name__)
        self._suspects = {
            seq: seq.num_tokens for step in self._scheduler.in_flight for seq in step.seqs
        }
        self._pending.clear()
        self._scheduler.withdraw()

    def _has_suspects(self) -> bool:
        """Return whether any suspect is left, and forget those that are none any more.

        A suspect is cleared once it has more tokens than when its step was withdrawn, or is finished.
        """
        self._suspects = {
            seq: num_tokens
            for seq, num_tokens in self._suspects.items()
            if seq.status is not SequenceStatus.FINISHED and len(seq.token_ids) <= num_tokens
        }
        return bool(self._suspects)

    def _raise_engines_fault(self, error: Exception) -> None:
        """Raise the error if its kind is never a sequence's fault."""
        if isinstance(error, NEVER_A_SEQUENCE):
            raise error

    def _blame(self, seq: Sequence, error: Exception) -> None:
        """Fail a sequence that raised alone. Raises StepFailed instead if the control raises too."""
        self._raise_engines_fault(error)
        self._scheduler.withdraw()
        control = Sequence("the engine's own", [0], CONTROL, stop_token_ids=frozenset((1,)))
        try:
            self._launch(self._scheduler.schedule_control(control)).wait()
        except Exception as own_error:  # noqa: BLE001 - it says what is broken
            raise StepFailed(
                f"a step failed: {error!r}; one of the engine's own failed too: {own_error!r}"
            ) from error
        finally:
            self._scheduler.release_control(control)
        self._scheduler.abort(seq)
        seq.fail(error)
        self._finished.append(seq)
        self._num_unexplained = 0
