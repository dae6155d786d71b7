"""Counts steps: their seconds, and how many sequences they had."""

import time

import torch

from engine.schedule.outputs import EngineStats
from engine.schedule.scheduler import Scheduler

_NUM_SIZES = 13
"""Of batches: 1, 2, up to 4, up to 8, ... up to 2,048, and all that are larger."""


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
        self.num_steps = self.num_scheduled = 0
        self.batch_sizes = [0] * _NUM_SIZES
        self.schedule, self.prepare, self.launch = Stopwatch(), Stopwatch(), Stopwatch()
        self.wait, self.update, self.detokenize = Stopwatch(), Stopwatch(), Stopwatch()

    def count(self, num_seqs: int) -> None:
        """Count a step of so many sequences."""
        self.num_steps += 1
        self.num_scheduled += num_seqs
        self.batch_sizes[min(max(num_seqs - 1, 0).bit_length(), _NUM_SIZES - 1)] += 1

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each part."""
        return {name: part.seconds for name, part in vars(self).items() if isinstance(part, Stopwatch)}


def engine_stats(scheduler: Scheduler, steps: StepStats) -> EngineStats:
    """Counters since start and the state of now."""
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
    )
