"""What a run's manifest tells beside its counts: when tokens came, how long texts are, who did it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import fsum
from typing import Any, NamedTuple

from jobs.runs.statistics.part_stats import PartStats
from jobs.runs.statistics.reasons import Reasons

#: The most tokens of each range: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on.
BOUNDS = (0, 1, 2, 3, *(half << power for power in range(1, 30) for half in (2, 3)))


def count_lengths(lengths: Iterable[int]) -> dict[str, int]:
    found = Counter(BOUNDS[min(bisect_left(BOUNDS, length), len(BOUNDS) - 1)] for length in lengths)
    return {str(bound): found[bound] for bound in sorted(found)}


#: Points of the time line, workers and reasons that are told.
MAX_BINS, MAX_WORKERS, MAX_REASONS = 120, 200, 20


def _lasted(spans: Iterable[tuple[float, float]]) -> float:
    return fsum(end - start for start, end in spans)


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the times that the spans cover, in order, none of which touches another."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if not found or start > found[-1][1]:
            found.append((start, max(start, end)))
        else:
            found[-1] = found[-1][0], max(found[-1][1], end)
    return found


class _Part(NamedTuple):
    worker: str
    start: float
    end: float
    rows: int
    errors: int
    tokens: int


class RunStatistics:
    def __init__(self) -> None:
        self._parts: dict[str, list[_Part]] = {}  # of each worker
        self._prompts: Counter[int] = Counter()
        self._completions: Counter[int] = Counter()

    def add(self, part: PartStats) -> None:
        counts = part.rows, part.errors, part.generated_tokens
        added = _Part(part.worker, part.started_at, part.ended_at, *counts)
        self._parts.setdefault(part.worker, []).append(added)
        self._prompts.update({int(bound): count for bound, count in part.prompt_lengths.items()})
        self._completions.update({int(bound): count for bound, count in part.completion_lengths.items()})

    def to_object(self, reasons: Reasons) -> dict[str, Any]:
        """Return it as the manifest has it; times are those in which any worker had a shard."""
        parts = [part for found in self._parts.values() for part in found]
        busy = _merged((part.start, part.end) for part in parts)
        workers: list[dict[str, Any]] = [
            {
                "name": name,
                "rows": sum(part.rows for part in found),
                "errors": sum(part.errors for part in found),
                "generated_tokens": sum(part.tokens for part in found),
                "seconds": _lasted(_merged((part.start, part.end) for part in found)),
            }
            for name, found in self._parts.items()
        ]
        return {
            "working_seconds": _lasted(busy),
            "timeline": _timeline(parts, busy),
            "prompt_lengths": {str(bound): self._prompts[bound] for bound in sorted(self._prompts)},
            "completion_lengths": {str(bound): self._completions[bound] for bound in sorted(self._completions)},
            "workers": sorted(workers, key=lambda each: -each["rows"])[:MAX_WORKERS],
            "num_workers": len(workers),
            "worker_seconds": sum(each["seconds"] for each in workers),
            "reasons": reasons.told(MAX_REASONS),
        }


def _timeline(parts: Sequence[_Part], busy: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the tokens of each of some equal stretches of the busy times."""
    worked = [0.0, *accumulate(end - start for start, end in busy)]  # before each of the busy times
    starts = [start for start, _ in busy]
    tokens = [0.0] * min(MAX_BINS, 3 * len(parts))
    width = worked[-1] / max(1, len(tokens))
    if width <= 0:
        return {"bin_s": 0.0, "tokens": [sum(part.tokens for part in parts)] if parts else []}
    for part in parts:
        place = bisect_right(starts, part.start) - 1
        began = worked[place] + part.start - starts[place]
        ended = began + max(0.0, part.end - part.start)
        first, last = (min(len(tokens) - 1, int(each / width)) for each in (began, ended))
        for place in range(first, last + 1):
            left, right = place * width, (place + 1) * width
            share = (min(ended, right) - max(began, left)) / (ended - began) if last > first else 1.0
            tokens[place] += part.tokens * share
    return {"bin_s": width, "tokens": [round(each, 1) for each in tokens]}
