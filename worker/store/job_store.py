"""The jobs of some queues in Redis: how one worker claims, holds and ends them."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import uuid4

from redis import Redis
from rq.defaults import DEFAULT_RESULT_TTL
from rq.job import Job, JobStatus
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat

from jobs.common.keys import held_key, prefixed
from jobs.common.rq_jobs import execution_key, job_key
from worker.store.records.bounds import DEFAULT_MAX_JOB_BYTES, MAX_HASH_FIELDS, max_hash_bytes
from worker.store.records.claimed_job import (
    CLAIM_BATCH,
    Claim,
    ClaimedJob,
    EarlierJob,
    Mode,
    Wanted,
    restore,
)
from worker.store.records.next_step import End, Repeat, Retry
from worker.store.records.outcome import FinishReply, Outcome
from worker.store.scripts import Scripts

PAGE = 200
"""Dependents that are looked at in one turn, about: anybody may name a million jobs that never were."""


class Dependents:
    """Queues them. Not thread-safe, and raises as `JobStore` does, whose part it is."""

    def __init__(self, client: Redis, scripts: Scripts, clock: Callable[[], float]) -> None:
        self._client, self._call_many, self._clock = client, scripts.call_many, clock

    def queue(self, claimed: ClaimedJob, cursor: int = 0) -> int:
        """Queue a page of the jobs that wait for an ended one and for nothing else; return where the next is.

        cursor: where this one begins. Returns 0 after the last page.
        Each is queued once: also when this is called again, and when two jobs that it waited for end at the
        same time, where RQ's own way queues it twice.
        """
        ended_as: Any = self._client.hget(job_key(claimed.job_id), "ended_as")
        if ended_as is None:  # closed already, by whoever took it over
            return 0
        ended = Job(connection=self._client)
        ended._id, ended._status = claimed.job_id, JobStatus(ended_as.decode())
        found: Any = self._client.sscan(ended.dependents_key, cursor, count=PAGE)
        following, members = int(found[0]), found[1]
        calls = []
        for dependent in self._fetch([member.decode() for member in members]):
            if self._may_run(dependent, ended):
                front = int(bool(dependent.enqueue_at_front))
                ids = (dependent.origin, dependent.id, claimed.job_id)
                now_iso, now_ts = utcformat(now()), repr(self._clock())
                calls.append(("queue_dependent", (*ids, now_iso, front, now_ts)))
        if calls:
            self._call_many(calls)
        return following

    def _may_run(self, dependent: Job, ended: Job) -> bool:
        """Whether a job waits for nothing but the one that has ended."""
        try:
            # What it has ended as is known here: its status may be that of a copy that was saved since.
            return bool(dependent.dependencies_are_met(parent_job=ended, refresh_job_status=False))
        except ValueError:  # a status that is no text: nobody can say whether that job has ended well
            return False

    def _fetch(self, job_ids: Sequence[str]) -> Iterator[Job]:
        """What decides when and where each is queued, but for those that are gone or damaged in that."""
        calls = [("dependent", [job_id]) for job_id in job_ids]
        found = self._call_many(calls) if calls else []
        for job_id, fields in zip(job_ids, found, strict=True):
            if not fields:
                continue
            try:
                job = Job(job_id, self._client, JSONSerializer)
                job.origin, front, allows_failures = (field.decode() for field in fields)
                job.enqueue_at_front = bool(int(front or 0))
                job.allow_dependency_failures = bool(int(allows_failures or 0))
            except ValueError:  # an id that RQ would refuse, or no text, or no number
                continue
            yield job


@dataclass(frozen=True)
class Keeping:
    """What is kept of jobs that have ended.

    records_failures: False keeps failed jobs out of the registry and without a result, as RQ's
    --disable-default-exception-handler does.  result_ttl_s: of jobs that do not say.
    """

    records_failures: bool = True
    result_ttl_s: int = DEFAULT_RESULT_TTL


class EndCalls:
    """Makes the calls of one worker. See `JobStore` for the arguments."""

    def __init__(self, client: Redis, worker_name: str, keeping: Keeping, clock: Callable[[], float]) -> None:
        self._client, self._worker_name, self._keeping, self._clock = client, worker_name, keeping, clock

    def call_of(self, outcome: Outcome) -> tuple[str, list[Any]]:
        """Name and arguments of the script that writes this outcome."""
        step = outcome.next_step(self._keeping.result_ttl_s)
        if isinstance(step, Retry):
            return "retry", self._retry_args(outcome, step)
        return "finish", self._finish_args(outcome, step)

    def _run_args(self, outcome: Outcome) -> list[Any]:
        """What both scripts are told of the run: see end_execution.lua."""
        started_iso = utcformat(outcome.started_at or outcome.ended_at)
        run = (utcformat(outcome.ended_at), self._worker_name, outcome.working_s, started_iso)
        return [*outcome.claimed.address, *run]

    def _retry_args(self, outcome: Outcome, step: Retry) -> list[Any]:
        entry = self._entry(outcome, Result.Type.RETRIED) if step.is_on_wish else []
        kept_s = "" if step.kept_s is None else step.kept_s
        when = self._when(step.wait_s, step.at_front)
        return [*self._run_args(outcome), when, step.counter, step.count, kept_s, int(step.at_front), *entry]

    def _finish_args(self, outcome: Outcome, step: Repeat | End) -> list[Any]:
        status, kind = _status_and_kind(outcome, step)
        repeat = [self._when(step.wait_s), step.left] if isinstance(step, Repeat) else ["", ""]
        if status == "finished":
            is_recorded, left_ttl_s, endless = step.kept_s != 0, "0", "+inf"
        else:  # as RQ scores failed ones: those without end by the negative ttl
            is_recorded = self._keeping.records_failures or kind is not Result.Type.FAILED
            left_ttl_s, endless = "", str(step.kept_s)
        if not is_recorded:
            return [*self._run_args(outcome), status, left_ttl_s, "", *repeat]
        score = endless if step.kept_s < 0 else repr(self._clock() + step.kept_s)
        entry = self._entry(outcome, kind)
        return [*self._run_args(outcome), status, step.kept_s, score, *repeat, *entry]

    def _when(self, wait_s: int, at_front: bool = False) -> str | int:
        """When a job runs again, as put_back of end_execution.lua takes it."""
        if wait_s:
            return int(self._clock() + wait_s)
        return "front" if at_front else "back"

    def _entry(self, outcome: Outcome, kind: Result.Type) -> list[Any]:
        """Fields and values of the entry in rq:results."""
        claimed, failed = outcome.claimed, kind is Result.Type.FAILED
        result = Result(
            claimed.job_id,
            kind,
            connection=self._client,
            return_value=outcome.wish,
            exc_string=outcome.value if failed else None,
            worker_name=self._worker_name,
            execution_id=claimed.execution_id,
            execution_started_at=outcome.started_at or outcome.ended_at,
            execution_ended_at=outcome.ended_at,
        )
        result.serializer = JSONSerializer  # given to the constructor it would be inspected each time
        fields = result.serialize()
        if not failed and outcome.packed is not None:
            fields["return_value"] = b64encode(outcome.packed)
        return [item for pair in fields.items() for item in pair]


def _status_and_kind(outcome: Outcome, step: Repeat | End) -> tuple[str, Result.Type]:
    """Status of the job, and kind of its result."""
    if isinstance(step, End) and step.has_used_up_retries:
        return "failed", Result.Type.MAX_RETRIES_EXCEEDED
    is_finished = outcome.status == "finished"
    return outcome.status, Result.Type.SUCCESSFUL if is_finished else Result.Type.FAILED


FAR_S = 10 * 365 * 86_400
"""Seconds from now to the score of our entries in rq:wip: no stock cleanup reaches them."""

_MAINTENANCE_LOCK = prefixed("tokenmill:maintenance:%s")


class JobStore:
    """The jobs of some queues as one worker claims, holds and ends them in Redis.

    models: names of the served model; jobs whose field `tokenmill_model` is none of them stay queued.
    Not thread-safe: the I/O thread owns it. Every method raises redis.exceptions.RedisError when the
    server cannot be reached, and every call may then be made again: none doubles an effect.
    """

    def __init__(
        self,
        client: Redis,
        worker_name: str,
        lease_s: int,
        max_job_bytes: int = DEFAULT_MAX_JOB_BYTES,
        models: Sequence[str] = (),
        keeping: Keeping = Keeping(),  # it is frozen
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client, self._worker_name, self._lease_s, self._clock = client, worker_name, lease_s, clock
        self._models = "\n".join(models)
        bounds = {"max_hash_bytes": max_hash_bytes(max_job_bytes), "max_hash_fields": MAX_HASH_FIELDS}
        scripts = Scripts(client, bounds)
        self._call_many = scripts.call_many
        self._max_job_bytes = max_job_bytes
        self._ends = EndCalls(client, worker_name, keeping, clock)
        self.dependents = Dependents(client, scripts, clock)
        self._unanswered: set[str] = set()
        self._answered: set[str] = set()

    def _restore(self, queue_name: str, reply: Sequence[Any]) -> ClaimedJob:
        return restore(queue_name, reply, self._worker_name, self._max_job_bytes)

    def _stamp(self) -> tuple[str, str]:
        return utcformat(now()), repr(self._clock())

    def claim(self, wanted: Sequence[Wanted], suspect_deaths: float) -> list[Claim]:
        """Claim jobs from several queues in one round trip. suspect_deaths: see claim.lua.

        A call that failed may have claimed: make it again with the same tokens.
        """
        tail = (
            self._worker_name,
            self._stamp()[1],
            self._lease_s,
            repr(self._clock() + FAR_S),
            suspect_deaths,
        )
        calls: list[tuple[str, list[Any]]] = [
            (
                "claim",
                [
                    *(each.queue, min(each.most, CLAIM_BATCH), each.token, *tail),
                    *(int(each.takes_suspects), self._models, each.max_functions, each.max_files),
                    *(each.num_takers, each.num_held, int(each.rounds_up)),
                ],
            )
            for each in wanted
        ]
        tokens = {each.token for each in wanted}
        first_sent = tokens - self._unanswered
        self._unanswered |= tokens
        calls[0][1].extend(self._answered)
        replies = self._call_many(calls)
        self._unanswered -= tokens
        # Of a claim that was sent twice the first sending may still be on its way: its record expires.
        self._answered = first_sent
        return [
            Claim(
                [self._restore(each.queue, entry) for entry in entries],
                num_foreign,
                first_left.decode(errors="replace"),
                bool(is_suspended),
            )
            for each, (entries, num_foreign, first_left, is_suspended) in zip(wanted, replies, strict=True)
        ]

    def renew(self, held: Sequence[ClaimedJob]) -> list[ClaimedJob]:
        """Extend the leases of the jobs held; return those that are no longer ours."""
        return self._renew([(claimed, "") for claimed in held])

    def begin(self, begun: Sequence[tuple[ClaimedJob, datetime]]) -> list[ClaimedJob]:
        """Show that jobs began then, as RQ shows it; return those that are no longer ours."""
        return self._renew([(claimed, utcformat(moment)) for claimed, moment in begun])

    def _renew(self, held: Sequence[tuple[ClaimedJob, str]]) -> list[ClaimedJob]:
        if not held:
            return []
        far = repr(self._clock() + FAR_S)
        args: list[Any] = [self._worker_name, *self._stamp(), self._lease_s, far]
        for claimed, started_iso in held:
            args.extend((*claimed.address, started_iso))
        return [held[i - 1][0] for i in self._call_many([("renew", args)])[0]]

    def finish(self, outcomes: Sequence[Outcome]) -> list[FinishReply]:
        """Write the ends of jobs, each at once or not at all; see finish.lua for the replies."""
        replies = self._call_many([self._ends.call_of(outcome) for outcome in outcomes])
        return [reply.decode() for reply in replies]

    def close(self, claimed: ClaimedJob) -> None:
        """Let go of a job that has ended, once its dependents are queued."""
        self._call_many([("close", (*claimed.address, self._stamp()[0]))])

    def release(self, held: Sequence[ClaimedJob], mode: Mode, max_deaths: int) -> list[ClaimedJob]:
        """Put jobs back at the head of their queues.

        Returns those that this worker holds now instead: they died too often, or have ended already.
        """
        # Pushed to the head one by one, the last goes first.
        places = [(claimed.address, claimed.left_before, claimed.kind) for claimed in reversed(held)]
        return self._release(places, mode, max_deaths)

    def _release(
        self, places: Sequence[tuple[tuple[str, str, str], str, str]], mode: Mode, max_deaths: int
    ) -> list[ClaimedJob]:
        """places: of each job its address, and what release.lua takes at the end."""
        far = repr(self._clock() + FAR_S)
        tail = (self._worker_name, self._stamp()[1], self._lease_s, far)
        calls = [
            ("release", (*address, mode, max_deaths, uuid4().hex, *tail, left_before, kind))
            for address, left_before, kind in places
        ]
        replies = self._call_many(calls) if calls else []
        return [
            replace(self._restore(address[0], reply[1]), has_ended=reply[0] == b"ended")
            for (address, _, _), reply in zip(places, replies, strict=True)
            if reply[0] in (b"exhausted", b"ended")
        ]

    def reclaim_abandoned(
        self, queue_names: Sequence[str], period_s: float, max_deaths: int
    ) -> list[ClaimedJob]:
        """Queue jobs again whose worker died; at most one worker looks at a queue in each period.

        Returns those that this worker holds now instead, as `release` does.
        """
        with self._client.pipeline(transaction=False) as pipe:
            for name in queue_names:  # a lock of each: who takes it serves that queue
                lock = _MAINTENANCE_LOCK % name
                pipe.set(lock, self._worker_name, nx=True, px=int(period_s * 1000))
            is_ours = pipe.execute()
        queue_names = [name for name, taken in zip(queue_names, is_ours, strict=True) if taken]
        if not queue_names:
            return []
        with self._client.pipeline(transaction=False) as pipe:
            for name in queue_names:
                pipe.hkeys(held_key(name))
            held = [
                (name, member)
                for name, members in zip(queue_names, pipe.execute(), strict=True)
                for member in members
            ]
        found = [(name, *member.decode().rsplit(":", 1)) for name, member in held]
        with self._client.pipeline(transaction=False) as pipe:
            for _, job_id, execution_id in found:
                pipe.ttl(execution_key(job_id, execution_id))
            left_s = pipe.execute() if found else []
        dead = [(address, "", "") for address, s in zip(found, left_s, strict=True) if s < 0]
        return self._release(dead, "abandoned", max_deaths)

    def adopt(self, left: Sequence[EarlierJob]) -> list[tuple[ClaimedJob, str]]:
        """Take over jobs that RQ's own workers left behind; return those that this worker holds then."""
        now_ts = self._stamp()[1]
        tail = (self._worker_name, now_ts, self._lease_s, repr(self._clock() + FAR_S))
        calls = [("adopt", (*each.address, now_ts, uuid4().hex, *tail)) for each in left]
        replies = self._call_many(calls)
        return [
            (self._restore(each.queue, reply[1]), each.reason)
            for each, reply in zip(left, replies, strict=True)
            if reply[0] == b"taken"
        ]

    def show_progress(self, shown: Sequence[tuple[ClaimedJob, dict[str, Any]]]) -> None:
        """Write `job.meta` of running jobs."""
        calls = [("progress", (*claimed.address, JSONSerializer.dumps(meta))) for claimed, meta in shown]
        if calls:
            self._call_many(calls)
