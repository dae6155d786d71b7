"""The runs that Redis knows: a line for each, in few round trips however many there are, and one in detail.

Counts of a list come from totals beside the parts (runs/totals.py), those of one run from its parts.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from jobs.common import stored
from jobs.common.display import MAX_TEXT_CHARS, safe_name
from jobs.common.keys import run_key, run_parts_key
from jobs.common.rq_jobs import JobStatus, job_key, job_status
from jobs.errors import UnknownRun
from jobs.runs.plans.names import plan_job_id, shard_job_id
from jobs.runs.redis_state.recorded_parts import recorded_reasons
from jobs.runs.redis_state.run_index import newest_runs
from jobs.runs.redis_state.state import PLAN_ERROR, RunState
from jobs.runs.redis_state.totals import FIELDS, Totals
from jobs.runs.statistics.part_stats import COUNTED
from jobs.runs.statistics.reasons import Reason
from jobs.runs.watching.snapshot import (
    RunQueue,
    RunSnapshot,
    awaited_model,
    read_planned,
    read_progress,
    read_queue,
    read_snapshot,
    shards_of,
    too_many_errors,
)

if TYPE_CHECKING:
    from redis import Redis

#: The words of `RunSummary.state`.
STATES = ("planning", "not planned", "running", "ending", "finished", "failed", "cancelled", "stopped")

#: Runs that are listed, unless told otherwise.
MAX_RUNS = 200

#: Kinds of errors that are told of a run.
MAX_REASONS = 20

#: Entries that are read of a queue's registry of running or failed jobs.
MAX_ENTRIES = 20_000

#: What a summary has of a snapshot, and of its counts, as it is there.
_SAME = (
    *("run", "state", "output", "rows", "rows_done", "shards", "tokens", "stopped", "workers"),
    *("awaited_model", "plan_error"),
)
_SAME_COUNTS = ("errors", "failed_checks", "cut", "prompt_tokens", "completion_tokens", "cached_tokens")

_FACTS = (
    *("output", "queue", "plan_job", "plan_model", "rows", "shards", "model", "model_text", "max_errors"),
    *("cancelled", "finished", "stopped", "submission", "cancelled_submission", PLAN_ERROR),
    *FIELDS,
)


@dataclass(frozen=True)
class RunSummary:
    """A run as a list shows it.

    state: one of STATES. Texts are as they may be shown. submitted_at, began_at, ended_at: Unix seconds, of
    the last submission, of the beginning of work on it, and of its last part. model, rows, shards: None
    before the run is planned. rows_done, tokens: running shards included; tokens are those generated, the
    other counts of tokens the output's columns in finished shards. errors, failed_checks, cut: rows there
    with an error, that failed their check, or ended at their limit of tokens. shards_failed: 0 of a run that
    is cancelled or stopped. rows_per_s, tokens_per_s: since began_at, of a finished run over worked_s; None
    where nothing can be told. worked_s: for how long workers had shards of a finished run, of all
    submissions. workers: how many listen on its queue. awaited_model: its model, where none of them serves
    it. left_s: seconds until it ends, only of a run that is read by itself.
    """

    run: str
    state: str
    output: str
    queue: str
    model: str | None = None
    submitted_at: float | None = None
    began_at: float | None = None
    ended_at: float | None = None
    rows: int | None = None
    rows_done: int = 0
    errors: int = 0
    failed_checks: int = 0
    cut: int = 0
    shards: int | None = None
    shards_done: int = 0
    shards_started: int = 0
    shards_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    rows_per_s: float | None = None
    tokens_per_s: float | None = None
    worked_s: float | None = None
    stopped: str | None = None
    workers: int = 0
    awaited_model: str | None = None
    left_s: float | None = None
    plan_error: str | None = None

    @property
    def is_active(self) -> bool:
        """Whether it moves on, or waits to."""
        return self.state in ("planning", "running", "ending")

    @property
    def shards_left(self) -> int:
        """Those that nobody computes until the run is submitted again."""
        if self.state not in ("cancelled", "stopped"):
            return 0
        return max(0, (self.shards or 0) - self.shards_done - self.shards_started)

    def to_object(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


@dataclass(frozen=True)
class RunDetail:
    """One run.

    summary: counted from its parts. reasons: why rows have an error, the commonest first, at most
    MAX_REASONS kinds; texts as they may be shown.
    """

    summary: RunSummary
    snapshot: RunSnapshot
    reasons: tuple[Reason, ...]

    def to_object(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        reasons = [asdict(reason) for reason in self.reasons]
        return {**self.summary.to_object(), "reasons": reasons, "failed_jobs": self.snapshot.failures}


@dataclass(frozen=True)
class ShardSeen:
    """A shard of a run. worker: which answers it now, or did.

    state: "done", "running", "failed", "queued", "gone" without a job in Redis, or "left" by a stopped run.
    Of a running one rows_done and tokens are those so far; rows are None where its part is not there yet.
    """

    shard: int
    state: str
    rows: int | None = None
    rows_done: int = 0
    errors: int = 0
    tokens: int = 0
    seconds: float | None = None
    worker: str = ""


def list_runs(connection: Redis, limit: int = MAX_RUNS, states: Collection[str] = ()) -> list[RunSummary]:
    """Return the runs that were submitted last, at most `limit`, the last one first.

    states: only those among them. Raises RedisError.
    """
    listed = newest_runs(connection, limit)
    read = _read_facts(connection, listed)
    busy = {facts["queue"] for facts, *_ in read.values() if "finished" not in facts}
    queues = {
        name: read_queue(connection, name, MAX_ENTRIES if name in busy else 1)
        for name in {facts["queue"] for facts, *_ in read.values()}
    }
    running = {
        run: set() if "finished" in facts else shards_of(run, queues[facts["queue"]].started)
        for run, (facts, *_) in read.items()
    }
    progress = _progress(connection, running)
    found = []
    for run, (facts, done, status) in read.items():
        queue = queues[facts["queue"]]
        snapshot = _snapshot(run, facts, done, queue, running[run], progress[run], status)
        if snapshot.state == "running" and not running[run] and snapshot.queued > queue.length:
            with suppress(UnknownRun):  # jobs of it are held by a worker, or gone
                snapshot = read_snapshot(connection, run)
        found.append(_summary(snapshot, facts, listed[run]))
    return [each for each in found if not states or each.state in states]


def read_run(connection: Redis, run: str) -> RunDetail:
    """Return one run, counted from its parts, or the one that was planned for it.

    Raises UnknownRun or RedisError.
    """
    snapshot = read_planned(connection, run)
    facts = RunState(connection, snapshot.run).facts()
    found = recorded_reasons(connection, snapshot.run).commonest(MAX_REASONS)
    reasons = tuple(replace(each, text=safe_name(each.text, MAX_TEXT_CHARS)) for each in found)
    return RunDetail(_summary(snapshot, facts, None), snapshot, reasons)


def list_shards(connection: Redis, run: str, first: int = 0, count: int = 100) -> list[ShardSeen]:
    """Return shards of a planned run by number. Raises UnknownRun or RedisError."""
    state = RunState(connection, run)
    facts = state.facts()
    is_cancelled = "cancelled" in facts and "finished" not in facts
    numbers = range(first, min(first + count, stored.count(facts.get("shards")) or 0))
    parts = state.parts_of(numbers)
    queue = read_queue(connection, facts["queue"], MAX_ENTRIES)
    started, failed = shards_of(run, queue.started), shards_of(run, queue.failed)
    ids = [shard_job_id(run, shard) for shard in numbers]
    with connection.pipeline(transaction=False) as pipe:
        for job_id in ids:
            pipe.hmget(job_key(job_id), "worker_name", "status")
        seen = pipe.execute()
    progress = read_progress(connection, ids)
    found = []
    for shard, (name, status), each in zip(numbers, seen, progress, strict=True):
        worker = safe_name(name or b"")
        if (part := parts.get(shard)) is not None:
            seconds = part.seconds
            counts = (part.rows, part.rows, part.errors, part.generated_tokens, seconds)
            found.append(ShardSeen(shard, "done", *counts, worker))
        elif shard in started:
            found.append(ShardSeen(shard, "running", None, each.rows, 0, each.tokens, None, worker))
        elif is_cancelled:
            found.append(ShardSeen(shard, "left", worker=worker))
        else:
            word = "failed" if shard in failed else "gone" if status is None else "queued"
            found.append(ShardSeen(shard, word, worker=worker))
    return found


def _read_facts(connection: Redis, runs: Iterable[str]) -> dict[str, tuple[dict[str, str], int, JobStatus | None]]:
    """Return for each run the fields that are looked at, its recorded parts, and its planning's status.

    Runs of which nothing is left but their place in the index are left out.
    """
    names = list(runs)
    with connection.pipeline(transaction=False) as pipe:
        for run in names:
            pipe.hmget(run_key(run), _FACTS)
            pipe.hlen(run_parts_key(run))
            pipe.hexists(run_parts_key(run), "total")
            pipe.hget(job_key(plan_job_id(run)), "status")
        replies = pipe.execute()
    found = {}
    for run, values, length, has_total, status in zip(names, *(replies[i::4] for i in range(4)), strict=True):
        told = zip(_FACTS, values, strict=True)
        facts = {name: stored.text(value) for name, value in told if value is not None}
        if facts.keys() >= {"output", "queue"}:
            found[run] = facts, length - has_total, job_status(status)
    return found


def _progress(connection: Redis, running: Mapping[str, Collection[int]]) -> dict[str, tuple[int, int]]:
    """Return rows and tokens of each run's running shards."""
    ids = [shard_job_id(run, shard) for run, shards in running.items() for shard in shards]
    found = dict.fromkeys(running, (0, 0))
    for job_id, each in zip(ids, read_progress(connection, ids), strict=True):
        run = job_id.rpartition("-")[0]
        found[run] = found[run][0] + each.rows, found[run][1] + each.tokens
    return found


def _snapshot(
    run: str,
    facts: Mapping[str, str],
    done: int,
    queue: RunQueue,
    running: Collection[int],
    progress: tuple[int, int],
    status: JobStatus | None,
) -> RunSnapshot:
    """Return a run as its totals tell. progress: rows and tokens of running shards."""
    counts = {name: stored.count(facts.get(f"total_{name}")) or 0 for name in COUNTED}
    rows, rows_done = stored.count(facts.get("rows")), counts["rows"] + progress[0]
    failed = () if "finished" in facts else sorted(shards_of(run, queue.failed) - set(running))
    return RunSnapshot(
        run=run,
        output=safe_name(facts["output"], MAX_TEXT_CHARS),
        queue=facts["queue"],
        cancelled="cancelled" in facts,
        finished="finished" in facts,
        plan_job=facts.get("plan_job"),
        plan_status=status,
        rows=rows,
        shards=stored.count(facts.get("shards")),
        done=done,
        started=len(running),
        claimed=0,
        failed_jobs=tuple(shard_job_id(run, shard) for shard in failed),
        rows_done=rows_done if rows is None else min(rows_done, rows),
        errors=counts["errors"],
        tokens=counts["generated_tokens"] + progress[1],
        workers=queue.workers,
        queue_length=queue.length,
        awaited_model=awaited_model(facts, status, queue.models),
        stopped=safe_name(facts["stopped"], MAX_TEXT_CHARS) if "stopped" in facts else None,
        too_many_errors=too_many_errors(facts, counts["rows"], counts["errors"]),
        plan_error=safe_name(facts[PLAN_ERROR], MAX_TEXT_CHARS) if PLAN_ERROR in facts else None,
        counts=counts,
    )


def _summary(snapshot: RunSnapshot, facts: Mapping[str, str], planned_at: float | None) -> RunSummary:
    """planned_at: stands for when it was submitted, where its facts do not tell."""
    counts, totals = snapshot.counts, Totals.read(facts)
    rows_per_s, tokens_per_s = _rates(
        totals,
        snapshot.finished,
        max(0, snapshot.rows_done - counts["rows"]),
        max(0, snapshot.tokens - counts["generated_tokens"]),
    )
    model = facts.get("model_text")
    same: dict[str, Any] = {name: getattr(snapshot, name) for name in _SAME}
    same |= {name: counts[name] for name in _SAME_COUNTS}
    return RunSummary(
        queue=safe_name(snapshot.queue),
        model=None if model is None else safe_name(model, MAX_TEXT_CHARS),
        # The last submission's number is when it came; the index has when it was planned, once it is.
        submitted_at=(stored.count(facts.get("submission")) or 0) / 1000 or planned_at,
        began_at=totals.began_at,
        ended_at=totals.ended_at,
        shards_done=snapshot.done,
        shards_started=snapshot.started,
        shards_failed=0 if snapshot.cancelled else len(snapshot.failures),
        rows_per_s=rows_per_s,
        tokens_per_s=tokens_per_s,
        worked_s=totals.worked_s if snapshot.finished else None,
        left_s=snapshot.left_s if snapshot.state == "running" else None,
        **same,
    )


def _rates(totals: Totals, is_finished: bool, rows: int, tokens: int) -> tuple[float | None, float | None]:
    """Return rows and tokens a second: since the first shard of the last submission began, of a finished run
    while workers had shards, of all submissions.

    rows, tokens: of running shards. The times are workers', so that clocks that differ tell nothing exact.
    """
    if is_finished and totals.worked_s:
        return totals.rows / totals.worked_s, totals.generated_tokens / totals.worked_s
    end = totals.ended_at if is_finished else time.time()
    if totals.began_at is None or end is None or end <= totals.began_at:
        return None, None
    seconds = end - totals.began_at
    return (totals.judged_rows + rows) / seconds, (totals.judged_tokens + tokens) / seconds
