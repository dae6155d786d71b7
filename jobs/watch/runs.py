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
from jobs.runs.plans.names import shard_job_id
from jobs.runs.redis_state.recorded_parts import recorded_reasons
from jobs.runs.redis_state.run_index import newest_runs
from jobs.runs.redis_state.state import PLAN_ERROR, RunState
from jobs.runs.redis_state.totals import FIELDS, Totals
from jobs.runs.statistics.reasons import Reason
from jobs.runs.watching.snapshot import (
    RunSnapshot,
    awaited_model,
    read_planned,
    read_progress,
    read_snapshot,
    shards_of,
    too_many_errors,
)
from jobs.watch.queues import NO_QUEUE, RunQueue, read_queues

if TYPE_CHECKING:
    from redis import Redis

#: The words of `RunSummary.state`.
STATES = ("planning", "not planned", "running", "ending", "finished", "failed", "cancelled", "stopped")

#: Runs that are listed, unless told otherwise.
MAX_RUNS = 200

#: Kinds of errors that are told of a run.
MAX_REASONS = 20

_FACTS = (
    *("output", "queue", "plan_job", "plan_model", "rows", "shards", "model", "model_text", "max_errors"),
    *("cancelled", "finished", "stopped", "submission", "cancelled_submission", PLAN_ERROR),
    *FIELDS,
)


@dataclass(frozen=True)
class RunSummary:
    """A run as a list shows it.

    state: one of STATES, or "damaged" where a key of it is of another type. output, model, stopped,
    awaited_model: as they may be shown; model is None before it is planned. submitted_at, began_at, ended_at:
    Unix seconds; of the last submission, of the beginning of work on it, and of its last part. rows, shards:
    None before the run is planned. rows_done, tokens: running shards included; tokens are those generated,
    the other counts of tokens the output's columns in finished shards. errors, failed_checks, cut: rows there
    with an error, that failed their check, or ended at their limit of tokens. plan_error: why planning
    failed, only where one run is read. shards_failed: none of a run that is cancelled or stopped.
    rows_per_s, tokens_per_s: since began_at, of a finished run over worked_s; None where nothing can be told.
    worked_s: for how long workers had shards of a finished run, of all submissions. stopped: why it was.
    workers: how many listen on its queue. awaited_model: its model, where none of them serves it.
    left_s: seconds until it ends; of a run that is read by itself, and None where nothing tells.
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
    def shards_queued(self) -> int:
        rest = (self.shards or 0) - self.shards_done - self.shards_started - self.shards_failed
        return max(0, rest - self.shards_left)

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
    queues = read_queues(
        connection,
        {facts["queue"] for facts, _ in read.values() if facts},
        {facts["queue"] for facts, _ in read.values() if _is_open(facts)},
    )
    statuses = _plan_statuses(connection, {run: facts for run, (facts, _) in read.items()})
    running = {
        run: shards_of(run, queues[facts["queue"]].started) if _is_open(facts) else set()
        for run, (facts, _) in read.items()
    }
    progress = _progress(connection, running)
    found = []
    for run, submitted_at in listed.items():
        if run not in read:
            continue
        facts, done = read[run]
        if not facts:
            found.append(RunSummary(run, "damaged", "", "", submitted_at=submitted_at))
            continue
        queue = queues.get(facts["queue"], NO_QUEUE)
        snapshot = _snapshot(run, facts, done, queue, running[run], statuses.get(run))
        if snapshot.state == "running" and not running[run] and snapshot.queued > queue.length:
            with suppress(UnknownRun):  # jobs of it are held by a worker, or gone
                snapshot = read_snapshot(connection, run)
        found.append(_summary(snapshot, facts, progress[run], _submitted_at(facts) or submitted_at))
    return [each for each in found if not states or each.state in states]


def read_run(connection: Redis, run: str) -> RunDetail:
    """Return one run, counted from its parts, or the one that was planned for it.

    Raises UnknownRun or RedisError.
    """
    snapshot = read_planned(connection, run)
    facts = RunState(connection, snapshot.run).facts()
    done = snapshot.counts
    summary = _summary(snapshot, facts, (0, 0), _submitted_at(facts))
    running = max(0, snapshot.rows_done - done["rows"])
    tokens = max(0, snapshot.tokens - done["generated_tokens"])
    rates = _rates(facts, running, tokens)
    summary = replace(
        summary,
        rows_done=snapshot.rows_done,
        errors=snapshot.errors,
        failed_checks=done["failed_checks"],
        cut=done["cut"],
        tokens=snapshot.tokens,
        prompt_tokens=done["prompt_tokens"],
        completion_tokens=done["completion_tokens"],
        cached_tokens=done["cached_tokens"],
        left_s=snapshot.left_s if snapshot.state == "running" else None,
        plan_error=snapshot.plan_error,
        rows_per_s=rates[0],
        tokens_per_s=rates[1],
    )
    found = recorded_reasons(connection, snapshot.run).commonest(MAX_REASONS)
    reasons = tuple(replace(each, text=safe_name(each.text, MAX_TEXT_CHARS)) for each in found)
    return RunDetail(summary, snapshot, reasons)


def list_shards(connection: Redis, run: str, first: int = 0, count: int = 100) -> list[ShardSeen]:
    """Return shards of a planned run by number. Raises UnknownRun or RedisError."""
    state = RunState(connection, run)
    facts = state.facts()
    is_cancelled = _is_open(facts) and "cancelled" in facts
    numbers = range(first, min(first + count, stored.count(facts.get("shards")) or 0))
    parts = state.parts_of(numbers)
    queue = read_queues(connection, {facts["queue"]}, {facts["queue"]})[facts["queue"]]
    started, failed = shards_of(run, queue.started), shards_of(run, queue.failed)
    ids = [shard_job_id(run, shard) for shard in numbers]
    with connection.pipeline(transaction=False) as pipe:
        for job_id in ids:
            pipe.hmget(job_key(job_id), "worker_name", "status")
        seen = pipe.execute(raise_on_error=False)
    jobs = [each if isinstance(each, list) else (None, b"") for each in seen]
    workers = [safe_name(name) if isinstance(name, bytes) else "" for name, _ in jobs]
    progress = read_progress(connection, ids)
    found = []
    for shard, worker, (_, status), each in zip(numbers, workers, jobs, progress, strict=True):
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


def _read_facts(connection: Redis, runs: Iterable[str]) -> dict[str, tuple[dict[str, str], int]]:
    """Return for each run the fields that are looked at, none where a key is damaged, and its recorded parts.

    Runs of which nothing is left but their place in the index are left out.
    """
    names = list(runs)
    with connection.pipeline(transaction=False) as pipe:
        for run in names:
            pipe.hmget(run_key(run), _FACTS)
            pipe.hlen(run_parts_key(run))
            pipe.hexists(run_parts_key(run), "total")
        replies = pipe.execute(raise_on_error=False)
    found: dict[str, tuple[dict[str, str], int]] = {}
    for run, values, length, has_total in zip(names, replies[::3], replies[1::3], replies[2::3], strict=True):
        if isinstance(values, Exception) or isinstance(length, Exception):
            found[run] = {}, 0
            continue
        facts = {
            name: stored.text(value)
            for name, value in zip(_FACTS, values, strict=True)
            if value is not None and len(value) <= stored.MAX_OBJECT_BYTES
        }
        if facts.keys() >= {"output", "queue"}:
            found[run] = facts, length - bool(has_total)
    return found


def _is_open(facts: Mapping[str, str]) -> bool:
    """Whether jobs of a run may be on its queue."""
    return bool(facts) and "finished" not in facts


def _plan_statuses(connection: Redis, runs: Mapping[str, Mapping[str, str]]) -> dict[str, JobStatus | None]:
    jobs = {run: facts["plan_job"] for run, facts in runs.items() if "plan_job" in facts}
    with connection.pipeline(transaction=False) as pipe:
        for job in jobs.values():
            pipe.hget(job_key(job), "status")
        replies = pipe.execute(raise_on_error=False)
    return {run: job_status(status) for run, status in zip(jobs, replies, strict=True)}


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
    status: JobStatus | None,
) -> RunSnapshot:
    """Return what `state` is told by; rows and tokens are counted by `_summary`."""
    totals = Totals.read(facts)
    failed = sorted(shards_of(run, queue.failed) - set(running)) if _is_open(facts) else []
    return RunSnapshot(
        run=run,
        output=safe_name(facts["output"], MAX_TEXT_CHARS),
        queue=facts["queue"],
        cancelled="cancelled" in facts,
        finished="finished" in facts,
        plan_job=facts.get("plan_job"),
        plan_status=status,
        rows=stored.count(facts.get("rows")),
        shards=stored.count(facts.get("shards")),
        done=done,
        started=len(running),
        claimed=0,
        failed_jobs=tuple(shard_job_id(run, shard) for shard in failed),
        rows_done=totals.rows,
        errors=totals.errors,
        tokens=totals.generated_tokens,
        workers=queue.workers,
        queue_length=queue.length,
        awaited_model=awaited_model(facts, status, queue.models),
        stopped=safe_name(facts["stopped"], MAX_TEXT_CHARS) if "stopped" in facts else None,
        too_many_errors=too_many_errors(facts, totals.rows, totals.errors),
        plan_error=facts.get(PLAN_ERROR),
    )


def _summary(
    snapshot: RunSnapshot, facts: Mapping[str, str], running: tuple[int, int], submitted_at: float | None
) -> RunSummary:
    """running: rows and tokens of shards under way, which the snapshot has not."""
    totals = Totals.read(facts)
    rows_per_s, tokens_per_s = _rates(facts, *running)
    model = facts.get("model_text")
    rows_done = totals.rows + running[0]
    return RunSummary(
        run=snapshot.run,
        state=snapshot.state,
        output=snapshot.output,
        queue=safe_name(snapshot.queue),
        model=None if model is None else safe_name(model, MAX_TEXT_CHARS),
        submitted_at=submitted_at,
        began_at=totals.began_at,
        ended_at=totals.ended_at,
        rows=snapshot.rows,
        rows_done=rows_done if snapshot.rows is None else min(rows_done, snapshot.rows),
        errors=totals.errors,
        failed_checks=totals.failed_checks,
        cut=totals.cut,
        shards=snapshot.shards,
        shards_done=snapshot.done,
        shards_started=snapshot.started,
        shards_failed=0 if snapshot.cancelled else len(snapshot.failures),
        prompt_tokens=totals.prompt_tokens,
        completion_tokens=totals.completion_tokens,
        cached_tokens=totals.cached_tokens,
        tokens=totals.generated_tokens + running[1],
        rows_per_s=rows_per_s,
        tokens_per_s=tokens_per_s,
        worked_s=totals.worked_s if snapshot.finished else None,
        stopped=snapshot.stopped,
        workers=snapshot.workers,
        awaited_model=snapshot.awaited_model,
    )


def _submitted_at(facts: Mapping[str, str]) -> float | None:
    """Return when the last submission came, by its number; the index has when it was planned, once it is."""
    return (stored.count(facts.get("submission")) or 0) / 1000 or None


def _rates(facts: Mapping[str, str], rows: int, tokens: int) -> tuple[float | None, float | None]:
    """Return rows and tokens a second: since the first shard of the last submission began, of a finished run
    while workers had shards, of all submissions.

    rows, tokens: of running shards. The times are workers', so that clocks that differ tell nothing exact.
    """
    totals = Totals.read(facts)
    if "finished" in facts and totals.worked_s:
        return totals.rows / totals.worked_s, totals.generated_tokens / totals.worked_s
    end = totals.ended_at if "finished" in facts else time.time()
    if totals.began_at is None or end is None or end <= totals.began_at:
        return None, None
    seconds = end - totals.began_at
    return (totals.judged_rows + rows) / seconds, (totals.judged_tokens + tokens) / seconds
