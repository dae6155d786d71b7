"""Counts rows, tokens and errors of each part, and sums them up for the manifest."""

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from math import fsum, inf
from typing import Any, NamedTuple, Self

#: Fields of PartStats that are summed up over the parts while a run goes on.
COUNTED = (
    "rows",
    "errors",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "generated_tokens",
    "failed_checks",
    "cut",
    "rows_reused",
    "rows_escalated",
    "expired",
)

#: Fields of PartStats whose sums are in the manifest.
IN_MANIFEST = (*COUNTED, "rows_resumed", "tokens_resumed")


@dataclass(frozen=True)
class PartStats:
    """Counts of one part.

    prompt_tokens, completion_tokens, cached_tokens: sums of the output's columns with these names.
    generated_tokens: tokens that were computed by the execution that wrote the part. Equal prompts count once.
    rows_resumed, tokens_resumed: the rows and tokens that earlier executions of the shard had computed.
    started_at, ended_at: Unix seconds. waited_s: the seconds from the shard's opening to its first request.
    failed_checks: rows without an error whose answer fails its check.
    cut: rows without an error whose answer ended at its limit of tokens.
    expired: rows with an error because they were not begun before the run's deadline.
    prompt_lengths, completion_lengths: in tokens, as count_lengths returns them.
    finish_reasons, labels: how many answers have each finish reason or label. Rows with an error do not count, and only
    the commonest labels are kept.
    left_out: how many lines of a batch file have an argument but were answered without it, by the argument.
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
    expired: int = 0
    waited_s: float = 0.0
    commit: str = ""
    finish_reasons: dict[str, int] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Return how many seconds the part took."""
        return max(0.0, self.ended_at - self.started_at)

    def to_text(self) -> str:
        """Return the statistics as JSON."""
        return json.dumps(asdict(self))

    def to_record(self) -> str:
        """Return the JSON that Redis keeps. It is short, because it is read for every part when a run is shown."""
        short = replace(
            self,
            prompt_lengths={},
            completion_lengths={},
            finish_reasons={},
            labels={},
            left_out={},
        )
        return short.to_text()

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Read a text that `to_text` or `to_record` wrote, in this version or another one. Raises ValueError."""
        content = json.loads(text)
        values = {}
        for known_field in fields(cls):
            if known_field.name in content:
                values[known_field.name] = content[known_field.name]
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(str(error)) from None


def outcome_text(errors: int, failed_checks: int, cut: int, noun: str = "") -> str:
    """Return a text that says how many rows have no good answer, and why.

    noun: text after the first number, with a blank at its end, such as "rows ".
    """
    texts = [f"{errors} {noun}with an error"]
    if failed_checks:
        texts.append(f"{failed_checks} failed their check")
    if cut:
        texts.append(f"{cut} cut at their limit of tokens")
    return ", ".join(texts)


#: The reason of rows without an error whose answer ended at its limit of tokens. Lists of errors may have these rows.
CUT = "the answer was cut at its limit of tokens"

MAX_REASON_CHARS = 200
#: The most kinds of reasons that are counted one by one. Rows of all further kinds are counted together.
MAX_KINDS = 1000
OTHERS = "other reasons"

MAX_EXAMPLES = 3


@dataclass
class Reason:
    """Rows whose errors have the same text, apart from numbers in it.

    text: the first row's error. rows: how many rows have such an error. examples: the numbers of the first of these
    rows, counted over the whole input.
    """

    text: str
    rows: int = 0
    examples: list[int] = field(default_factory=list)


class Reasons:
    """Counts rows by the reason of their error. Texts that differ only in numbers are one reason."""

    def __init__(self) -> None:
        #: The reasons, by their texts with each number replaced by 0.
        self._by_kind: dict[str, Reason] = {}

    @property
    def rows(self) -> int:
        """Return the number of rows with any reason."""
        return sum(reason.rows for reason in self._by_kind.values())

    def rows_with(self, text: str) -> int:
        """Return the number of rows with a reason. text: the reason, with each number replaced by 0."""
        reason = self._by_kind.get(text)
        return 0 if reason is None else reason.rows

    def add(self, text: str, rows: Sequence[int], count: int | None = None) -> None:
        """Count rows that have the same reason. text: the reason.

        rows: ascending row numbers. count: the number of rows, if `rows` has only some of them.
        """
        text = text[:MAX_REASON_CHARS]
        kind = re.sub(r"\d+", "0", text)
        if kind not in self._by_kind and len(self._by_kind) >= MAX_KINDS:
            kind = OTHERS
            text = OTHERS
        reason = self._by_kind.setdefault(kind, Reason(text))
        if rows and reason.examples and rows[0] < reason.examples[0]:
            reason.text = text  # the error of the first row is the one that is shown
        reason.rows += len(rows) if count is None else count
        examples = [*reason.examples, *rows[:MAX_EXAMPLES]]
        examples.sort()
        reason.examples = examples[:MAX_EXAMPLES]

    def commonest(self, most: int) -> list[Reason]:
        """Return at most `most` reasons, the commonest first. Equally common reasons are ordered by their first row."""
        ordered = sorted(self._by_kind.values(), key=lambda reason: (-reason.rows, reason.examples))
        return ordered[:most]

    def to_objects(self, most: int) -> list[dict[str, Any]]:
        """Return at most `most` reasons as JSON, the commonest first."""
        objects = []
        for reason in self.commonest(most):
            objects.append(
                {"reason": reason.text, "rows": reason.rows, "examples": reason.examples}
            )
        return objects


def _bounds() -> tuple[int, ...]:
    """Return the upper bounds of the ranges in which lengths are counted: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on."""
    bounds = [0, 1, 2, 3]
    for power in range(1, 30):
        bounds += [2 << power, 3 << power]
    return tuple(bounds)


BOUNDS = _bounds()


def count_lengths(lengths: Iterable[int]) -> dict[str, int]:
    """Count lengths by the range that they fall into. The keys are the ranges' upper bounds, from BOUNDS, as texts."""
    counts: Counter[int] = Counter()
    last_range = len(BOUNDS) - 1  # counts all longer lengths too
    for length in lengths:
        range_index = min(bisect_left(BOUNDS, length), last_range)
        counts[BOUNDS[range_index]] += 1
    return {str(bound): counts[bound] for bound in sorted(counts)}


#: The most bins of the time line in a manifest.
MAX_BINS = 120
#: The most workers, reasons and labels that a manifest names.
MAX_WORKERS = 200
MAX_REASONS = 20
MAX_LABELS = 100
#: The most labels that the statistics of a part name.
MAX_PART_LABELS = 1000


def _total_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the sum of the spans' seconds. Spans must not overlap. A span is a start and an end in Unix seconds."""
    return fsum(end - start for start, end in spans)


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the spans in order. Spans that overlap or touch are merged into one."""
    merged: list[tuple[float, float]] = []
    latest_end = -inf
    for start, end in sorted(spans):
        if start > latest_end:
            # A clock that was set back may put an end before its start.
            latest_end = max(start, end)
            merged.append((start, latest_end))
        else:
            latest_end = max(latest_end, end)
            last_start, _ = merged.pop()
            merged.append((last_start, latest_end))
    return merged


class _Part(NamedTuple):
    """The values of a part that the statistics need.

    start, end: when a worker began and ended the part, in Unix seconds. tokens: how many tokens were generated.
    """

    worker: str
    start: float
    end: float
    rows: int
    errors: int
    tokens: int


def _busy_times(parts: Iterable[_Part]) -> list[tuple[float, float]]:
    """Return the spans of time in which at least one of the parts was made, in order. A span is a start and an end."""
    return _merged((part.start, part.end) for part in parts)


class RunStatistics:
    """Adds up the statistics of a run's parts for its manifest."""

    def __init__(self) -> None:
        self._parts_by_worker: dict[str, list[_Part]] = {}
        self._prompt_lengths: Counter[int] = Counter()
        self._completion_lengths: Counter[int] = Counter()
        self._finish_reasons: Counter[str] = Counter()
        self._labels: Counter[str] = Counter()
        self._lines_by_left_out_argument: Counter[str] = Counter()

    def add(self, part: PartStats) -> None:
        """Add one part."""
        added = _Part(
            worker=part.worker,
            start=part.started_at,
            end=part.ended_at,
            rows=part.rows,
            errors=part.errors,
            tokens=part.generated_tokens,
        )
        parts_of_worker = self._parts_by_worker.setdefault(part.worker, [])
        parts_of_worker.append(added)
        for bound, count in part.prompt_lengths.items():
            self._prompt_lengths[int(bound)] += count
        for bound, count in part.completion_lengths.items():
            self._completion_lengths[int(bound)] += count
        self._finish_reasons.update(part.finish_reasons)
        self._labels.update(part.labels)
        self._lines_by_left_out_argument.update(part.left_out)

    def to_object(self, reasons: Reasons) -> dict[str, Any]:
        """Return the statistics in the manifest's form. Times in which no worker had a shard do not count."""
        all_parts: list[_Part] = []
        workers: list[dict[str, Any]] = []
        for name, parts in self._parts_by_worker.items():
            all_parts += parts
            workers.append(_worker_object(name, parts))

        workers_by_rows = sorted(workers, key=lambda worker: -worker["rows"])
        busy = _busy_times(all_parts)
        return {
            "working_seconds": _total_s(busy),
            "timeline": _timeline(all_parts, busy),
            "prompt_lengths": _by_bound(self._prompt_lengths),
            "completion_lengths": _by_bound(self._completion_lengths),
            "finish_reasons": dict(self._finish_reasons.most_common()),
            "labels": dict(self._labels.most_common(MAX_LABELS)),
            "left_out": dict(self._lines_by_left_out_argument.most_common(MAX_LABELS)),
            "workers": workers_by_rows[:MAX_WORKERS],
            "num_workers": len(workers),
            "worker_seconds": sum(worker["seconds"] for worker in workers),
            "reasons": reasons.to_objects(MAX_REASONS),
        }


def _worker_object(name: str, parts: Sequence[_Part]) -> dict[str, Any]:
    """Return the statistics of one worker in the manifest's form. parts: the worker's parts."""
    return {
        "name": name,
        "rows": sum(part.rows for part in parts),
        "errors": sum(part.errors for part in parts),
        "generated_tokens": sum(part.tokens for part in parts),
        "seconds": _total_s(_busy_times(parts)),
    }


def _by_bound(counts: Counter[int]) -> dict[str, int]:
    """Return counts of lengths in the manifest's form. counts: the count of each range, by the range's upper bound."""
    return {str(bound): counts[bound] for bound in sorted(counts)}


def _timeline(parts: Sequence[_Part], busy: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Divide the busy times into bins of equal length; return a bin's length in seconds, and the tokens of each bin.

    busy: the times in which workers had shards (see `_busy_times`). Each part lies within one of them.
    """
    busy_starts = [start for start, _ in busy]
    # worked_before[i]: the working seconds before busy time i. The last element is the sum of all working seconds.
    worked_before = [0.0, *accumulate(end - start for start, end in busy)]
    num_bins = min(MAX_BINS, 3 * len(parts))
    all_working_s = worked_before[-1]
    bin_s = all_working_s / max(1, num_bins)
    if bin_s <= 0:  # there are no parts, or they took no time
        all_tokens = sum(part.tokens for part in parts)
        return {"bin_s": 0.0, "tokens": [all_tokens] if parts else []}

    tokens = [0.0] * num_bins
    for part in parts:
        # `began` and `ended` are in working seconds, so that idle times do not count.
        busy_index = bisect_right(busy_starts, part.start) - 1
        since_busy_start = part.start - busy_starts[busy_index]
        began = worked_before[busy_index] + since_busy_start
        ended = began + max(0.0, part.end - part.start)
        _spread(part.tokens, began, ended, tokens, bin_s)
    return {"bin_s": bin_s, "tokens": [round(count, 1) for count in tokens]}


def _spread(num_tokens: int, began: float, ended: float, bins: list[float], bin_s: float) -> None:
    """Add a part's tokens to the bins, as if they were generated evenly from `began` to `ended`."""
    highest_bin = len(bins) - 1
    first_bin = min(highest_bin, int(began / bin_s))
    last_bin = min(highest_bin, int(ended / bin_s))
    if first_bin == last_bin:
        bins[first_bin] += num_tokens
        return
    for index in range(first_bin, last_bin + 1):
        bin_start = index * bin_s
        bin_end = bin_start + bin_s
        overlap_s = min(ended, bin_end) - max(began, bin_start)
        share = overlap_s / (ended - began)
        bins[index] += num_tokens * share
