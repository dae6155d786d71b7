"""A run's state in Redis: what the CLI shows, and the count that tells the last shard that it is the last.

Nothing here is needed to resume: parts on disk are the truth, and the planner rebuilds these keys from them.

Whoever writes here may have been frozen since it looked, for any time. So each write that rests on a look is
one transaction, which is carried out only while what was looked at is as it was: nobody planned, submitted or
cancelled the run meanwhile (submitting, enqueueing), the job is held (what a planner writes), no other submission
came (cancelling), no part was recorded since (counting).
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, TypeVar, cast

from redis import Redis
from redis.client import Pipeline

from jobs.common import stored
from jobs.common.keys import FORMAT, RUN_TTL_S, RUNS_KEY, run_folder_key, run_key
from jobs.context import Lease
from jobs.errors import RunBusy, RunCancelled, RunResubmitted, UnknownRun
from jobs.runs.redis_state.submission import ASKED_FOR, DEFAULT_LIMIT, ErrorLimit, Submission
from jobs.runs.statistics.run_statistics import COUNTED, PartStats, Reasons

T = TypeVar("T")


def transact(client: Redis, change: Callable[[Pipeline], T], *watched: str) -> T:
    """Return what `change` returns of a pipeline that watches these keys; it is called again where one has changed.

    No scripts: producers make transactions too, and may run none (`ops/redis-users.acl`). change: reads, calls `multi`,
    and queues commands, or executes them where it wants their replies.
    """
    found: Any = client.transaction(change, *watched, value_from_callable=True)  # type: ignore[arg-type]
    return cast("T", found)


#: Of a part as many kinds of reasons are kept, and of a run those of as many parts.
MAX_OF_PART, MAX_PARTS = 5, 1000
#: Fields of a run's hash: what its parts have together.
TOTALS = tuple(f"total_{name}" for name in COUNTED)
#: Fields of the last submission: rows, those with an error and generated tokens of parts recorded since, when work on
#: it began and its last part ended.
OF_SUBMISSION = ("judged_rows", "judged_errors", "judged_tokens", "began_at", "ended_at")

_TOTAL = b"total"

#: Records a part that is not recorded, and counts it, in one step: many shards end at once, and workers are killed.
#: Where Redis lost what the parts before it have together there is no total, and whoever is told so counts them all.
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

PLAN_ERROR = "plan_error"
#: The field that says why few answers of earlier runs were taken.
REUSE_DIFFERS = "reuse_differs"
#: A run's keys live for RUN_TTL_S from its last part on, which may come long after its submission.
LISTED_S = 2 * RUN_TTL_S


def record_reasons(connection: Redis, run: str, shard: int, reasons: Reasons) -> None:
    """Keep a part's reasons; without any, forget what was kept of an earlier one."""
    key = run_key(run, "errors")
    with connection.pipeline() as pipe:
        pipe.hdel(key, str(shard))
        pipe.hlen(key)
        _, length = pipe.execute()
        if reasons.rows and length < MAX_PARTS:
            kept = [[each.text, each.rows, each.examples] for each in reasons.commonest(MAX_OF_PART)]
            pipe.hset(key, str(shard), json.dumps(kept))
            pipe.expire(key, RUN_TTL_S)
            pipe.execute()


def recorded_reasons(connection: Redis, run: str) -> Reasons:
    """Return what is kept of a run's parts: of more than MAX_PARTS with errors not of all."""
    found: Any = connection.hgetall(run_key(run, "errors"))
    reasons = Reasons()
    for record in islice(found.values(), 2 * MAX_PARTS):
        for text, count, rows in json.loads(record):
            reasons.add(text, rows, count)
    return reasons


@dataclass(frozen=True)
class PartCount:
    """Shards with a recorded part, all shards, None when Redis lost them, and those failed for good."""

    done: int
    total: int | None
    failed: int = 0

    @classmethod
    def of(cls, length: int, total: bytes | None, failed: int) -> Self:
        """Return what the keys say. length: of the parts' hash."""
        return cls(length, None, failed) if total is None else cls(length - 1, int(total), failed)

    @property
    def is_whole(self) -> bool:
        """Whether each shard has a part."""
        return self.total is not None and self.done >= self.total


class RunState:
    """The keys of one run. lease: of the job that writes what a planner writes, where it may lose it."""

    def __init__(self, connection: Redis, run: str, lease: Lease | None = None) -> None:
        self.connection = self._redis = connection
        self.run, self._lease = run, lease
        self._key, self._parts_key, self._failed_key = run_key(run), run_key(run, "parts"), run_key(run, "failed")
        self._turn_key = run_key(run, "turn")
        self._record = connection.register_script(_RECORD)

    def describe(self, facts: Mapping[str, str | int]) -> None:
        """Store facts of the plan, or why there is none, for when its job is gone. Raises RunBusy."""

        def write(pipe: Pipeline) -> None:
            pipe.multi()
            self._put(pipe, facts, *(() if PLAN_ERROR in facts else (PLAN_ERROR,)))
            self._list(pipe)

        self._change(write)

    def _list(self, pipe: Pipeline) -> None:
        """Have `pipe` put the run first in the index, which drops those of long ago: it only lists."""
        now_ms = _now_ms()
        pipe.zadd(RUNS_KEY, {self.run: now_ms})
        pipe.zremrangebyscore(RUNS_KEY, "-inf", now_ms - LISTED_S * 1000)
        pipe.expire(RUNS_KEY, LISTED_S)

    def _put(self, pipe: Pipeline, facts: Mapping[Any, Any], *gone: str) -> None:
        """Have `pipe` take some fields out of the run's hash, and write others."""
        if gone:
            pipe.hdel(self._key, *gone)
        pipe.hset(self._key, mapping=dict(facts))
        pipe.expire(self._key, RUN_TTL_S)

    def facts(self) -> dict[str, str]:
        """Return what `describe` stored, and the marks of its end. Raises UnknownRun where Redis has lost it."""
        found = cast("dict[bytes, bytes]", self._redis.hgetall(self._key))
        facts = {stored.text(key): stored.text(value) for key, value in found.items()}
        if not facts.keys() >= {"output", "queue"}:
            raise UnknownRun(self.run)
        return facts

    def submission(self, which: str = "submission") -> int:
        """Return the number of the last submission, greater than all before or cancelled; 0 for none.

        which: "cancelled_submission" is the last one that was cancelled: its jobs, and those before, are told to stop.
        """
        found: Any = self._redis.hget(self._key, which)
        return _number(found)

    def submit(self, pipe: Pipeline, plan_job: str, output: str, submission: Submission, anew: bool = True) -> None:
        """Take back a cancellation or a stop: a new planning job submits the run. anew: False where one is under way.

        Leaves `pipe`, which watches the run's key or its turn, in a transaction that is to be executed. An end stays.
        """
        found: Any = pipe.hmget(self._key, "submission", "cancelled_submission")
        number = max(*map(_number, found), _now_ms()) + 1 if anew else _number(found[0])
        model = {} if submission.model is None else {"plan_model": submission.model}
        limit = {"max_errors": str(submission.limit), "format": FORMAT}
        facts = {"output": output, "queue": submission.queue, "plan_job": plan_job, "submission": number}
        pipe.multi()
        gone = ("cancelled", "stopped", "plan_model", PLAN_ERROR, *OF_SUBMISSION, *ASKED_FOR)
        self._put(pipe, {**facts, **model, **limit, **submission.calls}, *gone)
        pipe.delete(self._failed_key)
        self.take_turn(pipe)
        pipe.set(run_folder_key(output), self.run, ex=RUN_TTL_S)
        self._list(pipe)

    def open_submission(self, plan_job: str, output: str, submission: Submission) -> None:
        """Submit the run with its planning job, unless that did. Raises RunBusy, or RunCancelled where it was since."""

        def enter(pipe: Pipeline) -> None:
            found: Any = pipe.hmget(self._key, "plan_job", "cancelled")
            if found[0] != plan_job.encode():
                self.submit(pipe, plan_job, output, submission)
            elif found[1] is not None:
                pipe.multi()
                pipe.hdel(self._key, "plan_job")  # one that is enqueued once more is a new submission
                pipe.execute()
                raise RunCancelled(self.run)

        self._change(enter, self._key)

    def cancel(self, submission: int, **reason: str) -> None:
        """Mark a submission cancelled, and all before it. reason: `stopped`, where a person did not. Raises
        RunResubmitted when another one came."""

        def mark(pipe: Pipeline) -> None:
            pipe.multi()
            self.mark_cancelled(pipe, submission, **reason)

        self.as_of(submission, mark)

    def mark_cancelled(self, pipe: Pipeline, submission: int, **reason: str) -> None:
        """Have `pipe`, which is in a transaction, mark a submission cancelled, and all before it."""
        # By the clock too: if Redis lost the run, nobody knows to which submission a job belongs.
        number = max(submission, _now_ms())
        self.take_turn(pipe)
        self._put(pipe, {"cancelled": 1, "cancelled_submission": number, **reason})

    def as_of(self, submission: int, change: Callable[[Pipeline], T]) -> T:
        """Make a change, as `write` does, while no later submission came. Raises RunResubmitted."""

        def checked(pipe: Pipeline) -> T:
            found: Any = pipe.hget(self._key, "submission")
            if _number(found) != submission:
                raise RunResubmitted(self.run)
            return change(pipe)

        return transact(self._redis, checked, self._key)

    def begin(self, moment: float) -> None:
        """Note when work on the submission began, if nobody has. Raises RunCancelled."""
        with self._redis.pipeline() as pipe:
            pipe.hexists(self._key, "cancelled")
            pipe.hsetnx(self._key, "began_at", str(moment))
            is_cancelled, _ = pipe.execute()
        if is_cancelled:
            raise RunCancelled(self.run)

    def is_cancelled(self) -> bool:
        return bool(self._redis.hexists(self._key, "cancelled"))

    def judge(self, *, is_whole: bool = False, client: Redis | None = None) -> tuple[str, int] | None:
        """Return why the run must stop, and the submission whose limit says so; None if the run goes on.

        Judged are the parts recorded since it was submitted. is_whole: every shard has a part, and all parts are
        judged, so that it does not matter which came last. client: reads, such as a pipeline that watches the run.
        """
        counted = ("total_rows", "total_errors") if is_whole else OF_SUBMISSION[:2]
        fields: Any = (client or self._redis).hmget(self._key, *counted, "max_errors", "submission")
        rows, errors, text, submission = fields
        limit = ErrorLimit.stored(stored.text(text) if text else None)
        # A limit that somebody set holds for runs of any size. The default limit stops no small run.
        judges_few = is_whole and limit != DEFAULT_LIMIT
        told = limit.told(_number(rows), _number(errors), judges_few=judges_few)
        if told is None:
            return None
        reason = f"{told}, then submit another input, or the same again with a higher limit to resume"
        return reason, _number(submission)

    def record_failed(self, shard: int) -> PartCount:
        """Record that a shard without a part has failed for good. Raises RunBusy where the lease is lost."""

        def record(pipe: Pipeline) -> PartCount:
            has_part = pipe.hexists(self._parts_key, str(shard))
            pipe.multi()
            if not has_part:
                pipe.sadd(self._failed_key, shard)
                pipe.expire(self._failed_key, RUN_TTL_S)
            pipe.hlen(self._parts_key)
            pipe.hget(self._parts_key, _TOTAL)
            pipe.scard(self._failed_key)
            return PartCount.of(*pipe.execute()[-3:])

        return self._change(record, self._parts_key)

    def mark_finished(self, manifest: Mapping[str, Any]) -> None:
        """Note the run's end. manifest: what it says of all parts; {} where others have written it."""
        facts = {f"total_{name}": manifest[name] for name in COUNTED if manifest}
        if manifest:
            facts["worked_s"] = str(manifest["statistics"]["working_seconds"])
        with self._redis.pipeline() as pipe:
            self._put(pipe, {"finished": 1, **facts})
            pipe.execute()

    def unmark_finished(self, has_ended: Callable[[], bool]) -> None:
        """Take a mark away that the folder does not bear out, such as an earlier folder's. Raises RunBusy.

        has_ended: looks there. Whoever ends the run meanwhile sets the mark behind that look, and it stays.
        """

        def unmark(pipe: Pipeline) -> None:
            if pipe.hexists(self._key, "finished") and not has_ended():
                pipe.multi()
                pipe.hdel(self._key, "finished")

        self._change(unmark, self._key)

    def record_part(self, stats: PartStats) -> PartCount:
        """Record a finished shard, unless it is recorded, and add it to the run's totals."""
        since = (stats.rows, stats.errors, stats.generated_tokens)
        told = {
            "shard": str(stats.shard),
            "record": stats.to_record(),
            "counts": {**_counts(stats), **dict(zip(OF_SUBMISSION, since, strict=False))},
            "newest": TOTALS[-1],
            "ended_at": str(stats.ended_at),
            "ttl_s": RUN_TTL_S,
        }
        found: Any = self._record(keys=(self._parts_key, self._key, self._failed_key), args=[json.dumps(told)])
        return PartCount.of(*found)

    def amend_parts(self, found: Mapping[int, PartStats], gone: Mapping[int, bytes], total: int) -> PartCount:
        """Add parts that a listing found and drop those `gone` whose record is as before the listing."""

        names = [str(shard) for shard in (*found, *gone)]

        def amend(pipe: Pipeline) -> PartCount:
            is_lost = self._is_lost(pipe)  # then all that is there is among those found
            now: Any = pipe.hmget(self._parts_key, names) if names and not is_lost else []
            there = dict(zip((*found, *gone), now, strict=False))
            new = [each for shard, each in found.items() if there.get(shard) is None]
            dropped = [shard for shard, record in gone.items() if there.get(shard) == record]
            counts = Counter(dict.fromkeys(TOTALS, 0))
            for each in new:
                counts.update(_counts(each))
            for shard in dropped:
                counts.subtract(_counts(PartStats.from_text(gone[shard])))
            pipe.multi()
            if is_lost:
                pipe.delete(self._parts_key)
                pipe.hdel(self._key, *TOTALS)
            if dropped:
                pipe.hdel(self._parts_key, *map(str, dropped))
            for name, count in counts.items():
                pipe.hincrby(self._key, name, count)
            records: dict[Any, Any] = {str(each.shard): each.to_record() for each in new}
            pipe.hset(self._parts_key, mapping={_TOTAL: total, **records})
            pipe.expire(self._parts_key, RUN_TTL_S)
            pipe.hlen(self._parts_key)
            *_, length = pipe.execute()
            return PartCount(length - 1, total)

        return self._change(amend, self._parts_key)

    def records(self) -> dict[int, bytes]:
        """Return what is kept of each part; nothing once Redis has lost the run, whatever was recorded since."""
        found = cast("dict[bytes, bytes]", {} if self._is_lost(self._redis) else self._redis.hgetall(self._parts_key))
        return {int(field): record for field, record in found.items() if field.isdigit()}

    def _is_lost(self, client: Redis) -> bool:
        """Whether Redis has lost how many parts there are, or what these have together, or others have written that."""
        found: Any = [client.hget(self._parts_key, _TOTAL), *cast("list[Any]", client.hmget(self._key, TOTALS))]
        return any(stored.count(stored.text(each or b"")) is None for each in found)

    def recorded(self) -> set[int]:
        """Return the shards that have a part."""
        return {int(field) for field in cast("list[bytes]", self._redis.hkeys(self._parts_key)) if field.isdigit()}

    def parts_of(self, shards: Sequence[int]) -> dict[int, PartStats]:
        found: Any = self._redis.hmget(self._parts_key, [str(shard) for shard in shards]) if shards else []
        return {shard: PartStats.from_text(each) for shard, each in zip(shards, found, strict=True) if each is not None}

    def write(self, change: Callable[[Pipeline], T], *watched: str) -> T:
        """Make a change with no planner, submission or cancel between it and its looks. Raises RunBusy."""
        return self._change(change, self._turn_key, *watched)

    def take_turn(self, pipe: Pipeline) -> None:
        """Have others who `write` look again once `pipe` is executed."""
        pipe.set(self._turn_key, "", ex=RUN_TTL_S)

    def _change(self, change: Callable[[Pipeline], T], *watched: str) -> T:
        """Make a change while the job is held that the lease is of, where there is one."""
        lease = self._lease
        if lease is None:
            return transact(self._redis, change, *watched)

        def checked(pipe: Pipeline) -> T:
            if pipe.zscore(lease.key, lease.member) is None:
                raise RunBusy(self.run)
            return change(pipe)

        return transact(self._redis, checked, lease.key, *watched)


def _counts(part: PartStats) -> dict[str, int]:
    return {f"total_{name}": getattr(part, name) for name in COUNTED}


def _number(raw: bytes | None) -> int:
    return int(raw or 0)


def _now_ms() -> int:
    return int(time.time() * 1000)
