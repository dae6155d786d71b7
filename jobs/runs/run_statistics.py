"""What a run's manifest tells beside its counts: when tokens came, how long texts are, who did it."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .lengths import read_lengths
from .part_stats import PartStats
from .reasons import Reasons

#: Points of the time line, workers and reasons that are told.
MAX_BINS, MAX_WORKERS, MAX_REASONS = 120, 200, 20


@dataclass
class _Worker:
    rows: int = 0
    errors: int = 0
    tokens: int = 0
    spans: array[float] = field(default_factory=lambda: array("d"))

    @property
    def seconds(self) -> float:
        """Return for how long it had any shard of the run."""
        total, until = 0.0, float("-inf")
        for start, end in sorted(zip(self.spans[::2], self.spans[1::2], strict=True)):
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total


class RunStatistics:
    """Takes parts one by one."""

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
        self._prompts.update(read_lengths(part.prompt_lengths))
        self._completions.update(read_lengths(part.completion_lengths))

    def to_object(self, reasons: Reasons) -> dict[str, Any]:
        """Return it as the manifest has it. Tokens of a part count evenly from its start to its end."""
        workers = sorted(self._workers.items(), key=lambda each: -each[1].rows)
        return {
            "timeline": self._timeline(),
            "prompt_lengths": {str(bound): self._prompts[bound] for bound in sorted(self._prompts)},
            "completion_lengths": {
                str(bound): self._completions[bound] for bound in sorted(self._completions)
            },
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
            "reasons": [
                {"reason": each.text, "rows": each.rows, "examples": each.examples}
                for each in reasons.commonest(MAX_REASONS)
            ],
        }

    def _timeline(self) -> dict[str, Any]:
        if not self._spans:
            return {"bin_s": 0.0, "tokens": []}
        start, end = min(self._spans[::3]), max(self._spans[1::3])
        bins = min(MAX_BINS, max(1, len(self._spans)))
        width = (end - start) / bins
        tokens = [0.0] * bins
        if width <= 0:
            return {"bin_s": 0.0, "tokens": [sum(self._spans[2::3])]}
        parts = zip(self._spans[::3], self._spans[1::3], self._spans[2::3], strict=True)
        for began, ended, count in parts:
            first = min(bins - 1, int((began - start) / width))
            last = min(bins - 1, int((ended - start) / width))
            for place in range(first, last + 1):
                left, right = start + place * width, start + (place + 1) * width
                share = (min(ended, right) - max(began, left)) / (ended - began) if ended > began else 1.0
                tokens[place] += count * (share if last > first else 1.0)
        return {"bin_s": width, "tokens": [round(each, 1) for each in tokens]}
