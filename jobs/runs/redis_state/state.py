"""A run's state in Redis: what the CLI shows, and the count that tells the last shard that it is the last.

Nothing here is needed to resume: parts on disk are the truth, and the planner rebuilds these keys from them.

Whoever writes here may have been frozen since it looked, for any time. So each write that rests on a look is
one transaction, which is carried out only while what was looked at is as it was: nobody planned, submitted or
cancelled the run meanwhile (submitting, enqueueing), the job is held (what a planner writes), no other submission
came (cancelling), no part was recorded since (counting).
"""

from __future__ import annotations

import json
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar, cast

from redis import Redis
from redis.client import Pipeline

from jobs.common import stored
from jobs.common.keys import RUN_TTL_S, RUNS_KEY, run_folder_key, run_key
from jobs.context import Lease
from jobs.errors import RunBusy, RunCancelled, RunResubmitted, UnknownRun
from jobs.runs.redis_state.submission import ASKED_FOR, ErrorLimit, Submission
from jobs.runs.redis_state.transactions import transact
from jobs.runs.statistics.part_stats import COUNTED, PartStats
from jobs.runs.statistics.reasons import Reasons
from jobs.runs.statistics.run_statistics import working_s

T = TypeVar("T")

#: Of a part as many kinds of reasons are kept, and of a run those of as many parts.
MAX_OF_PART, MAX_PARTS = 5, 1000

#: Fields of a run's hash: what its parts have together, which a list of runs need not read.
TOTALS = tuple(f"total_{name}" for name in COUNTED)

#: The same of parts recorded since the last submission: their rows, and those with an error.
JUDGED = ("judged_rows", "judged_errors")

#: What else is of that submission: its generated tokens, when work on it began and its last part ended.
OF_SUBMISSION = (*JUDGED, "judged_tokens", "began_at", "ended_at")

#: The last: for how long workers had shards of the run, whatever the submission, at the last count of all parts.
OF_TIME = (*OF_SUBMISSION[-2:], "worked_s")

_TOTAL = b"total"

#: Parts of a run that one look reads; of a run that has more, the last ones.
MAX_LOOKED = 1000

PLAN_ERROR = "plan_error"

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

    @property
    def is_whole(self) -> bool:
        """Whether each shard has a part."""
        return self.total is not None and self.done >= self.total

    @property
    def has_failed(self) -> bool:
        """Whether nothing is left to run, and some of it has failed."""
        return self.total is not None and self.failed > 0 and self.done + self.failed >= self.total


@dataclass(frozen=True)
class SeenParts:
    """The recorded shards, what is known of them or of the last ones, and what all have together."""

    shards: Collection[int]
    latest: Mapping[int, PartStats]
    counts: Mapping[str, int]

    @classmethod
    def of(cls, parts: Mapping[int, PartStats]) -> SeenParts:
        counts = {name: sum(getattr(part, name) for part in parts.values()) for name in COUNTED}
        return cls(parts.keys(), parts, counts)


class RunState:
    """The keys of one run. lease: of the job that writes what a planner writes, where it may lose it."""

    def __init__(self, connection: Redis, run: str, lease: Lease | None = None) -> None:
        self.connection = self._redis = connection
        self.run, self._lease = run, lease
        self._key, self._parts_key, self._failed_key = run_key(run), run_key(run, "parts"), run_key(run, "failed")
        self._turn_key = run_key(run, "turn")

    def describe(self, facts: Mapping[str, str | int]) -> None:
        """Store facts for the CLI: output, queue, plan_job, plan_model, rows, shards, model, model_text."""
        self._store(facts, PLAN_ERROR)

    def refuse_plan(self, error: str) -> None:
        """Note why the run's planning failed, for when its job is gone. Raises RunBusy."""
        self._store({PLAN_ERROR: error})

    def _store(self, facts: Mapping[str, Any], *gone: str) -> None:
        def write(pipe: Pipeline) -> None:
            pipe.multi()
            self._put(pipe, facts, *gone)
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

    def submission(self, client: Redis | None = None) -> int:
        """Return the number of the last submission, greater than all before or cancelled; 0 for none."""
        found: Any = (self._redis if client is None else client).hget(self._key, "submission")
        return _number(found)

    def cancelled_submission(self) -> int:
        """Return the last submission that was cancelled: its jobs, and those before, are told to stop."""
        found: Any = self._redis.hget(self._key, "cancelled_submission")
        return _number(found)

    def submit(self, pipe: Pipeline, plan_job: str, output: str, submission: Submission, anew: bool = True) -> None:
        """Take back a cancellation or a stop: a new planning job submits the run. anew: False where one is under way.

        Leaves `pipe`, which watches the run's key or its turn, in a transaction that is to be executed. An end stays.
        """
        found: Any = pipe.hmget(self._key, "submission", "cancelled_submission")
        number = max(*map(_number, found), _now_ms()) + 1 if anew else _number(found[0])
        model = {} if submission.model is None else {"plan_model": submission.model}
        limit = {"max_errors": str(submission.limit)}
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
            # By the clock too: of the jobs of a run that Redis lost, nobody knows which submission they are of.
            number = max(submission, _now_ms())
            pipe.multi()
            self.take_turn(pipe)
            self._put(pipe, {"cancelled": 1, "cancelled_submission": number, **reason})

        self.as_of(submission, mark)

    def as_of(self, submission: int, change: Callable[[Pipeline], T]) -> T:
        """Make a change, as `write` does, while no later submission came. Raises RunResubmitted."""

        def checked(pipe: Pipeline) -> T:
            if self.submission(pipe) != submission:
                raise RunResubmitted(self.run)
            return change(pipe)

        return transact(self._redis, checked, self._key)

    def check_not_cancelled(self) -> None:
        """Raise RunCancelled after `cancel`, until the run is submitted again."""
        if self.is_cancelled():
            raise RunCancelled(self.run)

    def begin(self, moment: float) -> None:
        """Note when work on the submission began, if nobody has. Raises as check_not_cancelled."""
        with self._redis.pipeline() as pipe:
            pipe.hexists(self._key, "cancelled")
            pipe.hsetnx(self._key, "began_at", str(moment))
            is_cancelled, _ = pipe.execute()
        if is_cancelled:
            raise RunCancelled(self.run)

    def is_cancelled(self) -> bool:
        return bool(self._redis.hexists(self._key, "cancelled"))

    def judge(self) -> tuple[str, int] | None:
        """Return why the run is to be stopped, by the parts recorded since it was submitted, and that submission."""
        fields: Any = self._redis.hmget(self._key, *JUDGED, "max_errors", "submission")
        rows, errors, text, submission = fields
        told = ErrorLimit.parse(stored.text(text) if text else None).told(_number(rows), _number(errors))
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
            self._count(pipe)
            *_, length, raw_total, failed = pipe.execute()
            return part_count(length, raw_total, failed)

        return self._change(record, self._parts_key)

    def is_finished(self) -> bool:
        return bool(self._redis.hexists(self._key, "finished"))

    def mark_finished(self) -> None:
        with self._redis.pipeline() as pipe:
            self._put(pipe, {"finished": 1})
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
        """Record a finished shard, unless it is recorded, and add it to the run's totals.

        Nothing is watched, as many shards end at once: a worker killed in between leaves it uncounted until a count
        anew.
        """
        with self._redis.pipeline() as pipe:
            pipe.hsetnx(self._parts_key, str(stats.shard), stats.to_record())
            pipe.expire(self._parts_key, RUN_TTL_S)
            pipe.expire(self._key, RUN_TTL_S)
            pipe.srem(self._failed_key, stats.shard)
            self._count(pipe)
            is_new, *_, length, raw_total, failed = pipe.execute()
            if is_new:
                for name, total in zip(COUNTED, TOTALS, strict=True):
                    pipe.hincrby(self._key, total, getattr(stats, name))
                since = (stats.rows, stats.errors, stats.generated_tokens)
                for name, count in zip(OF_SUBMISSION[:3], since, strict=True):
                    pipe.hincrby(self._key, name, count)
                pipe.hset(self._key, "ended_at", str(stats.ended_at))
                pipe.execute()
            return part_count(length, raw_total, failed)

    def _count(self, pipe: Pipeline) -> None:
        pipe.hlen(self._parts_key)
        pipe.hget(self._parts_key, _TOTAL)
        pipe.scard(self._failed_key)

    def amend_parts(self, found: Mapping[int, PartStats], gone: Mapping[int, bytes], total: int) -> PartCount:
        """Add parts that a listing found and drop those `gone` whose record is as before the listing."""
        fields = {str(shard): stats.to_record() for shard, stats in found.items()}
        dropped = {str(shard): record for shard, record in gone.items()}

        def amend(pipe: Pipeline) -> PartCount:
            now: Any = pipe.hmget(self._parts_key, list(dropped)) if dropped else []
            names = [name for name, record in zip(dropped, now, strict=True) if record == dropped[name]]
            pipe.multi()
            if names:
                pipe.hdel(self._parts_key, *names)
            for name, record in fields.items():
                pipe.hsetnx(self._parts_key, name, record)
            pipe.hset(self._parts_key, mapping={_TOTAL: total})
            pipe.expire(self._parts_key, RUN_TTL_S)
            pipe.hlen(self._parts_key)
            *_, length = pipe.execute()
            return PartCount(length - 1, total)

        return self._change(amend, *([self._parts_key] if dropped else []))

    def records(self) -> dict[int, bytes]:
        found = cast("dict[bytes, bytes]", self._redis.hgetall(self._parts_key))
        return {int(field): record for field, record in found.items() if field != _TOTAL}

    def parts(self) -> dict[int, PartStats]:
        return _read(self.records())

    def parts_of(self, shards: Sequence[int]) -> dict[int, PartStats]:
        if not shards:
            return {}
        found: Any = self._redis.hmget(self._parts_key, [str(shard) for shard in shards])
        return _read({shard: each for shard, each in zip(shards, found, strict=True) if each is not None})

    def each_part(self) -> Iterator[PartStats]:
        """Yield the recorded parts, read a thousand at a time; one that is recorded meanwhile may not be among them."""
        fields = cast("list[bytes]", self._redis.hkeys(self._parts_key))
        shards = _shards(fields)
        for start in range(0, len(shards), MAX_LOOKED):
            yield from self.parts_of(shards[start : start + MAX_LOOKED]).values()

    def count_anew(self) -> None:
        """Store what all recorded parts have together; one recorded meanwhile may be missed or counted twice."""
        counts, spans = Counter[Any](dict.fromkeys(TOTALS, 0)), []
        for part in self.each_part():
            spans.append((part.started_at, part.ended_at))
            counts.update({f"total_{name}": getattr(part, name) for name in COUNTED})
        self._redis.hset(self._key, mapping={**counts, OF_TIME[-1]: str(working_s(spans))})

    def look(self, running: Collection[int] = ()) -> SeenParts:
        """Return what the recorded parts tell, of more than MAX_LOOKED by their totals. running: shards under way."""
        if self._redis.hlen(self._parts_key) <= MAX_LOOKED:
            return SeenParts.of(self.parts())
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.hkeys(self._parts_key)
            pipe.hmget(self._key, TOTALS)
            fields, totals = pipe.execute()
        shards = set(_shards(fields))
        latest = self.parts_of(_latest(shards, running))
        return SeenParts(shards, latest, dict(zip(COUNTED, (int(each or 0) for each in totals), strict=True)))

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


def part_count(length: int, raw_total: bytes | None, failed: int) -> PartCount:
    if raw_total is None:
        return PartCount(length, None, failed)
    return PartCount(length - 1, int(raw_total), failed)


def _shards(fields: Iterable[bytes]) -> list[int]:
    return [int(field) for field in fields if field != _TOTAL]


def _latest(shards: Collection[int], running: Collection[int]) -> list[int]:
    """Return the shards that were done last, as far as numbers tell: those before the ones under way."""
    ordered = sorted(shards)
    at = bisect(ordered, max(running, default=-1))
    return [*ordered[at:], *ordered[:at]][-MAX_LOOKED:]


def _read(records: Mapping[int, bytes]) -> dict[int, PartStats]:
    return {shard: PartStats.from_text(record) for shard, record in records.items()}


def _number(raw: bytes | None) -> int:
    return int(raw or 0)


def _now_ms() -> int:
    return int(time.time() * 1000)
