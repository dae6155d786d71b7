"""What a run's manifest tells beside its counts: when tokens came, how long texts are, who did it."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from math import fsum
from typing import Any

from jobs.runs.statistics.part_stats import PartStats
from jobs.runs.statistics.reasons import Reasons

#: The most tokens of each range: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on.
BOUNDS = (0, 1, 2, 3, *(half << power for power in range(1, 30) for half in (2, 3)))


def count_lengths(lengths: Iterable[int]) -> dict[str, int]:
    found = Counter(BOUNDS[min(bisect_left(BOUNDS, length), len(BOUNDS) - 1)] for length in lengths)
    return {str(bound): found[bound] for bound in sorted(found)}


#: Points of the time line, workers and reasons that are told.
MAX_BINS, MAX_WORKERS, MAX_REASONS = 120, 200, 20


def working_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return for how many seconds any of the spans, of a start and an end each, lasted."""
    return fsum(end - start for start, end in _merged(spans))


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the times that the spans cover, in order, none of which touches another."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if not found or start > found[-1][1]:
            found.append((start, max(start, end)))
        else:
            found[-1] = found[-1][0], max(found[-1][1], end)
    return found


@dataclass
class _Worker:
    rows: int = 0
    errors: int = 0
    tokens: int = 0
    spans: array[float] = field(default_factory=lambda: array("d"))

    @property
    def seconds(self) -> float:
        return working_s(zip(self.spans[::2], self.spans[1::2], strict=True))


class RunStatistics:
    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._spans = array("d")  # start, end and tokens of each part
        self._prompts: Counter[int] = Counter()
        self._completions: Counter[int] = Counter()

    def add(self, part: PartStats) -> None:
        worker = self._workers.setdefault(part.worker, _Worker())
        worker.rows += part.rows
        worker.errors += part.errors
        worker.tokens += part.generated_tokens
        worker.spans.extend((part.started_at, part.ended_at))
        self._spans.extend((part.started_at, part.ended_at, part.generated_tokens))
        self._prompts.update({int(bound): count for bound, count in part.prompt_lengths.items()})
        self._completions.update({int(bound): count for bound, count in part.completion_lengths.items()})

    def to_object(self, reasons: Reasons) -> dict[str, Any]:
        """Return it as the manifest has it; times are those in which any worker had a shard."""
        busy = _merged(zip(self._spans[::3], self._spans[1::3], strict=True))
        workers = sorted(self._workers.items(), key=lambda each: -each[1].rows)
        return {
            "working_seconds": fsum(end - start for start, end in busy),
            "timeline": self._timeline(busy),
            "prompt_lengths": {str(bound): self._prompts[bound] for bound in sorted(self._prompts)},
            "completion_lengths": {str(bound): self._completions[bound] for bound in sorted(self._completions)},
            "workers": [
                {
                    "name": name,
                    "rows": each.rows,
                    "errors": each.errors,
                    "generated_tokens": each.tokens,
                    "seconds": each.seconds,
                }
                for name, each in workers[:MAX_WORKERS]
            ],
            "num_workers": len(workers),
            "worker_seconds": sum(each.seconds for _, each in workers),
            "reasons": reasons.told(MAX_REASONS),
        }

    def _timeline(self, busy: list[tuple[float, float]]) -> dict[str, Any]:
        if not self._spans:
            return {"bin_s": 0.0, "tokens": []}
        worked = [0.0, *accumulate(end - start for start, end in busy)]  # before each of the busy times
        starts = [start for start, _ in busy]
        bins = min(MAX_BINS, max(1, len(self._spans)))
        width = worked[-1] / bins
        tokens = [0.0] * bins
        if width <= 0:
            return {"bin_s": 0.0, "tokens": [sum(self._spans[2::3])]}
        parts = zip(self._spans[::3], self._spans[1::3], self._spans[2::3], strict=True)
        for start, end, count in parts:
            place = bisect_right(starts, start) - 1
            began = worked[place] + start - starts[place]
            ended = began + max(0.0, end - start)
            first = min(bins - 1, int(began / width))
            last = min(bins - 1, int(ended / width))
            for place in range(first, last + 1):
                left, right = place * width, (place + 1) * width
                share = (min(ended, right) - max(began, left)) / (ended - began) if ended > began else 1.0
                tokens[place] += count * (share if last > first else 1.0)
        return {"bin_s": width, "tokens": [round(each, 1) for each in tokens]}
