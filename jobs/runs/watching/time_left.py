"""Estimates how much time a run has left, from the rows and bytes that are left and the rate of the latest work."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import exp, expm1, fsum
from typing import NamedTuple

from jobs.runs.statistics.run_statistics import PartStats

#: A worker that ended a shard less than this long ago counts as busy: it is about to begin another one.
LATELY_S = 2.0
#: While less time than this has been observed, nothing is estimated: first rows wait for caches and a first prefill.
LEAST_S = 10.0


@dataclass(frozen=True)
class Progress:
    """The progress that a shard's job reports.

    shard_rows: the number of the shard's rows. rows: how many of them are answered. rows_open: how many are being
    answered.
    tokens: all tokens that were generated. tokens_open: the tokens that were generated for rows being answered.
    reported_at: when the job reported this, in Unix seconds; None before its first report.
    has_job: whether Redis has the job.
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

    shards: the shards that have a part.
    latest: the statistics of the parts that were written last, by shard. counts: totals of all parts.
    """

    shards: Collection[int]
    latest: Mapping[int, PartStats]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Span:
    """Work that a worker did on a shard between two moments.

    began_at, ended_at: Unix seconds. For a shard that is under way, ended_at is the time of its last report.
    work: how much work was done, in the same unit as the shards' shares of the run's work.
    """

    worker: str
    began_at: float
    ended_at: float
    work: float
    is_under_way: bool = False


def time_left(
    shares_text: str | bytes | None,
    num_shards: int | None,
    num_rows: int | None,
    parts: PartsDone,
    running: Mapping[int, Progress],
    now: float,
) -> float | None:
    """Return the seconds until a run ends; None if they cannot be estimated.

    shares_text: a JSON list of each shard's share of the run's work, as Redis keeps it.
    num_shards, num_rows: the numbers of the run's shards and rows. running: the shards under way. now: Unix seconds.
    """
    if not num_shards or num_rows is None:
        return None
    shares = json.loads(shares_text or "[]")  # by shard
    if len(shares) < num_shards:
        shares = [1] * num_shards  # as if all shards were equal

    # Equal rows are answered once, so only rows with a new text take time.
    new_text_shares = _new_text_shares(
        rows=parts.counts["rows"], share=_generated_share(parts.counts), all_rows=num_rows
    )
    spans = _finished_work(parts.latest, shares)
    remaining_work = []  # of each unfinished shard
    for shard in range(num_shards):
        if shard not in parts.shards and shard not in running:
            remaining_work.append(shares[shard])
    tokens_of_row = _tokens_of_row(parts.counts, running.values())
    for shard, progress in running.items():
        if progress.started_at is None or shard >= num_shards:
            continue
        share_done = _share_done(progress, tokens_of_row)
        remaining_work.append(shares[shard] * (1 - share_done))
        # Only rows with a new text took time.
        generated_work = shares[shard] * share_done * new_text_shares.next_rows
        # The span ends with the last report, because nothing is known of the time after it. The report may be old, for
        # example while Redis is full.
        reported_at = max(progress.started_at, progress.reported_at or 0.0)
        span = Span(
            progress.worker, progress.started_at, reported_at, generated_work, is_under_way=True
        )
        spans.append(span)
    # Remaining rows whose text is not new take no time.
    work = fsum(remaining_work) * new_text_shares.remaining_rows
    return seconds_left(spans, work, now)


def _finished_work(latest: Mapping[int, PartStats], shares: Sequence[int]) -> list[Span]:
    """Return the work that was done on finished shards. shares: each shard's share of the run's work."""
    spans = []
    for shard, part in latest.items():
        if shard < len(shares):  # Redis may have a record of a shard that the run does not have
            generated_work = shares[shard] * _generated_share(vars(part))
            began_at = part.started_at + part.waited_s  # the time of the first request
            spans.append(Span(part.worker, began_at, part.ended_at, generated_work))
    return spans


def seconds_left(spans: Sequence[Span], work: float, now: float) -> float | None:
    """Return how many seconds the busy workers take for `work`, at their latest rate.

    spans: the work that was done so far. now: Unix seconds.
    Returns 0 if no work is left. Otherwise, returns None if no worker is busy, or if too little has been observed.
    """
    if work <= 0:
        return 0.0
    if not spans:
        return None
    began_at = min(span.began_at for span in spans)
    known_until = max(span.ended_at for span in spans)
    half_time = (began_at + known_until) / 2
    rate_per_worker = _rate(spans, since=half_time)
    if rate_per_worker == 0:  # nothing was done in the second half of the time
        rate_per_worker = _rate(spans, since=began_at)

    busy_workers = set()
    for span in spans:
        if span.is_under_way or now - span.ended_at < LATELY_S:
            busy_workers.add(span.worker)
    observed_s = known_until - began_at
    if rate_per_worker <= 0 or not busy_workers or observed_s < LEAST_S:
        return None
    return work / rate_per_worker / len(busy_workers)


def _rate(spans: Sequence[Span], since: float) -> float:
    """Return the work that one worker does in a second while it has shards; 0 if no work was done.

    since: only work after this time counts, in Unix seconds.
    """
    work = 0.0
    busy_s = 0.0
    busy_until: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: span.began_at):
        began_at = max(since, span.began_at)
        ended_at = max(since, span.ended_at)
        lasted_s = span.ended_at - span.began_at
        if lasted_s > 0:
            work += span.work * max(0.0, ended_at - began_at) / lasted_s

        # A worker may have several shards at once. Time in which their spans overlap counts once.
        count_from = max(began_at, busy_until.get(span.worker, began_at))
        busy_s += max(0.0, ended_at - count_from)
        busy_until[span.worker] = max(ended_at, count_from)
    return work / busy_s if busy_s > 0 else 0.0


class _NewTextShares(NamedTuple):
    """The estimated shares of rows whose text is new: among the next few rows, and among all remaining rows."""

    next_rows: float
    remaining_rows: float


def _new_text_shares(rows: int, share: float, all_rows: int) -> _NewTextShares:
    """Estimate the shares of new texts among the rows that are still to come.

    rows: the number of rows so far. share: the share of these rows whose text was new. all_rows: the run's rows.
    The estimate assumes that the text of each row is drawn at random from n texts. Then `rows` rows hold
    n * (1 - exp(-rows / n)) different texts. They are known to hold rows * share different texts. n follows from this.
    """
    is_partly_done = 0 < rows < all_rows
    if share >= 1 or not is_partly_done:
        return _NewTextShares(1.0, 1.0)

    # Both expressions for the number of different texts are equal. Divided by n, and with x for rows / n, they give
    # 1 - exp(-x) = share * x. Find x by bisection.
    low = 0.0
    high = 1 / max(share, 1e-9)
    for _ in range(60):
        middle = (low + high) / 2
        if -expm1(-middle) > share * middle:
            low = middle
        else:
            high = middle

    rows_per_text = low  # x, which is rows / n
    next_share = exp(-rows_per_text)
    remaining_rows = all_rows - rows
    remaining_per_text = rows_per_text * remaining_rows / rows  # remaining_rows / n
    if remaining_per_text <= 0:
        return _NewTextShares(next_share, 1.0)
    # The remaining rows hold n * exp(-rows / n) * (1 - exp(-remaining_rows / n)) new texts.
    remaining_share = next_share * -expm1(-remaining_per_text) / remaining_per_text
    return _NewTextShares(next_share, remaining_share)


def _tokens_of_row(counts: Mapping[str, int], running: Collection[Progress]) -> float:
    """Return the mean number of tokens generated for an answered row; 0 if no row was answered."""
    rows = counts["rows"]
    tokens = counts["generated_tokens"]
    for progress in running:
        rows += progress.rows
        tokens += progress.tokens - progress.tokens_open
    return tokens / max(1, rows)


def _share_done(progress: Progress, tokens_of_row: float) -> float:
    """Return the share of a running shard's work that is done. tokens_of_row: see `_tokens_of_row`."""
    rows_done = progress.rows + _open_rows_done(progress, tokens_of_row)
    return min(1.0, rows_done / max(1, progress.shard_rows))


def _open_rows_done(progress: Progress, tokens_of_row: float) -> float:
    """Return the work done on rows that are being answered, as a number of rows.

    This work counts because rows of equal length end together. If only whole rows counted, the shard would seem to do
    nothing until then.
    """
    if tokens_of_row == 0:
        return 0.0
    return min(progress.rows_open, progress.tokens_open / tokens_of_row)


def _generated_share(counts: Mapping[str, int]) -> float:
    """Return the share of the answers' tokens that was generated. The other tokens were copied from equal rows."""
    tokens = counts["completion_tokens"]
    if tokens == 0:
        return 1.0
    return min(1.0, counts["generated_tokens"] / tokens)
