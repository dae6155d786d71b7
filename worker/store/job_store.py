"""The jobs of some queues as one worker claims, holds and ends them in Redis."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal
from uuid import uuid4

import click
from click.core import ParameterSource
from redis import ConnectionPool, Redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    ExecAbortError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from rq import Queue
from rq.connections import get_connection_kwargs
from rq.defaults import DEFAULT_FAILURE_TTL, DEFAULT_RESULT_TTL
from rq.executions import Execution
from rq.group import Group
from rq.job import Job, JobStatus, _job_stack
from rq.job import Retry as JobRetry
from rq.repeat import Repeat
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.suspension import WORKERS_SUSPENDED
from rq.utils import now, utcformat
from rq.worker.base import BaseWorker
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY

from jobs.common.keys import held_key
from worker.errors import TooLarge
from worker.store.held_job import (
    DEFAULT_MAX_JOB_BYTES,
    MAX_HASH_FIELDS,
    HeldJob,
    check_counts,
    max_hash_bytes,
)
from worker.store.quarantine import NO_EXECUTION, Entry, Quarantine
from worker.store.results import Raised, printable
from worker.store.scripts import Scripts, is_wrong_type

MIN_REDIS_VERSION = (6, 2, 0)

FAR_S = 10 * 365 * 86_400
"""Seconds from now to the score of our entries in rq:wip: no stock cleanup reaches them."""

_MAINTENANCE_LOCK = "tokenmill:maintenance"
_CLAIM_BATCH = 200

Mode = Literal["given_back", "engine_died", "fault", "abandoned"]
EndStatus = Literal["finished", "failed", "stopped"]
FinishReply = Literal["done", "again", "lost", "dependents", "refused"]

_MAX_TTL_S = 10 * 365 * 86_400
"""Redis refuses larger ones, in the middle of a script."""


@dataclass(frozen=True)
class ClaimedJob:
    """A job this worker holds: what to do, and the one execution that may finish it.

    job: its user's code gets this very object, as with RQ, and may leave anything in it.
    """

    job: HeldJob
    execution: Execution
    queue_name: str
    damage: Exception | None = None
    """What RQ's client raised when it read the job's hash; the job can only be failed."""
    has_ended: bool = False
    """Whether its end is written, and only its dependents may wait still."""
    deaths: int = 0
    """How many workers have died with it."""
    left_before: str = ""
    """Id of the last job that its claim left in the queue before it, for want of a place."""
    kind: str = ""
    """FUNCTION or FILE for one that was found to be such and has no place on this worker."""

    @property
    def job_id(self) -> str:
        """The job's id, whatever its code makes of that in its copy."""
        return self.execution.job_id

    @property
    def address(self) -> tuple[str, str, str]:
        """Queue, job id, execution id: how the scripts find it."""
        return self.queue_name, self.job_id, self.execution.id


@dataclass(frozen=True)
class LeftJob:
    """A job that one of RQ's own workers left behind, with the reason to give for its failure.

    execution_id: '' for one that was taken from its queue and not begun.
    """

    queue: str
    job_id: str
    execution_id: str
    reason: str

    @property
    def address(self) -> tuple[str, str, str]:
        """As that of a job that was claimed."""
        return self.queue, self.job_id, self.execution_id


@dataclass(frozen=True)
class Outcome:
    """How a job ended, for `JobStore.finish`."""

    claimed: ClaimedJob
    status: EndStatus
    value: Any
    """The return value of a finished job, the traceback text of another one."""
    ended_at: datetime
    working_s: float
    started_at: datetime | None = None
    """None for one that ended before it began."""
    retries: bool = False
    """Whether a failed job that has retries left takes one."""
    packed: bytes | None = None
    """The value's JSON, once it is to be written; None for a None, too."""

    @property
    def num_bytes(self) -> int:
        """Of the value, as far as it is known."""
        text = self.value if isinstance(self.value, str) and self.status != "finished" else ""
        return len(text if self.packed is None else self.packed)


OUTAGES = (RedisConnectionError, RedisTimeoutError, OutOfMemoryError, ReadOnlyError, ExecAbortError)
"""Errors that say something of the server and nothing of the command: it may be tried again later."""


@dataclass(frozen=True)
class Wanted:
    """A claim on one queue: at most how many sequences' worth of jobs, a token of 24 hex digits, whether
    the worker has nothing else, and at most how many jobs known to be functions, and to be files."""

    queue: str
    most: int
    token: str
    alone: bool
    max_functions: int = _CLAIM_BATCH
    max_files: int = _CLAIM_BATCH


@dataclass(frozen=True)
class Claim:
    """What came of a claim on one queue."""

    jobs: list[ClaimedJob]
    num_foreign: int
    """Jobs that were seen and left in the queue, because they may run on another model only."""


def own_client(connection: Redis, socket_timeout_s: float, resend: bool = False) -> Redis:
    """A client with a pool of its own to the same server.

    resend: send a command again whose reply was lost, as redis-py does for user code with a stock worker.
    Our own callers do that themselves, because only they know which commands bear it.
    """
    pool = connection.connection_pool
    kwargs = get_connection_kwargs(connection)
    kwargs.pop("retry", None)
    retry = Retry(ExponentialBackoff(cap=2.0, base=0.1), 10) if resend else Retry(NoBackoff(), 0)
    kwargs.update(socket_timeout=socket_timeout_s, retry=retry, retry_on_error=[])
    return Redis(connection_pool=ConnectionPool(connection_class=pool.connection_class, **kwargs))


def is_text(raw: bytes) -> bool:
    """Whether bytes that a stranger may have written are UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def names_execution(member: bytes) -> bool:
    """Whether an entry is `<job>:<execution>`."""
    return b":" in member and is_text(member)


class JobStore:
    """The jobs of some queues as one worker claims, holds and ends them in Redis.

    records_failures: False keeps failed jobs out of the registry and without a result, as RQ's
    --disable-default-exception-handler does.
    models: names of the served model; jobs whose field `tokenmill_model` is none of them stay queued.
    default_result_ttl_s: how long results are kept of jobs that do not say.
    Not thread-safe: the I/O thread owns it. Every method raises redis.exceptions.RedisError when the
    server cannot be reached, and every call may then be made again: none doubles an effect.
    """

    def __init__(
        self,
        client: Redis,
        worker_name: str,
        lease_s: int,
        records_failures: bool = True,
        max_job_bytes: int = DEFAULT_MAX_JOB_BYTES,
        models: Sequence[str] = (),
        default_result_ttl_s: int = DEFAULT_RESULT_TTL,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._models, self._default_result_ttl_s = "\n".join(models), default_result_ttl_s
        self._worker_name = worker_name
        self._lease_s = lease_s
        self._records_failures = records_failures
        self._max_job_bytes, self._clock = max_job_bytes, clock
        bounds = {"max_hash_bytes": max_hash_bytes(max_job_bytes), "max_hash_fields": MAX_HASH_FIELDS}
        self._call_many = Scripts(client, worker_name, bounds).call_many
        self.quarantine = Quarantine(client, worker_name)
        self._unanswered: set[str] = set()
        self._answered: set[str] = set()

    def _stamp(self) -> tuple[str, str]:
        return utcformat(now()), repr(self._clock())

    def _restore(self, queue_name: str, reply: Sequence[Any]) -> ClaimedJob:
        job_id, execution_id = reply[0].decode(), reply[1].decode()
        fields = reply[2]
        job = HeldJob(connection=self._client)
        job.serializer = JSONSerializer  # given to the constructor it would be inspected, once for each job
        job.max_bytes = self._max_job_bytes
        job._id = job_id  # unchecked: an id that RQ's client would refuse is still a job to end
        damage, deaths = None, 0
        try:
            values = _values(fields, self._max_job_bytes)
            deaths = int(values.get(b"worker_deaths", 0))
            job.restore(values)
            check_counts(values)
            _check_fields(job)
        except Exception as error:  # noqa: BLE001  # a hash may hold anything; it must not stop the others
            damage = error
        execution = Execution(execution_id, job_id, self._client, worker_name=self._worker_name)
        left_before = reply[3].decode() if len(reply) > 3 else ""
        return ClaimedJob(job, execution, queue_name, damage, deaths=deaths, left_before=left_before)

    def claim(self, wanted: Sequence[Wanted], last_life: float) -> list[Claim]:
        """Claim jobs from several queues in one round trip. last_life: see claim.lua.

        A call that failed may have claimed: make it again with the same tokens.
        """
        tail = (self._worker_name, self._stamp()[1], self._lease_s, repr(self._clock() + FAR_S), last_life)
        calls: list[tuple[str, list[Any]]] = [
            (
                "claim",
                [
                    *(each.queue, min(each.most, _CLAIM_BATCH), each.token, *tail),
                    *(int(each.alone), self._models, each.max_functions, each.max_files),
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
            Claim([self._restore(each.queue, entry) for entry in entries], num_foreign)
            for each, (entries, num_foreign) in zip(wanted, replies, strict=True)
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
        """Write the ends of jobs, each at once or not at all; see finish.lua for the replies.

        "refused": the server can never write this one, because a key of the job is of another type.
        """
        replies = self._call_many([self._finish_call(outcome) for outcome in outcomes], keep_refusals=True)
        return ["refused" if isinstance(reply, RedisError) else reply.decode() for reply in replies]

    def _finish_call(self, outcome: Outcome) -> tuple[str, list[Any]]:
        job, value = outcome.claimed.job, outcome.value
        if isinstance(value, JobRetry):
            if _takes_retry(job, value):
                tries = job.number_of_retries or 0
                when = self._when(JobRetry.get_interval(tries, value.intervals))
                entry = self._entry(outcome, Result.Type.RETRIED)
                return self._retry_call(outcome, [when, "number_of_retries", tries + 1], entry)
            return self._end_call(replace(outcome, status="failed"), Result.Type.MAX_RETRIES_EXCEEDED)
        if outcome.retries and job.should_retry:
            when = self._when(job.get_retry_interval(), front=job.enqueue_at_front_on_retry)
            return self._retry_call(outcome, [when, "retries_left", (job.retries_left or 0) - 1], [])
        finished = outcome.status == "finished"
        return self._end_call(outcome, Result.Type.SUCCESSFUL if finished else Result.Type.FAILED)

    def _when(self, interval_s: Any, front: bool | None = False) -> str | int:
        if wait_s := _interval(interval_s):
            return int(self._clock() + wait_s)
        return "front" if front else "back"

    def _head(self, outcome: Outcome) -> list[Any]:
        started_iso = utcformat(outcome.started_at or outcome.ended_at)
        run = (utcformat(outcome.ended_at), self._worker_name, outcome.working_s, started_iso)
        return [*outcome.claimed.address, *run]

    def _retry_call(self, outcome: Outcome, retry: list[Any], entry: list[Any]) -> tuple[str, list[Any]]:
        ttl_s = outcome.claimed.job.failure_ttl
        kept_s = "" if ttl_s is None else _bounded_ttl(ttl_s)
        return "retry", [*self._head(outcome), *retry, kept_s, *entry]

    def _end_call(self, outcome: Outcome, kind: Result.Type) -> tuple[str, list[Any]]:
        job = outcome.claimed.job
        if outcome.status == "finished":
            kept_s = _bounded_ttl(job.get_result_ttl(self._default_result_ttl_s))
            endless, repeat, is_recorded = "+inf", self._next_run(job), kept_s != 0
        else:
            kept_s = _bounded_ttl(DEFAULT_FAILURE_TTL if job.failure_ttl is None else job.failure_ttl)
            endless, repeat = str(kept_s), ["", ""]  # as RQ scores them: without end by the negative ttl
            is_recorded = self._records_failures or kind is not Result.Type.FAILED
        if not is_recorded:
            left = "0" if outcome.status == "finished" else ""
            return "finish", [*self._head(outcome), outcome.status, left, "", *repeat]
        score = endless if kept_s < 0 else repr(self._clock() + kept_s)
        tail = [outcome.status, kept_s, score, *repeat, *self._entry(outcome, kind)]
        return "finish", [*self._head(outcome), *tail]

    def _next_run(self, job: Job) -> list[Any]:
        """When a finished job that repeats runs again, and how often after that; '' for one that does not."""
        if not job.repeats_left or job.repeats_left < 0:
            return ["", ""]
        left, intervals = job.repeats_left - 1, job.repeat_intervals
        return [self._when(Repeat.get_interval(left, intervals) if intervals else 0), left]

    def _entry(self, outcome: Outcome, kind: Result.Type) -> list[Any]:
        """Fields and values of the entry in rq:results."""
        claimed, failed = outcome.claimed, kind is Result.Type.FAILED
        result = Result(
            claimed.job_id,
            kind,
            connection=self._client,
            return_value=outcome.value if isinstance(outcome.value, JobRetry) else None,
            exc_string=outcome.value if failed else None,
            worker_name=self._worker_name,
            execution_id=claimed.execution.id,
            execution_started_at=outcome.started_at or outcome.ended_at,
            execution_ended_at=outcome.ended_at,
        )
        result.serializer = JSONSerializer  # as in _restore
        fields = result.serialize()
        if not failed and outcome.packed is not None:
            fields["return_value"] = b64encode(outcome.packed)
        return [item for pair in fields.items() for item in pair]

    def close(self, claimed: ClaimedJob) -> None:
        """Let go of a job that has ended, once its dependents are queued."""
        self._call_many([("close", (*claimed.address, self._stamp()[0]))])

    def queue_dependents(self, claimed: ClaimedJob) -> None:
        """Queue the jobs that wait for an ended one and for nothing else.

        Each is queued once: also when this is called again, and when two jobs that it waited for end at the
        same time, where RQ's own way queues it twice.
        """
        job = claimed.job
        ended_as: Any = self._client.hget(job.key, "ended_as")
        if ended_as is None:  # closed already, by whoever took it over
            return
        job.connection, job._status = self._client, JobStatus(ended_as.decode())
        calls = []
        for member in self._dependents(job):
            dependent = self._fetch_dependent(member.decode()) if is_text(member) else None
            if dependent is not None and self._may_run(dependent, job):
                front = int(bool(dependent.enqueue_at_front))
                ids = (dependent.origin, dependent.id, job.id)
                now_iso, now_ts = self._stamp()
                calls.append(("queue_dependent", (*ids, now_iso, front, now_ts)))
        if calls:
            self._call_many(calls, keep_refusals=True)

    def _dependents(self, job: Job) -> Any:
        """Ids of the jobs that wait for this one; none where another type of key stands in their place."""
        try:
            return self._client.smembers(job.dependents_key)
        except RedisError as error:
            if not is_wrong_type(error):
                raise
            return ()

    def _may_run(self, dependent: Job, ended: Job) -> bool:
        """Whether a job waits for nothing but the one that has ended."""
        try:
            # What it has ended as is known here: its status may be that of a copy that was saved since.
            return bool(dependent.dependencies_are_met(parent_job=ended, refresh_job_status=False))
        except RedisError as error:
            if not is_wrong_type(error):
                raise
            return False
        except ValueError:  # a status that is no text: nobody can say whether that job has ended well
            return False

    def _fetch_dependent(self, job_id: str) -> Job | None:
        """What decides when and where a job is queued; None for one that is gone or damaged in that."""
        [fields] = self._call_many([("dependent", [job_id])], keep_refusals=True)
        if isinstance(fields, RedisError) or not fields:
            return None
        try:
            job = Job(job_id, self._client, JSONSerializer)
            job.origin, front, allows_failures = (field.decode() for field in fields)
            job.enqueue_at_front = bool(int(front or 0))
            job.allow_dependency_failures = bool(int(allows_failures or 0))
        except ValueError:  # an id that RQ would refuse, or no text, or no number
            return None
        return job

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
        """Queue jobs again whose worker died; at most one worker looks in each period.

        Returns those that this worker holds now instead, as `release` does.
        """
        if not self._client.set(_MAINTENANCE_LOCK, self._worker_name, nx=True, px=int(period_s * 1000)):
            return []
        with self._client.pipeline(transaction=False) as pipe:
            for name in queue_names:
                pipe.hkeys(held_key(name))
            held = [
                (name, member)
                for name, members in zip(queue_names, pipe.execute(), strict=True)
                for member in members
            ]
        names_nothing = [each for each in held if not names_execution(each[1])]
        self.quarantine.set_aside(
            [Entry(held_key(name).encode(), member, NO_EXECUTION) for name, member in names_nothing]
        )
        found = [(n, *member.decode().rsplit(":", 1)) for n, member in held if names_execution(member)]
        with self._client.pipeline(transaction=False) as pipe:
            for _, job_id, execution_id in found:
                pipe.ttl(f"rq:execution:{job_id}:{execution_id}")
            left_s = pipe.execute() if found else []
        dead = [(address, "", "") for address, s in zip(found, left_s, strict=True) if s < 0]
        return self._release(dead, "abandoned", max_deaths)

    def adopt(self, left: Sequence[LeftJob]) -> list[tuple[ClaimedJob, str]]:
        """Take over jobs that RQ's own workers left behind; return those that this worker holds then."""
        now_ts = self._stamp()[1]
        tail = (self._worker_name, now_ts, self._lease_s, repr(self._clock() + FAR_S))
        calls = [("adopt", (*each.address, now_ts, uuid4().hex, *tail)) for each in left]
        replies = self._call_many(calls, keep_refusals=True)
        return [
            (self._restore(each.queue, reply[1]), each.reason)
            for each, reply in zip(left, replies, strict=True)
            if not isinstance(reply, RedisError) and reply[0] == b"taken"
        ]

    def show_progress(self, shown: Sequence[tuple[ClaimedJob, dict[str, Any]]]) -> None:
        """Write `job.meta` of running jobs."""
        calls = [("progress", (*claimed.address, JSONSerializer.dumps(meta))) for claimed, meta in shown]
        if calls:
            self._call_many(calls, keep_refusals=True)

    def clean_registries(self, queues: Sequence[Queue]) -> None:
        """Drop expired entries of finished and failed jobs, workers that are gone, and members of groups.

        RQ's own cleanup of started jobs is left out: it would judge by score, and runs callbacks. Its own of
        the others ends at the first entry that is no text, or at the first group that is no set.
        """
        groups: Any = self._client.smembers(Group.REDIS_GROUP_KEY)
        for name in groups:
            key = Group.REDIS_GROUP_NAME_PREFIX.encode() + name
            self.quarantine.check((), [("set", key)])
            self._drop_gone(key, Job.redis_job_namespace_prefix)
        self._drop_gone(Group.REDIS_GROUP_KEY, Group.REDIS_GROUP_NAME_PREFIX)
        for queue in queues:
            for registry in (queue.finished_job_registry, queue.failed_job_registry):
                self._client.zremrangebyscore(registry.key, 0, self._clock())
            self._drop_gone(WORKERS_BY_QUEUE_KEY % queue.name)
        self._drop_gone(REDIS_WORKER_KEYS)

    def _drop_gone(self, key: str | bytes, prefix: str = "") -> None:
        """Drop the members of a set of whose own keys, which begin with `prefix`, nothing is left."""
        found: Any = self._client.smembers(key)
        members = list(found)
        for start in range(0, len(members), _CLAIM_BATCH):
            chunk = members[start : start + _CLAIM_BATCH]
            with self._client.pipeline(transaction=False) as pipe:
                for member in chunk:
                    pipe.exists(prefix.encode() + member)
                gone = [m for m, exists in zip(chunk, pipe.execute(), strict=True) if not exists]
            if gone:
                self._client.srem(key, *gone)

    def tend_rate_limits(self) -> None:
        """Let jobs in that wait for the slot of one that was cancelled or deleted, as RQ 3 does."""
        keys: Any = self._client.srandmember("rq:rl-keys", _CLAIM_BATCH)
        now_iso, now_ts = self._stamp()
        self._call_many([("rate_limits", (key, now_iso, now_ts)) for key in keys], keep_refusals=True)

    def count_queued(self, queue_names: Sequence[str]) -> int:
        """Jobs that wait in these queues."""
        with self._client.pipeline(transaction=False) as pipe:
            for name in queue_names:
                pipe.llen(f"rq:queue:{name}")
            return sum(pipe.execute())

    def is_suspended(self) -> bool:
        """Whether `rq suspend` holds all workers."""
        return bool(self._client.exists(WORKERS_SUSPENDED))


class Callbacks:
    """The user's code around the end of a job, called as RQ calls it, and its webhooks.

    It runs in a pool thread with that thread's client.
    """

    def __init__(self, worker: BaseWorker, client: Redis, user_client: Redis, death_penalty: type) -> None:
        self._worker, self._client, self._user_client = worker, client, user_client
        self._death_penalty = death_penalty

    def may_see(self, job: Job) -> bool:
        """Whether user code gets the job, however it ends."""
        return bool(callback_names(job) or self._worker._exc_handlers)

    def has_callback(self, outcome: Outcome) -> bool:
        """Whether user code is to be called when the job ends like this."""
        job = outcome.claimed.job
        if isinstance(outcome.value, JobRetry):
            return False
        if outcome.status == "finished":
            return bool(job._success_callback_name)
        if outcome.status == "stopped":
            return bool(job._stopped_callback_name)
        return bool(job._failure_callback_name or self._worker._exc_handlers)

    def call_back(self, outcome: Outcome, exc_info: Any) -> None:
        """Call the user's code for this end; raises what it raises. exc_info: as of sys.exc_info()."""
        job = outcome.claimed.job
        job.connection = self._user_client
        job.ended_at = outcome.ended_at
        if outcome.status == "finished":
            job._status, job._result = JobStatus.FINISHED, outcome.value
            job.execute_success_callback(self._death_penalty, outcome.value)
        elif outcome.status == "stopped":
            job.execute_stopped_callback(self._death_penalty)
        else:
            job._status = JobStatus.FAILED
            self._handle_failure(job, exc_info)

    def _handle_failure(self, job: Job, exc_info: Any) -> None:
        """Call the failure callback, then the worker's exception handlers, also where the callback raises."""
        failure: BaseException | None = None
        try:
            job.execute_failure_callback(self._death_penalty, *exc_info)
        except BaseException as error:  # noqa: BLE001  # raised again below
            failure, exc_info = error, (type(error), error, error.__traceback__)
        for handler in self._worker._exc_handlers:
            goes_on = handler(job, *exc_info)
            if goes_on is not None and not goes_on:
                break
        if failure is not None:
            raise failure

    def send_webhooks(self, outcome: Outcome) -> None:
        """Tell the hosts that the job has ended; RQ logs what goes wrong there."""
        job = outcome.claimed.job
        job.connection, job.ended_at = self._client, outcome.ended_at
        if isinstance(outcome.value, JobRetry):
            if not _takes_retry(job, outcome.value):
                job.send_webhooks(JobStatus.FAILED, exc_string="")
        elif outcome.status == "finished":
            job.send_webhooks(JobStatus.FINISHED)
        elif outcome.status == "failed" and not (outcome.retries and job.should_retry):
            job.send_webhooks(JobStatus.FAILED, exc_string=outcome.value)


def _takes_retry(job: Job, wish: JobRetry) -> bool:
    """Whether a job that returned a `Retry` runs again."""
    return (job.number_of_retries or 0) < wish.max


def _values(fields: Any, max_job_bytes: int) -> dict[bytes, bytes]:
    """The hash that job_hash.lua returned. Raises TooLarge where it gave its size instead."""
    if isinstance(fields, int):
        limit = max_hash_bytes(max_job_bytes)
        if fields <= limit:
            raise TooLarge(
                f"the job's hash in Redis has more than the limit of {MAX_HASH_FIELDS} fields: enqueue it "
                "again, and keep what is your own in its meta"
            )
        raise TooLarge(
            f"the job takes {fields} bytes in Redis, more than the limit of {limit}: shorten its arguments, "
            "description or meta, or raise TOKENMILL_MAX_JOB_BYTES"
        )
    return dict(zip(fields[::2], fields[1::2], strict=True))


def perform(job: Job) -> Any:
    """Call a job's function as RQ's `Job.perform` does, but for its own first command to Redis: a connection
    that is cut just then would fail the job, and the claim has made its hash persistent already.

    Returns a Raised for what the function raises, its interrupts too.
    """
    _job_stack.push(job)
    try:
        return job._execute()
    except BaseException as error:  # noqa: BLE001  # user code raises what it likes
        return Raised(error, printable(error))
    finally:
        _job_stack.pop()


def _check_fields(job: Job) -> None:
    """Raise where what says when a job runs again, or how long it is kept, is of a wrong kind."""
    if job.should_retry:
        _interval(job.get_retry_interval())
    if job.repeats_left and job.repeats_left > 0:
        for interval_s in job.repeat_intervals or ():
            _interval(interval_s)
    for ttl_s in (job.result_ttl, job.failure_ttl):
        _bounded_ttl(ttl_s or 0)


def sound_outcome(outcome: Outcome) -> Outcome:
    """The outcome, or that of a failed job where its code has left in its copy what no end can be written
    with, such as a text for `result_ttl`: RQ's own worker fails such a job too."""
    job, value = outcome.claimed.job, outcome.value
    try:
        _check_fields(job)
        if isinstance(value, JobRetry) and _takes_retry(job, value):
            _interval(JobRetry.get_interval(job.number_of_retries or 0, value.intervals))
    except Exception as error:  # noqa: BLE001  # a user's object may raise anything
        job.result_ttl = job.failure_ttl = None
        job.retries_left = job.repeats_left = None
        return replace(outcome, status="failed", value=printable(error), retries=False, packed=None)
    return outcome


def _interval(interval_s: Any) -> int:
    """Seconds until a job runs again, as far off as Redis can say. Raises for what is no number."""
    return max(0, min(int(interval_s), _MAX_TTL_S))


def _bounded_ttl(ttl_s: int) -> int:
    return max(-1, min(int(ttl_s), _MAX_TTL_S))


def called_by_rq_command() -> bool:
    """Whether `rq worker` or `rq worker-pool` is the caller, which prints any error's traceback."""
    context = click.get_current_context(silent=True)
    return context is not None and getattr(context.command.callback, "__module__", "").startswith("rq.cli")


def import_path_is_chosen() -> bool:
    """Whether somebody gave RQ's command a `--path`, which is the working directory otherwise."""
    source = click.get_current_context().get_parameter_source("path")
    return source not in (None, ParameterSource.DEFAULT)


def callback_names(job: Job) -> list[tuple[str, str]]:
    """(role, dotted name) of each callback a job carries."""
    named = (
        ("success callback", job._success_callback_name),
        ("failure callback", job._failure_callback_name),
        ("stopped callback", job._stopped_callback_name),
    )
    return [(role, name) for role, name in named if name]


def strip_hooks(job: Job) -> None:
    """Take callbacks, webhooks and retries from a job that is refused, so that none of them runs."""
    strip_callbacks(job)
    job.webhooks = []
    job.retries_left = None


def strip_callbacks(job: Job) -> None:
    """Take a job's callbacks from it, so that none of them runs."""
    job._success_callback_name = job._failure_callback_name = job._stopped_callback_name = None
