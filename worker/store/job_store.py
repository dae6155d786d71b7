"""JobStore, with which a worker claims, holds and ends the jobs of its queues in Redis."""

import json
import logging
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import uuid4

from redis import Redis
from rq.defaults import DEFAULT_RESULT_TTL
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat

from jobs.common.display import brief, safe_name
from jobs.common.keys import FAR_S, FORMAT, JOURNAL_TTL_S, REPORTED_AT, held_key, prefixed
from jobs.common.rq_jobs import execution_key, job_key
from jobs.common.worker_deaths import record_deaths
from worker.store.records.claimed_job import (
    CLAIM_BATCH,
    Claim,
    ClaimedJob,
    ClaimRequest,
    Mode,
    job_address,
    read_claimed_job,
)
from worker.store.records.job_record import DEFAULT_MAX_JOB_BYTES, MAX_HASH_FIELDS, max_hash_bytes
from worker.store.records.next_step import NextStep
from worker.store.records.outcome import EndStatus, FinishReply, Outcome
from worker.store.records.text_piece import NUM_VALUES, TextPiece
from worker.store.scripts import Call, Scripts

PAGE = 200
"""About how many dependents are read at a time. Anybody may name a million dependents that do not exist."""

TEXT_PIECES = 10_000
"""About how many pieces of text a job's stream keeps. Beyond that, the oldest pieces are dropped."""

TEXT_BATCH = 200
"""The most pieces that one call of a script writes."""


@dataclass(frozen=True)
class Keeping:
    """Says which ended jobs are kept, and for how long.

    records_failures: whether failed jobs get a result and a place in RQ's registry. It is False with RQ's
    --disable-default-exception-handler.
    result_ttl_s: seconds for which the result of a job is kept if the job does not say.
    """

    records_failures: bool = True
    result_ttl_s: int = DEFAULT_RESULT_TTL


@dataclass(frozen=True)
class ReleasedJob:
    """A job that was taken from the worker that held it.

    deaths: how many workers have died with the job, if this release counts as a death; else 0.
    claimed: the job, if this worker holds it now and must end it; None if the job is back in its queue, or was deleted.
    worker_name: the worker on which the job had begun; "" if it had not begun. It serves only for messages, because
    anybody may write this name.
    """

    queue_name: str
    job_id: str
    deaths: int
    claimed: ClaimedJob | None
    worker_name: str = ""


_log = logging.getLogger("rq.worker")

_NOT_QUEUED = {
    -1: "it waits for more than 10,000 others",
    -2: "nobody can read which jobs it waits for",
}
"""Why a dependent is not queued, by the reply of queue_dependent.lua."""

_MAINTENANCE_LOCK = prefixed("tokenmill:maintenance:%s")


class JobStore:
    """Claims, holds and ends the jobs of some queues in Redis, for one worker.

    models: the names of the served model. Jobs whose field `tokenmill_model` has another name stay queued.
    more_models: returns the names of the adapters, which may change.
    clock: returns Unix seconds by Redis' clock.
    Only one thread may claim with a store. Every method raises redis.exceptions.RedisError if the server does not
    answer. The caller may then repeat the call, because a repeated call does not repeat its effect.
    """

    def __init__(
        self,
        client: Redis,
        worker_name: str,
        lease_s: int,
        max_job_bytes: int = DEFAULT_MAX_JOB_BYTES,
        models: Sequence[str] = (),
        keeping: Keeping = Keeping(),  # frozen, so all stores may share this one
        clock: Callable[[], float] = time.time,
        *,
        more_models: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._client = client
        self._worker_name = worker_name
        self._lease_s = lease_s
        self._clock = clock
        self._models = list(models)
        self._more_models = more_models

        bounds = {
            "max_hash_bytes": max_hash_bytes(max_job_bytes),
            "max_hash_fields": MAX_HASH_FIELDS,
        }
        self._call_many = Scripts(client, bounds).call_many
        self._max_job_bytes = max_job_bytes
        self._keeping = keeping

        # The epoch that claim.lua returned last. The next claim sends it, to find out if Redis has lost recent writes.
        self._epoch = ""
        # The tokens of claims that have no reply yet.
        self._unanswered_tokens: set[str] = set()
        # Redis keeps a record of what each claim took, in case the claim is sent again. The next claim sends the tokens
        # of claims that have a reply, and Redis deletes their records.
        self._answered_tokens: set[str] = set()

    def _read_job(self, queue_name: str, reply: Sequence[Any]) -> ClaimedJob:
        """Return the job in a script's reply. If the reply cannot be read, the error is noted as the job's damage."""
        try:
            return read_claimed_job(queue_name, reply, self._worker_name, self._max_job_bytes)
        except Exception as error:  # noqa: BLE001  # a hash may hold anything, and must not stop other jobs
            job_id, execution_id, *_ = reply
            return ClaimedJob(
                job_id.decode(errors="replace"),
                execution_id.decode(),
                queue_name,
                self._worker_name,
                damage=error,
            )

    def _holder(self) -> dict[str, Any]:
        """Return the script arguments that describe this worker as a holder of jobs."""
        moment = self._clock()
        return {
            "worker": self._worker_name,
            "now_iso": utcformat(now()),
            "now_ts": repr(moment),
            "lease_s": self._lease_s,
            "far_score": repr(moment + FAR_S),  # for jobs that have begun
        }

    def claim(self, requests: Sequence[ClaimRequest], suspect_deaths: float) -> list[Claim]:
        """Claim jobs from several queues in one round trip. suspect_deaths: see claim.lua.

        A call that failed may have claimed jobs. So the caller must repeat it with the same tokens.
        """
        common = {
            **self._holder(),
            "suspect_deaths": suspect_deaths,
            "models": [*self._models, *self._more_models()],
            "format": FORMAT,
            "done_tokens": list(self._answered_tokens),
            "epoch": self._epoch,
        }
        calls = []
        for request in requests:
            arguments = {**vars(request), **common, "most": min(request.most, CLAIM_BATCH)}
            calls.append(Call("claim", arguments))

        tokens = {request.token for request in requests}
        tokens_sent_once = tokens - self._unanswered_tokens
        self._unanswered_tokens |= tokens
        replies = self._call_many(calls)
        self._unanswered_tokens -= tokens
        # Redis remembers what each claim took, in case the claim is sent again. With the next call, Redis forgets the
        # claims with these tokens. It remembers a claim that was sent twice, which may still reach it a second time.
        self._answered_tokens = tokens_sent_once
        *_, latest_epoch = replies[-1]  # each reply ends with an epoch
        self._epoch = latest_epoch.decode()
        return [
            self._claim_of(request.queue, reply)
            for request, reply in zip(requests, replies, strict=True)
        ]

    def _claim_of(self, queue_name: str, reply: Sequence[Any]) -> Claim:
        """Return the claim in a reply of claim.lua."""
        entries, num_foreign, first_left, hold, num_newer, _epoch = reply
        return Claim(
            jobs=[self._read_job(queue_name, entry) for entry in entries],
            num_foreign=num_foreign,
            first_left=first_left.decode(errors="replace"),
            hold=hold.decode(),
            num_newer=num_newer,
        )

    def renew(self, held: Sequence[ClaimedJob]) -> list[ClaimedJob]:
        """Extend the leases of held jobs. Returns the jobs that this worker no longer holds."""
        no_new_start = ""  # tells the script to keep the time at which the job began
        return self._renew([(claimed, no_new_start) for claimed in held])

    def show_begun(self, begun: Sequence[tuple[ClaimedJob, datetime]]) -> list[ClaimedJob]:
        """Show jobs as begun, as RQ does. Returns the jobs that this worker no longer holds.

        begun: the jobs, each with the time at which it began.
        """
        return self._renew([(claimed, utcformat(moment)) for claimed, moment in begun])

    def _renew(self, held: Sequence[tuple[ClaimedJob, str]]) -> list[ClaimedJob]:
        """Extend leases. Returns the jobs that this worker no longer holds.

        held: each job with the time at which it began, or with "" to keep the time that is in Redis.
        """
        if not held:
            return []
        jobs = []
        for claimed, started_iso in held:
            # The order of renew.lua: queue, job id, execution id, time.
            jobs.append((*claimed.address.values(), started_iso))
        [lost_positions] = self._call_many([Call("renew", {**self._holder(), "jobs": jobs})])
        lost_jobs = []
        for position in lost_positions:
            claimed, _ = held[position - 1]  # Lua counts from 1
            lost_jobs.append(claimed)
        return lost_jobs

    def finish(self, outcomes: Sequence[Outcome]) -> list[FinishReply]:
        """Write the ends of jobs, each wholly or not at all. Returns the reply to each end, see finish.lua."""
        replies = self._call_many([self._end_call(outcome) for outcome in outcomes])
        return [reply.decode() for reply in replies]

    def _end_call(self, outcome: Outcome) -> Call:
        """Return the call of the script that writes a job's end: retry.lua or finish.lua."""
        step = outcome.next_step(self._keeping.result_ttl_s)
        next_run: str | int = ""
        if step.wait_s is not None:
            next_run = self._next_run(step.wait_s, step.at_front)
        began_at = outcome.began_at or outcome.ended_at  # a job may end before it begins
        execution = {
            **outcome.claimed.address,
            "worker": self._worker_name,
            "working_s": outcome.working_s,
            "started_iso": utcformat(began_at),
            "ended_iso": utcformat(outcome.ended_at),
        }
        # The third counter, "repeats_left", is for a finished job that runs again.
        is_retry = step.counter in ("number_of_retries", "retries_left")
        if is_retry:
            return self._retry_call(outcome, step, execution, next_run)
        return self._finish_call(outcome, step, execution, next_run)

    def _retry_call(
        self, outcome: Outcome, step: NextStep, execution: Mapping[str, Any], next_run: str | int
    ) -> Call:
        """Return the call that queues or schedules a job again after a failed try."""
        args = {
            **execution,
            "counter": step.counter,
            "tries": step.count,
            "at_front": step.at_front,
            "when": next_run,
            "ttl": "" if step.kept_s is None else str(step.kept_s),
        }
        if outcome.returned_retry is None:  # the job raised, and gets no result
            return Call("retry", args)
        return Call("retry", args, self._entry(outcome, Result.Type.RETRIED))

    def _finish_call(
        self, outcome: Outcome, step: NextStep, execution: Mapping[str, Any], next_run: str | int
    ) -> Call:
        """Return the call that ends a job."""
        assert step.kept_s is not None  # None only for a retry
        status: EndStatus = outcome.status
        result_type = Result.Type.SUCCESSFUL if status == "finished" else Result.Type.FAILED
        if outcome.returned_retry is not None:  # the job has asked for a retry once too often
            status = "failed"
            result_type = Result.Type.MAX_RETRIES_EXCEEDED

        runs_again = step.wait_s is not None
        args = {
            **execution,
            "status": status,
            "next_run": next_run,
            "repeats_left": step.count if runs_again else "",
        }
        if status == "finished":
            is_recorded = step.kept_s != 0
            ttl_without_record = "0"  # deletes the job
        else:
            # A job that has asked for a retry once too often is recorded even if failures are not.
            is_recorded = self._keeping.records_failures or outcome.returned_retry is not None
            ttl_without_record = ""  # leaves the job's time to live as it is
        if not is_recorded:
            return Call("finish", {**args, "score": "", "ttl": ttl_without_record})

        if step.kept_s >= 0:
            score = repr(self._clock() + step.kept_s)
        elif status == "finished":  # kept for ever
            score = "+inf"
        else:  # RQ's score for a failed job that is kept for ever is its negative ttl
            score = str(step.kept_s)
        entry = self._entry(outcome, result_type)
        return Call("finish", {**args, "score": score, "ttl": str(step.kept_s)}, entry)

    def _next_run(self, wait_s: int, at_front: bool) -> str | int:
        """Return when a job runs again, for end_execution.lua.

        This is a time in Unix seconds, or "front" or "back" if the job goes at once to that end of its queue.
        """
        if wait_s:
            return int(self._clock() + wait_s)
        return "front" if at_front else "back"

    def _entry(self, outcome: Outcome, result_type: Result.Type) -> list[Any]:
        """Return the job's entry in rq:results: its fields and values in turn."""
        claimed = outcome.claimed
        has_failed = result_type is Result.Type.FAILED
        result = Result(
            claimed.job_id,
            result_type,
            connection=self._client,
            return_value=outcome.returned_retry,  # any other value is packed already, and is added below
            exc_string=outcome.value if has_failed else None,
            worker_name=self._worker_name,
            execution_id=claimed.execution_id,
            execution_started_at=outcome.began_at or outcome.ended_at,
            execution_ended_at=outcome.ended_at,
        )
        result.serializer = JSONSerializer  # the constructor would inspect the serializer each time

        fields = result.serialize()
        if not has_failed and outcome.packed is not None:
            fields["return_value"] = b64encode(outcome.packed)

        entry: list[Any] = []
        for name, value in fields.items():
            entry += [name, value]
        return entry

    def queue_dependents(self, claimed: ClaimedJob, cursor: int = 0) -> int:
        """Queue one page of an ended job's dependents. A dependent that waits for another job too is left out.

        cursor: the page; 0 for the first. Returns the cursor of the next page; 0 after the last.
        A dependent is queued only once, even if it waited for two jobs that end together. RQ would queue it twice.
        """
        key = job_key(claimed.job_id)
        ended_as: Any = self._client.hget(key, "ended_as")
        if ended_as is None:  # another worker has taken the job over and closed it
            return 0
        page: Any = self._client.sscan(f"{key}:dependents", cursor, count=PAGE)
        next_cursor, members = page

        common = {
            "ended_id": claimed.job_id,
            "ended_as": ended_as.decode(),
            "now_iso": utcformat(now()),
            "now_ts": repr(self._clock()),
        }
        job_ids = [member.decode(errors="replace") for member in members]
        replies = self._call_many(
            [Call("queue_dependent", {"id": job_id, **common}) for job_id in job_ids]
        )
        for job_id, reply in zip(job_ids, replies, strict=True):
            if reply < 0:
                _log.error("job %s is not queued: %s", brief(job_id), _NOT_QUEUED[reply])
        return int(next_cursor)

    def close(self, claimed: ClaimedJob) -> None:
        """Release an ended job after its dependents were queued: set its time to live, or queue its next run."""
        self._call_many([Call("close", {**claimed.address, **self._holder()})])

    def release(self, held: Sequence[ClaimedJob], mode: Mode, max_deaths: int) -> list[ReleasedJob]:
        """Put jobs back at the heads of their queues. Returns what became of each.

        Two kinds of jobs are not put back: a job with which `max_deaths` workers have died, and a job whose end is
        already written. This worker then holds such a job, and has to end it.
        """
        common = {**self._holder(), "mode": mode, "max_deaths": max_deaths}
        # Each job is pushed to the head of its queue, so the last job is pushed first.
        jobs = list(reversed(held))
        calls = []
        for job in jobs:
            args = {
                **common,
                **job.address,
                "left_before": job.left_before,
                "kind": job.kind,
                "new_eid": uuid4().hex,
            }
            calls.append(Call("release", args))
        replies = self._call_many(calls) if calls else []
        return [self._released_job(job, reply) for job, reply in zip(jobs, replies, strict=True)]

    def _released_job(self, job: ClaimedJob, reply: Sequence[Any]) -> ReleasedJob:
        """Return what became of a job, from the reply of release.lua."""
        result, deaths, *more = reply  # what `more` holds depends on the result
        claimed = None
        worker_name = b""
        if result == b"exhausted":
            entry, worker_name = more
            claimed = self._read_job(job.queue_name, entry)
        elif result == b"ended":
            [entry] = more
            claimed = replace(self._read_job(job.queue_name, entry), has_ended=True)
        elif result == b"queued":
            [worker_name] = more
        return ReleasedJob(job.queue_name, job.job_id, deaths, claimed, safe_name(worker_name))

    def find_abandoned(self, queue_names: Sequence[str], period_s: float) -> list[ClaimedJob]:
        """Return the jobs of dead workers, for `release`. At most one worker checks a queue in each period."""
        held_jobs = []
        locked_names = self._try_to_lock(queue_names, period_s)
        for name, members in self._held_members(locked_names):
            for member in members:
                job_id, _, execution_id = member.decode(errors="replace").rpartition(":")
                held_jobs.append(ClaimedJob(job_id, execution_id, name, self._worker_name))
        if not held_jobs:
            return []

        with self._client.pipeline(transaction=False) as pipe:
            for claimed in held_jobs:
                pipe.ttl(execution_key(claimed.job_id, claimed.execution_id))
            leases_s = pipe.execute()
        abandoned = []
        for claimed, lease_s in zip(held_jobs, leases_s, strict=True):
            if lease_s < 0:  # Redis' reply for a key that has expired
                abandoned.append(claimed)
        return abandoned

    def _try_to_lock(self, queue_names: Sequence[str], period_s: float) -> list[str]:
        """Try to lock queues for a period of maintenance. Returns the queues that no other worker has locked."""
        with self._client.pipeline(transaction=False) as pipe:
            for name in queue_names:
                pipe.set(
                    _MAINTENANCE_LOCK % name, self._worker_name, nx=True, px=int(period_s * 1000)
                )
            replies = pipe.execute()
        return [name for name, is_locked in zip(queue_names, replies, strict=True) if is_locked]

    def _held_members(self, queue_names: Sequence[str]) -> list[tuple[str, Sequence[bytes]]]:
        """Return each queue with its held jobs, as `<job id>:<execution id>`."""
        if not queue_names:
            return []
        with self._client.pipeline(transaction=False) as pipe:
            for name in queue_names:
                pipe.hkeys(held_key(name))
            members_by_queue = pipe.execute()
        return list(zip(queue_names, members_by_queue, strict=True))

    def record_deaths(self, ids_by_worker: Mapping[str, Sequence[str]]) -> None:
        """Record that workers have died. ids_by_worker: the ids of the jobs that each dead worker had begun."""
        record_deaths(self._client, ids_by_worker)

    def adopt(
        self, queue: str, reasons: Mapping[tuple[str, str], str]
    ) -> list[tuple[ClaimedJob, str]]:
        """Take over jobs that RQ's own workers left behind. Returns the jobs that this worker holds now, with reasons.

        reasons: why each job fails, by its job id and execution id. The execution id is "" if the job had not begun.
        """
        holder = self._holder()
        calls = []
        for job_id, execution_id in reasons:
            args = {**job_address(queue, job_id, execution_id), **holder, "new_eid": uuid4().hex}
            calls.append(Call("adopt", args))

        adopted = []
        replies = self._call_many(calls)
        for reply, reason in zip(replies, reasons.values(), strict=True):
            result, *entries = reply
            if result == b"taken":
                [entry] = entries
                adopted.append((self._read_job(queue, entry), reason))
        return adopted

    def show_progress(self, progress: Sequence[tuple[ClaimedJob, Mapping[str, Any]]]) -> list[bool]:
        """Write the progress of running jobs. Returns for each job whether this worker still holds it."""
        reported_at = round(time.time(), 3)
        calls = []
        for claimed, values in progress:
            text = json.dumps({**values, REPORTED_AT: reported_at})
            calls.append(Call("progress", claimed.address, [text]))
        return [bool(reply) for reply in self._call_many(calls)]

    def write_texts(self, waiting: Sequence[tuple[ClaimedJob, TextPiece]]) -> None:
        """Add pieces to the streams of their jobs. Pieces of jobs that this worker has lost are dropped."""
        calls = []
        for start in range(0, len(waiting), TEXT_BATCH):
            addresses = []
            raw: list[Any] = []  # sent beside the JSON, because tokens are bytes
            batch = waiting[start : start + TEXT_BATCH]
            for claimed, piece in batch:
                is_first = piece.offset == 0
                # The order of text.lua: queue, job id, execution id, whether a text begins.
                addresses.append([*claimed.address.values(), is_first])
                raw += piece.to_values()
            args = {
                "pieces": addresses,
                "num_values": NUM_VALUES,
                "most": TEXT_PIECES,
                "ttl_s": JOURNAL_TTL_S,
            }
            calls.append(Call("text", args, raw))
        self._call_many(calls)
