"""What is counted of a run: of each part, why rows have errors, and in the manifest of all parts together."""

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from math import fsum
from typing import Any, NamedTuple, Self

#: What is summed up over the parts while a run goes on.
COUNTED = (
    *("rows", "errors", "prompt_tokens", "completion_tokens", "cached_tokens", "generated_tokens"),
    *("failed_checks", "cut", "rows_reused", "rows_escalated"),
)

TOLD = (*COUNTED, "rows_resumed", "tokens_resumed")


@dataclass(frozen=True)
class PartStats:
    """Counts of one part.

    prompt_tokens, completion_tokens, cached_tokens: sums of the output's columns. generated_tokens: that its execution
    has computed, equal prompts counted once. rows_resumed, tokens_resumed: of earlier executions. started_at, ended_at:
    Unix seconds. failed_checks, cut: rows without an error whose answer fails its check, or ended at its limit of
    tokens. prompt_lengths, completion_lengths: in tokens, as count_lengths returns them.
    """

    run: str
    shard: int
    rows: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    generated_tokens: int
    started_at: float
    ended_at: float
    model: str
    fingerprint: str
    dtype: str
    attention_backend: str
    version: str
    worker: str = ""
    prompt_lengths: dict[str, int] = field(default_factory=dict)
    completion_lengths: dict[str, int] = field(default_factory=dict)
    failed_checks: int = 0
    cut: int = 0
    rows_resumed: int = 0
    tokens_resumed: int = 0
    rows_reused: int = 0
    rows_escalated: int = 0
    commit: str = ""

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended_at - self.started_at)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    def to_record(self) -> str:
        """Return what Redis keeps of it: whoever looks at a run reads this of each of its parts."""
        return replace(self, prompt_lengths={}, completion_lengths={}).to_text()

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Read what `to_text` or `to_record` wrote, here or in another version. Raises ValueError for anything else."""
        known = {each.name for each in fields(cls)}
        try:
            return cls(**{name: value for name, value in json.loads(text).items() if name in known})
        except TypeError as error:
            raise ValueError(str(error)) from None


def outcome_text(errors: int, failed_checks: int, cut: int, rows: str = "") -> str:
    """Say how many rows have no good answer, and why. rows: what stands behind the first number."""
    told = [f"{errors} {rows}with an error"]
    told += [f"{failed_checks} failed their check"] if failed_checks else []
    return ", ".join([*told, *([f"{cut} cut at their limit of tokens"] if cut else [])])


MAX_REASON_CHARS = 200
#: Kinds that are told apart; rows of further ones are counted together.
MAX_KINDS = 1000
OTHERS = "other reasons"

MAX_EXAMPLES = 3


@dataclass
class Reason:
    """Rows with one error: the first one's text, how many, and the first ones' numbers over the whole input."""

    text: str
    rows: int = 0
    examples: list[int] = field(default_factory=list)


class Reasons:
    """Counts rows by reason; texts that differ in their numbers alone are one reason."""

    def __init__(self) -> None:
        self._found: dict[str, Reason] = {}

    @property
    def rows(self) -> int:
        return sum(reason.rows for reason in self._found.values())

    def add(self, text: str, rows: Sequence[int], count: int | None = None) -> None:
        """Count rows of one reason. rows: ascending numbers; count: how many, where not all are named."""
        text = text[:MAX_REASON_CHARS]
        kind = re.sub(r"\d+", "0", text)
        if kind not in self._found and len(self._found) >= MAX_KINDS:
            kind = text = OTHERS
        reason = self._found.setdefault(kind, Reason(text))
        if rows and reason.examples and rows[0] < reason.examples[0]:
            reason.text = text
        reason.rows += len(rows) if count is None else count
        reason.examples = sorted([*reason.examples, *rows[:MAX_EXAMPLES]])[:MAX_EXAMPLES]

    def commonest(self, most: int) -> list[Reason]:
        """Return at most so many, the commonest first; of equal ones that with the first row."""
        return sorted(self._found.values(), key=lambda each: (-each.rows, each.examples))[:most]

    def told(self, most: int) -> list[dict[str, Any]]:
        return [{"reason": each.text, "rows": each.rows, "examples": each.examples} for each in self.commonest(most)]


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
