"""The jobs of some queues in Redis: how one worker claims, holds and ends them."""

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

from jobs.common.display import brief
from jobs.common.keys import FORMAT, held_key, prefixed
from jobs.common.rq_jobs import execution_key, job_key
from worker.store.records.bounds import DEFAULT_MAX_JOB_BYTES, MAX_HASH_FIELDS, max_hash_bytes
from worker.store.records.claimed_job import CLAIM_BATCH, Claim, ClaimedJob, Mode, Wanted, address, restore
from worker.store.records.outcome import FinishReply, Outcome
from worker.store.scripts import Call, Scripts

PAGE = 200
"""Dependents that are looked at in one turn, about: anybody may name a million jobs that never were."""


@dataclass(frozen=True)
class Keeping:
    """How long ended jobs are kept.

    records_failures: False keeps failed jobs out of the registry and without a result, as RQ's
    --disable-default-exception-handler does.  result_ttl_s: of jobs that do not say.
    """

    records_failures: bool = True
    result_ttl_s: int = DEFAULT_RESULT_TTL


@dataclass(frozen=True)
class Released:
    """A job that was taken from its holder.

    deaths: how many workers have died with it, if this release counts as a death; else 0. claimed: the job, if this
    worker now holds it to end it; None if it is back in its queue or gone.
    """

    queue_name: str
    job_id: str
    deaths: int
    claimed: ClaimedJob | None


FAR_S = 10 * 365 * 86_400
"""Seconds from now to the score of our entries in rq:wip: no stock cleanup reaches them."""

_log = logging.getLogger("rq.worker")
_NOT_QUEUED = {-1: "it waits for more than 10,000 others", -2: "nobody can read which jobs it waits for"}
"""Replies of queue_dependent.lua."""

_MAINTENANCE_LOCK = prefixed("tokenmill:maintenance:%s")


class JobStore:
    """The jobs of some queues as one worker claims, holds and ends them in Redis.

    models: names of the served model; jobs whose field `tokenmill_model` has another name stay queued.
    Not thread-safe: the I/O thread owns it. Every method raises redis.exceptions.RedisError without a server, and every
    call may then be made again: none doubles an effect.
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
        self._models = list(models)
        bounds = {"max_hash_bytes": max_hash_bytes(max_job_bytes), "max_hash_fields": MAX_HASH_FIELDS}
        self._call_many = Scripts(client, bounds).call_many
        self._max_job_bytes, self._keeping = max_job_bytes, keeping
        self._epoch = ""
        self._unanswered: set[str] = set()
        self._answered: set[str] = set()

    def _restore(self, queue_name: str, reply: Sequence[Any]) -> ClaimedJob:
        """Read a script's reply about a job. A job that cannot be read can only be failed."""
        try:
            return restore(queue_name, reply, self._worker_name, self._max_job_bytes)
        except Exception as error:  # noqa: BLE001  # a hash may hold anything, and must not stop other jobs
            job_id, execution_id = reply[0].decode(errors="replace"), reply[1].decode()
            return ClaimedJob(job_id, execution_id, queue_name, self._worker_name, damage=error)

    def _holder(self) -> dict[str, Any]:
        """Return this worker's part of the scripts' arguments, as the holder of jobs."""
        moment = self._clock()
        return {
            "worker": self._worker_name,
            "now_iso": utcformat(now()),
            "now_ts": repr(moment),
            "lease_s": self._lease_s,
            "far_score": repr(moment + FAR_S),
        }

    def claim(self, wanted: Sequence[Wanted], suspect_deaths: float) -> list[Claim]:
        """Claim jobs from several queues in one round trip. suspect_deaths: see claim.lua.

        A call that failed may have claimed: make it again with the same tokens.
        """
        same = {
            **self._holder(),
            "suspect_deaths": suspect_deaths,
            "models": self._models,
            "format": FORMAT,
            "done_tokens": list(self._answered),
            "epoch": self._epoch,
        }
        calls = [Call("claim", {**vars(each), **same, "most": min(each.most, CLAIM_BATCH)}) for each in wanted]
        tokens = {each.token for each in wanted}
        first_sent = tokens - self._unanswered
        self._unanswered |= tokens
        replies = self._call_many(calls)
        self._unanswered -= tokens
        # The first sending of a repeated claim may still be on its way: its record expires.
        self._answered = first_sent
        self._epoch = replies[-1][5].decode()
        return [
            Claim(
                [self._restore(each.queue, entry) for entry in entries],
                num_foreign,
                first_left.decode(errors="replace"),
                hold.decode(),
                num_newer,
            )
            for each, (entries, num_foreign, first_left, hold, num_newer, _) in zip(wanted, replies, strict=True)
        ]

    def renew(self, held: Sequence[ClaimedJob]) -> list[ClaimedJob]:
        """Extend the leases of the jobs held; return those that are no longer ours."""
        return self._renew([(claimed, "") for claimed in held])

    def begin(self, begun: Sequence[tuple[ClaimedJob, datetime]]) -> list[ClaimedJob]:
        """Show jobs as begun, as RQ does; return those that are no longer ours."""
        return self._renew([(claimed, utcformat(moment)) for claimed, moment in begun])

    def _renew(self, held: Sequence[tuple[ClaimedJob, str]]) -> list[ClaimedJob]:
        if not held:
            return []
        jobs = [(*claimed.address.values(), started_iso) for claimed, started_iso in held]
        lost = self._call_many([Call("renew", {**self._holder(), "jobs": jobs})])[0]
        return [held[i - 1][0] for i in lost]

    def finish(self, outcomes: Sequence[Outcome]) -> list[FinishReply]:
        """Write the ends of jobs, each at once or not at all; see finish.lua for the replies."""
        replies = self._call_many([self._end_of(outcome) for outcome in outcomes])
        return [reply.decode() for reply in replies]

    def _end_of(self, outcome: Outcome) -> Call:
        step, status, was_wish = outcome.next_step(self._keeping.result_ttl_s), outcome.status, outcome.wish is not None
        when = "" if step.wait_s is None else self._when(step.wait_s, step.at_front)
        run = {
            **outcome.claimed.address,
            "worker": self._worker_name,
            "working_s": outcome.working_s,
            "started_iso": utcformat(outcome.started_at or outcome.ended_at),
            "ended_iso": utcformat(outcome.ended_at),
        }
        if step.counter in ("number_of_retries", "retries_left"):
            ttl = "" if step.kept_s is None else str(step.kept_s)
            tries = {"counter": step.counter, "tries": step.count, "at_front": step.at_front}
            entry = self._entry(outcome, Result.Type.RETRIED) if was_wish else []
            return Call("retry", {**run, **tries, "when": when, "ttl": ttl}, entry)
        kind = Result.Type.SUCCESSFUL if status == "finished" else Result.Type.FAILED
        if was_wish:  # once too often
            status, kind = "failed", Result.Type.MAX_RETRIES_EXCEEDED
        repeats_left = "" if step.wait_s is None else step.count
        args = {**run, "status": status, "score": "", "next_run": when, "repeats_left": repeats_left}
        assert step.kept_s is not None
        if status == "finished":
            is_recorded, left_ttl_s, endless = step.kept_s != 0, "0", "+inf"
        else:  # as RQ scores failed ones: those without end by the negative ttl
            is_recorded = self._keeping.records_failures or kind is not Result.Type.FAILED
            left_ttl_s, endless = "", str(step.kept_s)
        if not is_recorded:
            return Call("finish", {**args, "ttl": left_ttl_s})
        score = endless if step.kept_s < 0 else repr(self._clock() + step.kept_s)
        return Call("finish", {**args, "score": score, "ttl": str(step.kept_s)}, self._entry(outcome, kind))

    def _when(self, wait_s: int, at_front: bool) -> str | int:
        """Say when a job runs again, in the form of put_back of end_execution.lua."""
        if wait_s:
            return int(self._clock() + wait_s)
        return "front" if at_front else "back"

    def _entry(self, outcome: Outcome, kind: Result.Type) -> list[Any]:
        """Return fields and values of the entry in rq:results."""
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

    def queue_dependents(self, claimed: ClaimedJob, cursor: int = 0) -> int:
        """Queue a page of the jobs that wait for an ended one and for nothing else.

        cursor: the page. Returns the next one's cursor, 0 after the last. Each is queued once, also by two calls, and
        when two jobs that it waited for end together, where RQ queues it twice.
        """
        key = job_key(claimed.job_id)
        ended_as: Any = self._client.hget(key, "ended_as")
        if ended_as is None:  # closed already, by whoever took it over
            return 0
        found: Any = self._client.sscan(f"{key}:dependents", cursor, count=PAGE)
        following, members = int(found[0]), found[1]
        ended = {"ended_id": claimed.job_id, "ended_as": ended_as.decode()}
        same = {**ended, "now_iso": utcformat(now()), "now_ts": repr(self._clock())}
        ids = [each.decode(errors="replace") for each in members]
        replies = self._call_many([Call("queue_dependent", {"id": each, **same}) for each in ids])
        for each, reply in zip(ids, replies, strict=True):
            if reply < 0:
                _log.error("job %s is not queued: %s", brief(each), _NOT_QUEUED[reply])
        return following

    def close(self, claimed: ClaimedJob) -> None:
        """Let go of an ended job, once its dependents are queued."""
        self._call_many([Call("close", {**claimed.address, **self._holder()})])

    def release(self, held: Sequence[ClaimedJob], mode: Mode, max_deaths: int) -> list[Released]:
        """Put jobs back at the head of their queues.

        Jobs that died too often, or have ended, stay out: this worker holds them now, to end them.
        """
        same = {**self._holder(), "mode": mode, "max_deaths": max_deaths}
        # Each is pushed to the head, so the last goes first.
        last_first = list(reversed(held))
        places = [{**job.address, "left_before": job.left_before, "kind": job.kind} for job in last_first]
        calls = [Call("release", {**place, **same, "new_eid": uuid4().hex}) for place in places]
        replies = self._call_many(calls) if calls else []
        return [self._released(job, reply) for job, reply in zip(last_first, replies, strict=True)]

    def _released(self, job: ClaimedJob, reply: Sequence[Any]) -> Released:
        result, deaths = reply[0], reply[1]
        claimed = None
        if result in (b"exhausted", b"ended"):
            claimed = replace(self._restore(job.queue_name, reply[2]), has_ended=result == b"ended")
        return Released(job.queue_name, job.job_id, deaths, claimed)

    def abandoned(self, queue_names: Sequence[str], period_s: float) -> list[ClaimedJob]:
        """Return jobs whose worker died, for `release`. At most one worker looks at a queue in each period."""
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
                (name, member) for name, members in zip(queue_names, pipe.execute(), strict=True) for member in members
            ]
        found = [(name, *member.decode(errors="replace").rpartition(":")[::2]) for name, member in held]
        with self._client.pipeline(transaction=False) as pipe:
            for _, job_id, execution_id in found:
                pipe.ttl(execution_key(job_id, execution_id))
            left_s = pipe.execute() if found else []
        return [
            ClaimedJob(job_id, execution_id, name, self._worker_name)
            for (name, job_id, execution_id), seconds in zip(found, left_s, strict=True)
            if seconds < 0
        ]

    def adopt(self, queue: str, left: Mapping[tuple[str, str], str]) -> list[tuple[ClaimedJob, str]]:
        """Take over jobs that RQ's own workers left behind; return those that this worker holds then.

        left: why each fails, by its job id and execution id, '' of one that was not begun.
        """
        same = self._holder()
        replies = self._call_many(
            [Call("adopt", {**address(queue, *each), **same, "new_eid": uuid4().hex}) for each in left]
        )
        taken = zip(replies, left.values(), strict=True)
        return [(self._restore(queue, reply[1]), why) for reply, why in taken if reply[0] == b"taken"]

    def show_progress(self, progress: Sequence[tuple[ClaimedJob, Mapping[str, Any]]]) -> list[bool]:
        """Write how far running jobs are; return for each whether it is still ours."""
        calls = [Call("progress", claimed.address, [json.dumps(shown)]) for claimed, shown in progress]
        return [bool(reply) for reply in self._call_many(calls)]
