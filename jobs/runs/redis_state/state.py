"""Keeps a run's state in Redis: the facts that the CLI shows, and the count of parts, which tells when the run ends.

Resuming a run needs none of these keys. The parts on disk are the truth, and the planner rebuilds the keys from them.

A process may be frozen for any time between a read and a write. So each write that depends on a read is one
transaction, which is carried out only under a condition:
- A submission, or a planner that enqueues jobs: nobody has planned, submitted or cancelled the run meanwhile.
- Any other write of a planner: the planner's worker still has the planning job.
- A cancel: the run was not submitted again meanwhile.
- A recount of the parts in the folder, or the record of a failed shard: no part was recorded meanwhile.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Self, TypeVar, cast

from redis import Redis
from redis.client import Pipeline

from jobs.common import stored
from jobs.common.display import safe_name
from jobs.common.keys import FORMAT, RUN_TTL_S, RUNS_KEY, run_folder_key, run_key
from jobs.context import Lease
from jobs.errors import RunBusy, RunCancelled, RunResubmitted, UnknownRun
from jobs.runs.redis_state.submission import (
    DEADLINE,
    DEFAULT_LIMIT,
    NOTICES,
    PRIORITY,
    ErrorLimit,
    Submission,
)
from jobs.runs.statistics.run_statistics import COUNTED, PartStats, Reasons

T = TypeVar("T")


def transact(client: Redis, change: Callable[[Pipeline], T], *watched: str) -> T:
    """Call `change` with a pipeline that watches these keys, and return its result.

    `change` reads, calls `multi`, and queues commands. It may execute the pipeline if it needs the replies. If another
    client changes a watched key meanwhile, `change` is called again.
    """
    # A script would be shorter. But producers make transactions too, and may not run scripts (ops/redis-users.acl).
    result: Any = client.transaction(change, *watched, value_from_callable=True)  # type: ignore[arg-type]
    return cast("T", result)


#: The most reasons that are kept for a part.
MAX_OF_PART = 5
#: The most parts of a run whose reasons are kept.
MAX_PARTS = 1000
#: Fields of a run's hash: the totals of its parts.
TOTALS = tuple(f"total_{name}" for name in COUNTED)
#: Fields of a run's hash about its last submission. The judged numbers are sums over the parts that were recorded since
#: the submission. The times say when work on the submission began, and when its last part ended.
SUBMISSION_TOTALS = ("judged_rows", "judged_errors", "judged_tokens", "began_at", "ended_at")

_TOTAL = b"total"

#: Records and counts a part, unless the part is recorded already. This is one script, because many shards end at once,
#: and workers may be killed. If Redis has lost the totals of earlier parts, the script returns no total. Then the
#: caller counts all parts.
_RECORD = """
local args, parts, run, failed = cjson.decode(ARGV[1]), KEYS[1], KEYS[2], KEYS[3]
local total = redis.call('HEXISTS', run, args.newest) == 1 and redis.call('HGET', parts, 'total')
if redis.call('HSETNX', parts, args.shard, args.record) == 1 then
  for name, count in pairs(args.counts) do
    redis.pcall('HINCRBY', run, name, count)
  end
  redis.call('HSET', run, 'ended_at', args.ended_at)
end
redis.call('EXPIRE', parts, args.ttl_s)
redis.call('EXPIRE', run, args.ttl_s)
redis.call('SREM', failed, args.shard)
if not total then redis.call('HDEL', run, args.newest) end
return {redis.call('HLEN', parts), total, redis.call('SCARD', failed)}
"""

#: The field that says why planning made no plan.
PLAN_ERROR = "plan_error"
#: The field that says who submitted the run last.
SUBMITTED_BY = "submitted_by"
#: The field that says why few answers of earlier runs were taken.
REUSE_DIFFERS = "reuse_differs"
#: How long after its submission a run is listed. This is longer than RUN_TTL_S, because the run's keys live for
#: RUN_TTL_S after its last part.
LISTED_S = 2 * RUN_TTL_S


def record_reasons(connection: Redis, run: str, shard: int, reasons: Reasons) -> None:
    """Store the reasons of a part's errors, in place of the reasons of an earlier part of this shard.

    If the part has no errors, or if MAX_PARTS other parts have reasons, the earlier reasons are only removed.
    """
    key = run_key(run, "errors")
    with connection.pipeline() as pipe:
        pipe.hdel(key, str(shard))
        pipe.hlen(key)
        _, num_parts = pipe.execute()
        if reasons.rows and num_parts < MAX_PARTS:
            commonest = reasons.commonest(MAX_OF_PART)
            records = [[reason.text, reason.rows, reason.examples] for reason in commonest]
            pipe.hset(key, str(shard), json.dumps(records))
            pipe.expire(key, RUN_TTL_S)
            pipe.execute()


def recorded_reasons(connection: Redis, run: str) -> Reasons:
    """Return why rows of a run have errors. Some reasons are missing if more than MAX_PARTS parts have errors."""
    reasons_of_parts: Any = connection.hgetall(run_key(run, "errors"))
    reasons = Reasons()
    # Parts that end at the same time may exceed MAX_PARTS a little.
    for reasons_text in islice(reasons_of_parts.values(), 2 * MAX_PARTS):
        for reason, count, examples in json.loads(reasons_text):
            reasons.add(reason, examples, count)
    return reasons


def submitted_by(connection: Redis, run: str) -> str:
    """Return who submitted a run last, safe to show; "" if that is not known."""
    name: Any = connection.hget(run_key(run), SUBMITTED_BY)
    return safe_name(name or "")


@dataclass(frozen=True)
class PartCount:
    """How many of a run's shards are done.

    done: shards with a recorded part. total: all shards; None if Redis has lost their number. failed: shards whose jobs
    have failed for good.
    """

    done: int
    total: int | None
    failed: int = 0

    @classmethod
    def of(cls, length: int, total: bytes | None, failed: int) -> Self:
        """Return the count from a reply of Redis.

        length: the number of fields in the parts' hash. If there is a total, it is one of these fields.
        """
        if total is None:
            return cls(done=length, total=None, failed=failed)
        return cls(done=length - 1, total=int(total), failed=failed)

    @property
    def has_all_parts(self) -> bool:
        """Whether each shard has a part."""
        return self.total is not None and self.done >= self.total


class Verdict(NamedTuple):
    """The finding that a run must stop. reason: why, for people. submission: the number of the submission to stop."""

    reason: str
    submission: int


class RunState:
    """Reads and writes the keys of one run.

    lease: the lease of the job that writes. With a lease, methods that raise RunBusy write only while the worker still
    has the job.
    """

    def __init__(self, connection: Redis, run: str, lease: Lease | None = None) -> None:
        self.connection = connection
        self.run = run
        self._lease = lease
        self._key = run_key(run)
        self._parts_key = run_key(run, "parts")
        self._failed_key = run_key(run, "failed")
        # Each planner, submission and cancel writes this key, so that `write` notices them.
        self._turn_key = run_key(run, "turn")
        self._record_script = connection.register_script(_RECORD)

    def describe(self, facts: Mapping[str, str | int]) -> None:
        """Store facts about the plan, or why there is no plan (PLAN_ERROR). Raises RunBusy."""
        outdated = [] if PLAN_ERROR in facts else [PLAN_ERROR]  # a plan removes an earlier error

        def write(pipe: Pipeline) -> None:
            """Write the facts, and put the run first in the list of runs."""
            pipe.multi()
            self._put(pipe, facts, *outdated)
            self._list_run(pipe)

        self._change(write)

    def _list_run(self, pipe: Pipeline) -> None:
        """Have `pipe` put the run first in the list of runs, and drop old runs from the list."""
        now_ms = _now_ms()
        pipe.zadd(RUNS_KEY, {self.run: now_ms})
        pipe.zremrangebyscore(RUNS_KEY, "-inf", now_ms - LISTED_S * 1000)
        pipe.expire(RUNS_KEY, LISTED_S)

    def _put(self, pipe: Pipeline, facts: Mapping[Any, Any], *outdated: str) -> None:
        """Have `pipe` remove the fields `outdated` from the run's hash, and write `facts`."""
        if outdated:
            pipe.hdel(self._key, *outdated)
        pipe.hset(self._key, mapping=dict(facts))
        pipe.expire(self._key, RUN_TTL_S)

    def facts(self) -> dict[str, str]:
        """Return all fields of the run's hash, as texts. Raises UnknownRun if Redis has lost the run."""
        fields = cast("dict[bytes, bytes]", self.connection.hgetall(self._key))
        facts = {stored.text(name): stored.text(value) for name, value in fields.items()}
        if "output" not in facts or "queue" not in facts:
            raise UnknownRun(self.run)
        return facts

    def submission(self) -> int:
        """Return the number of the last submission; 0 if there is none. Later submissions have greater numbers."""
        number: Any = self.connection.hget(self._key, "submission")
        return _number(number)

    def cancelled_submission(self) -> int:
        """Return the number of the last cancelled submission; 0 if there is none.

        Jobs of this submission and of earlier ones must stop.
        """
        number: Any = self.connection.hget(self._key, "cancelled_submission")
        return _number(number)

    def submit(
        self,
        pipe: Pipeline,
        plan_job: str,
        output: str,
        submission: Submission,
        *,
        is_new: bool = True,
        by: str = "",
    ) -> None:
        """Submit the run with a planning job.

        A cancelled run is no longer cancelled after that. A finished run stays finished.
        pipe: watches the run's hash, or the key that `write` watches. This method begins a transaction, which the
        caller must execute.
        is_new: False if the run is being planned already. Then this submission gets the number of the last submission.
        by: who submits the run; "" if that is not known.
        """
        numbers: Any = pipe.hmget(self._key, "submission", "cancelled_submission")
        last_number, cancelled_number = map(_number, numbers)
        number = last_number
        if is_new:
            # Redis may have lost the numbers of earlier submissions. Numbers are made from the clock, so the present
            # time is never below a lost number.
            number = max(last_number, cancelled_number, _now_ms()) + 1

        facts = {
            "output": output,
            "plan_job": plan_job,
            "submission": number,
            "format": FORMAT,
            **_submission_facts(submission),
        }
        if by:
            facts[SUBMITTED_BY] = by

        pipe.multi()
        self._put(pipe, facts, *_OUTDATED_BY_SUBMISSION)
        pipe.delete(self._failed_key)
        self.restart_writes(pipe)
        pipe.set(run_folder_key(output), self.run, ex=RUN_TTL_S)
        self._list_run(pipe)

    def open_submission(self, plan_job: str, output: str, submission: Submission) -> None:
        """Submit the run on behalf of its planning job, if the job was enqueued without a submission.

        Raises RunBusy, or RunCancelled if the job's submission was cancelled.
        """

        def submit_once(pipe: Pipeline) -> None:
            """Write the submission unless the run has it already. Raises RunCancelled if the run was cancelled."""
            fields: Any = pipe.hmget(self._key, "plan_job", "cancelled")
            known_plan_job, cancelled = fields
            if known_plan_job != plan_job.encode():
                self.submit(pipe, plan_job, output, submission)
            elif cancelled is not None:
                pipe.multi()
                # Without this field, the job makes a new submission if somebody enqueues it once more.
                pipe.hdel(self._key, "plan_job")
                pipe.execute()
                raise RunCancelled(self.run)

        self._change(submit_once, self._key)

    def cancel(self, submission: int, **reason: str) -> None:
        """Mark a submission and all earlier ones cancelled. Raises RunResubmitted if a later submission came.

        reason: `stopped="why"` if the run was stopped because of its errors. Empty if a person cancelled it.
        """

        def mark(pipe: Pipeline) -> None:
            """Mark the submission cancelled, in a transaction."""
            pipe.multi()
            self.mark_cancelled(pipe, submission, **reason)

        self.change_if_last(submission, mark)

    def mark_cancelled(self, pipe: Pipeline, submission: int, **reason: str) -> None:
        """Have `pipe`, which is in a transaction, mark a submission and all earlier ones cancelled."""
        # `submit` makes the numbers of submissions from the clock. If Redis lost the run, `submission` may be too low.
        # No number that was given so far is higher than the present time.
        number = max(submission, _now_ms())
        self.restart_writes(pipe)
        self._put(pipe, {"cancelled": 1, "cancelled_submission": number, **reason})

    def change_if_last(self, submission: int, change: Callable[[Pipeline], T]) -> T:
        """Make a change as one transaction if `submission` is the run's last one. Return the result of `change`.

        change: see `transact`. Raises RunResubmitted if a later submission came.
        """

        def checked(pipe: Pipeline) -> T:
            """Make the change unless a later submission came."""
            last_submission: Any = pipe.hget(self._key, "submission")
            if _number(last_submission) != submission:
                raise RunResubmitted(self.run)
            return change(pipe)

        return transact(self.connection, checked, self._key)

    def begin(self, moment: float) -> float | None:
        """Note when work on the submission began, unless that is noted already. Raises RunCancelled.

        moment: Unix seconds. Returns the submission's deadline in Unix seconds; None if it has none.
        """
        with self.connection.pipeline() as pipe:
            pipe.hexists(self._key, "cancelled")
            pipe.hget(self._key, DEADLINE)
            pipe.hsetnx(self._key, "began_at", str(moment))
            is_cancelled, deadline, _ = pipe.execute()
        if is_cancelled:
            raise RunCancelled(self.run)
        return stored.seconds(stored.text(deadline or b""))

    def deadline(self) -> float | None:
        """Return the last submission's deadline in Unix seconds; None without a deadline."""
        text: Any = self.connection.hget(self._key, DEADLINE)
        return stored.seconds(stored.text(text or b""))

    def is_cancelled(self) -> bool:
        """Whether the last submission was cancelled or stopped."""
        return bool(self.connection.hexists(self._key, "cancelled"))

    def judge(self, *, has_all_parts: bool = False, client: Redis | None = None) -> Verdict | None:
        """Return why the run must stop because of its errors; None if it goes on.

        Rows that were not begun before the deadline do not count.
        has_all_parts: whether every shard has a part. If so, all parts are judged; otherwise, the parts that were
        recorded since the submission.
        client: used for reading, such as a pipeline that watches the run; by default the connection.
        """
        if client is None:
            client = self.connection
        if has_all_parts:
            totals: Any = client.hmget(self._key, "total_rows", "total_errors", "total_expired")
            rows, errors, expired = map(_number, totals)
            rows -= expired
            errors -= expired
        else:
            judged: Any = client.hmget(self._key, "judged_rows", "judged_errors")
            rows, errors = map(_number, judged)
        fields: Any = client.hmget(self._key, "max_errors", "submission")
        limit_bytes, submission = fields
        limit_text = stored.text(limit_bytes) if limit_bytes else None
        limit = ErrorLimit.from_stored(limit_text)
        # When all parts are there, a limit that a person set counts for runs of any size. The default limit stops no
        # small run.
        judges_few = has_all_parts and limit != DEFAULT_LIMIT
        excess = limit.excess(rows, errors, judges_few=judges_few)
        if excess is None:
            return None
        # `excess` ends by saying where to look. "then" says what to do after that.
        reason = (
            f"{excess}, then submit another input, or the same again with a higher limit to resume"
        )
        return Verdict(reason, _number(submission))

    def record_failed(self, shard: int) -> PartCount:
        """Record that a shard without a part has failed for good. Raises RunBusy if the lease is lost."""

        def record(pipe: Pipeline) -> PartCount:
            """Add the shard to the failed shards unless it has a part, and return the count."""
            has_part = pipe.hexists(self._parts_key, str(shard))
            pipe.multi()
            if not has_part:
                pipe.sadd(self._failed_key, shard)
                pipe.expire(self._failed_key, RUN_TTL_S)
            pipe.hlen(self._parts_key)
            pipe.hget(self._parts_key, _TOTAL)
            pipe.scard(self._failed_key)
            *_, length, total, failed = pipe.execute()
            return PartCount.of(length, total, failed)

        return self._change(record, self._parts_key)

    def mark_finished(self, manifest: Mapping[str, Any]) -> None:
        """Mark the run finished, with the totals of its manifest.

        manifest: {} if another worker has written the manifest.
        """
        facts: dict[str, Any] = {"finished": 1}
        if manifest:
            facts |= {f"total_{name}": manifest[name] for name in COUNTED}
            facts["worked_s"] = str(manifest["statistics"]["working_seconds"])
        with self.connection.pipeline() as pipe:
            self._put(pipe, facts)
            pipe.execute()

    def unmark_finished(self, has_success: Callable[[], bool]) -> None:
        """Remove the field "finished" from Redis if _SUCCESS was deleted from the run's folder. Raises RunBusy.

        A worker that ends the run later writes the field and _SUCCESS again.
        has_success: returns whether the folder has _SUCCESS.
        """

        def unmark(pipe: Pipeline) -> None:
            """Remove the field if the folder has no _SUCCESS."""
            if pipe.hexists(self._key, "finished") and not has_success():
                pipe.multi()
                pipe.hdel(self._key, "finished")

        self._change(unmark, self._key)

    def record_part(self, stats: PartStats) -> PartCount:
        """Record a finished shard and add it to the run's totals, unless it is recorded already."""
        arguments = {
            "shard": str(stats.shard),
            "record": stats.to_record(),
            "counts": {
                **_counts(stats),
                "judged_rows": stats.rows - stats.expired,
                "judged_errors": stats.errors - stats.expired,
                "judged_tokens": stats.generated_tokens,
            },
            # The script checks that Redis has this total. An older version does not write it, and then all totals count
            # as lost.
            "newest": TOTALS[-1],
            "ended_at": str(stats.ended_at),
            "ttl_s": RUN_TTL_S,
        }
        keys = (self._parts_key, self._key, self._failed_key)
        reply: Any = self._record_script(keys=keys, args=[json.dumps(arguments)])
        return PartCount.of(*reply)

    def amend_parts(
        self, unrecorded: Mapping[int, PartStats], gone: Mapping[int, bytes], total: int
    ) -> PartCount:
        """Record the parts that a listing found, and drop the records of parts that it did not find. Raises RunBusy.

        unrecorded: the parts that were found and had no record.
        gone: the records of parts that were not found. A record that has changed since the listing stays.
        total: the number of the run's shards.
        """

        def amend(pipe: Pipeline) -> PartCount:
            """Compare the listing with the present records, and write what differs."""
            # If Redis has lost the totals, the old records are dropped, and the parts in `unrecorded` are recorded.
            # These are all parts then, because `records` returns nothing without the totals.
            lacks_totals = self._lacks_totals(pipe)
            records: dict[int, bytes] = {}
            if not lacks_totals:
                records = self._records_of(pipe, [*unrecorded, *gone])
            fields: dict[Any, Any] = {_TOTAL: total}
            added_parts = []
            for shard, stats in unrecorded.items():
                if shard not in records:
                    fields[str(shard)] = stats.to_record()
                    added_parts.append(stats)
            dropped_fields = []
            dropped_parts = []
            for shard, record in gone.items():
                if records.get(shard) == record:
                    dropped_fields.append(str(shard))
                    dropped_parts.append(PartStats.from_text(record))

            pipe.multi()
            if lacks_totals:
                pipe.delete(self._parts_key)
                pipe.hdel(self._key, *TOTALS)
            if dropped_fields:
                pipe.hdel(self._parts_key, *dropped_fields)
            for name, change in _changes_of_totals(added_parts, dropped_parts).items():
                pipe.hincrby(self._key, name, change)
            pipe.hset(self._parts_key, mapping=fields)
            pipe.expire(self._parts_key, RUN_TTL_S)
            pipe.hlen(self._parts_key)
            *_, length = pipe.execute()
            num_parts = length - 1  # one field of the hash is the total
            return PartCount(num_parts, total)

        return self._change(amend, self._parts_key)

    def records(self) -> dict[int, bytes]:
        """Return the record of each part, by shard.

        If Redis has lost the run's totals, the mapping is empty, so that all parts are recorded anew.
        """
        if self._lacks_totals(self.connection):
            return {}
        fields = cast("dict[bytes, bytes]", self.connection.hgetall(self._parts_key))
        return {int(field): record for field, record in fields.items() if field.isdigit()}

    def _lacks_totals(self, client: Redis) -> bool:
        """Whether Redis lacks the number of shards or one of the totals. A text that is no number counts as missing."""
        fields: Any = [client.hget(self._parts_key, _TOTAL)]
        fields += cast("list[Any]", client.hmget(self._key, TOTALS))
        counts = [stored.count(stored.text(field or b"")) for field in fields]
        return None in counts

    def recorded_shards(self) -> set[int]:
        """Return the shards that have a part."""
        fields = cast("list[bytes]", self.connection.hkeys(self._parts_key))
        return {int(field) for field in fields if field.isdigit()}

    def parts_of(self, shards: Sequence[int]) -> dict[int, PartStats]:
        """Return the statistics of the shards' parts, by shard. Shards without a part are left out."""
        records = self._records_of(self.connection, shards)
        return {shard: PartStats.from_text(record) for shard, record in records.items()}

    def _records_of(self, client: Redis, shards: Sequence[int]) -> dict[int, bytes]:
        """Return the records of the shards' parts, by shard. Shards without a record are left out."""
        if not shards:
            return {}
        fields: Any = client.hmget(self._parts_key, [str(shard) for shard in shards])
        records = {}
        for shard, record in zip(shards, fields, strict=True):
            if record is not None:
                records[shard] = record
        return records

    def write(self, change: Callable[[Pipeline], T], *watched: str) -> T:
        """Make a change as one transaction, as `transact` does, and return the result of `change`. Raises RunBusy.

        `change` is called again if a planner, submission or cancel has changed the run meanwhile.
        """
        return self._change(change, self._turn_key, *watched)

    def restart_writes(self, pipe: Pipeline) -> None:
        """Have `pipe` change the key that `RunState.write` watches. Then each `write` under way starts over."""
        pipe.set(self._turn_key, "", ex=RUN_TTL_S)

    def _change(self, change: Callable[[Pipeline], T], *watched: str) -> T:
        """Make a change by `transact`. Raises RunBusy if there is a lease and it is lost."""
        lease = self._lease
        if lease is None:
            return transact(self.connection, change, *watched)

        def checked(pipe: Pipeline) -> T:
            """Make the change unless the worker has lost the job."""
            if pipe.zscore(lease.key, lease.execution_id) is None:
                raise RunBusy(self.run)
            return change(pipe)

        return transact(self.connection, checked, lease.key, *watched)


#: Fields of a run's hash that a new submission removes, before it writes its own facts.
_OUTDATED_BY_SUBMISSION = (
    "cancelled",
    "stopped",
    "plan_model",
    SUBMITTED_BY,
    DEADLINE,
    PRIORITY,
    PLAN_ERROR,
    *SUBMISSION_TOTALS,
    *NOTICES,
)


def _submission_facts(submission: Submission) -> dict[str, str | int]:
    """Return a submission's arguments as fields of its run's hash."""
    facts: dict[str, str | int] = {
        "queue": submission.queue,
        "max_errors": str(submission.limit),
        **submission.calls,
    }
    if submission.model is not None:
        facts["plan_model"] = submission.model
    if submission.deadline is not None:
        facts[DEADLINE] = str(submission.deadline)
    if submission.priority != 1:
        facts[PRIORITY] = submission.priority
    return facts


def _counts(part: PartStats) -> dict[str, int]:
    """Return a part's numbers, by the names of their totals in the run's hash."""
    return {f"total_{name}": getattr(part, name) for name in COUNTED}


def _changes_of_totals(
    added_parts: Iterable[PartStats], dropped_parts: Iterable[PartStats]
) -> Mapping[str, int]:
    """Return by how much each total of a run changes, by the total's field.

    Changes of 0 are returned too, so that each total's field is written.
    """
    changes = Counter(dict.fromkeys(TOTALS, 0))
    for part in added_parts:
        changes.update(_counts(part))
    for part in dropped_parts:
        changes.subtract(_counts(part))
    return changes


def _number(raw: bytes | None) -> int:
    """Return the number in a field; 0 if the field is missing."""
    return int(raw or 0)


def _now_ms() -> int:
    """Return the time in milliseconds since 1970."""
    return int(time.time() * 1000)
