"""Estimates how long a run goes on, from the rows and bytes that are left and the rate of the latest work."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import exp, expm1, fsum

from jobs.runs.statistics.run_statistics import PartStats

#: A worker that ended a shard less than this long ago counts as busy: it is about to begin another one.
LATELY_S = 2.0
#: While less time than this has been observed, nothing is estimated: first rows wait for caches and a first prefill.
LEAST_S = 10.0


@dataclass(frozen=True)
class Progress:
    """The progress that a shard's job reports.

    rows: how many of shard_rows are answered. tokens: the generated tokens. rows_open: the rows that are being
    answered. tokens_open: the tokens that were generated for the open rows so far. reported_at: when the job reported
    this, in Unix seconds; None before its first report. has_job: whether Redis has the job.
    """

    rows: int = 0
    tokens: int = 0
    rows_open: int = 0
    tokens_open: int = 0
    shard_rows: int = 0
    started_at: float | None = None
    reported_at: float | None = None
    worker: str = ""
    has_job: bool = True


@dataclass(frozen=True)
class PartsDone:
    """The parts of a run that are done.

    shards: the shards that have a part. latest: the statistics of the shards done last. counts: totals of all parts.
    """

    shards: Collection[int]
    latest: Mapping[int, PartStats]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Span:
    """Work that a worker did on a shard between two moments, in Unix seconds.

    ended_at: the time of the last report, if the shard is under way. work: in shares of the run.
    """

    worker: str
    began_at: float
    ended_at: float
    work: float
    is_under_way: bool = False


def time_left(
    shares_text: str | bytes | None,
    shards: int | None,
    rows: int | None,
    parts: PartsDone,
    running: Mapping[int, Progress],
    now: float,
) -> float | None:
    """Return the seconds that a run goes on; None if that is unknown.

    shares_text: each shard's share of the run, as Redis keeps it. running: the shards under way.
    """
    if not shards or rows is None:
        return None
    work_of = json.loads(shares_text or "[]")  # by shard
    if len(work_of) < shards:
        work_of = [1] * shards  # as if all shards were equal

    spans = []
    for shard, part in parts.latest.items():
        if shard < shards:
            generated_work = work_of[shard] * _generated_share(vars(part))
            began_at = part.started_at + part.waited_s
            spans.append(Span(part.worker, began_at, part.ended_at, generated_work))

    # Equal rows are answered once, so only rows with a new text take time.
    share_so_far = _generated_share(parts.counts)
    new_now, new_later = _new_shares(parts.counts["rows"], share_so_far, rows)
    remaining = []
    for shard in range(shards):
        if shard not in parts.shards and shard not in running:
            remaining.append(work_of[shard])
    tokens_of_row = _tokens_of_row(parts.counts, running.values())
    for shard, progress in running.items():
        if progress.started_at is not None and shard < shards:
            rows_done = progress.rows + _open_rows_done(progress, tokens_of_row)
            share_done = min(1.0, rows_done / max(1, progress.shard_rows))
            generated_work = work_of[shard] * share_done * new_now
            # Without news, for example while Redis is full, nothing is known of the time since the last report.
            reported_at = max(progress.started_at, progress.reported_at or 0.0)
            spans.append(
                Span(progress.worker, progress.started_at, reported_at, generated_work, True)
            )
            remaining.append(work_of[shard] * (1 - share_done))
    return seconds_left(spans, fsum(remaining) * new_later, now)


def seconds_left(spans: Sequence[Span], work: float, now: float) -> float | None:
    """Return how many seconds the busy workers take for `work`, at their latest rate.

    Returns None if no worker is busy, or if too little has been observed.
    """
    began_at = min((span.began_at for span in spans), default=now)
    known_until = max((span.ended_at for span in spans), default=now)
    half_time = (began_at + known_until) / 2
    rate = _rate(spans, since=half_time)
    if rate == 0:  # nothing was done in the last half of the time
        rate = _rate(spans, since=began_at)
    workers = {span.worker for span in spans if span.is_under_way or now - span.ended_at < LATELY_S}
    if rate > 0 and workers and known_until - began_at >= LEAST_S:
        return work / rate / len(workers)
    return 0.0 if work <= 0 else None


def _rate(spans: Sequence[Span], since: float) -> float:
    """Return the work that one worker does in a second while it has shards; 0 if no work was done."""
    work = 0.0
    busy_s = 0.0
    busy_until: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: span.began_at):
        began_at = max(since, span.began_at)
        ended_at = max(since, span.ended_at)
        lasted_s = span.ended_at - span.began_at
        if lasted_s > 0:
            work += span.work * max(0.0, ended_at - began_at) / lasted_s

        # A worker may have several shards at once. The time that they share counts once.
        counted_until = max(began_at, busy_until.get(span.worker, began_at))
        busy_s += max(0.0, ended_at - counted_until)
        busy_until[span.worker] = max(ended_at, counted_until)
    return work / busy_s if busy_s > 0 else 0.0


def _new_shares(rows: int, share: float, all_rows: int) -> tuple[float, float]:
    """Return the share of rows with a new text, among the next rows and among all remaining rows.

    Equal texts are computed once. If rows are drawn from n texts, x rows hold n * (1 - exp(-x / n)) different texts.
    n is chosen so that the `rows` so far, of `all_rows`, hold `share` * `rows` different texts.
    """
    if share >= 1 or not 0 < rows < all_rows:
        return 1.0, 1.0

    # Bisect for x = rows / n, at which 1 - exp(-x) = share * x.
    low = 0.0
    high = 1 / max(share, 1e-9)
    for _ in range(60):
        middle = (low + high) / 2
        if -expm1(-middle) > share * middle:
            low = middle
        else:
            high = middle

    rows_per_text = low
    new_now = exp(-rows_per_text)
    remaining_per_text = rows_per_text * (all_rows - rows) / rows
    if remaining_per_text <= 0:
        return new_now, 1.0
    # The remaining rows hold n * exp(-rows / n) * (1 - exp(-remaining / n)) new texts.
    new_later = new_now * -expm1(-remaining_per_text) / remaining_per_text
    return new_now, new_later


def _tokens_of_row(counts: Mapping[str, int], running: Collection[Progress]) -> float:
    """Return the mean of the tokens generated for an answered row; 0 if none was answered."""
    rows = counts["rows"] + sum(progress.rows for progress in running)
    tokens = counts["generated_tokens"]
    tokens += sum(progress.tokens - progress.tokens_open for progress in running)
    return tokens / max(1, rows)


def _open_rows_done(progress: Progress, tokens_of_row: float) -> float:
    """Return the work done on rows that are being answered, as a number of rows.

    Without this work, rows of equal length would end together, and nothing would seem to be done in between.
    """
    if tokens_of_row == 0:
        return 0.0
    return min(progress.rows_open, progress.tokens_open / tokens_of_row)


def _generated_share(counts: Mapping[str, int]) -> float:
    """Return the share of the answers' tokens that was generated, and not copied from an equal row."""
    tokens = counts["completion_tokens"]
    if tokens == 0:
        return 1.0
    return min(1.0, counts["generated_tokens"] / tokens)
