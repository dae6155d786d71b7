"""A run's state in Redis: what the CLI shows, and the count that tells the last shard that it is the last.

Nothing here is needed to resume: parts on disk are the truth, and the planner rebuilds these keys from them.

Whoever writes here may have been frozen since it looked, for any time. So each write that rests on a look is
one transaction, which is carried out only while what was looked at is as it was: nobody planned, submitted or
cancelled the run meanwhile (submitting, enqueueing), the job is held (what a planner writes), no other submission
came (cancelling), no part was recorded since (counting).
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from redis import Redis
from redis.client import Pipeline

from jobs.common import stored
from jobs.common.keys import RUN_TTL_S, RUNS_KEY, run_folder_key
from jobs.errors import RunCancelled, RunResubmitted, UnknownRun
from jobs.runs.redis_state.recorded_parts import JUDGED, OF_SUBMISSION, PartCount, RecordedParts, Verdict, part_count
from jobs.runs.redis_state.submission import ASKED_FOR, ErrorLimit, Submission
from jobs.runs.redis_state.transactions import transact

T = TypeVar("T")

#: The field that says why the planning of the last submission failed.
PLAN_ERROR = "plan_error"

#: A run's keys live for RUN_TTL_S from its last part on, which may come long after its submission.
LISTED_S = 2 * RUN_TTL_S


class RunState(RecordedParts):
    """What submissions, cancels and the end of one run write, beside its parts."""

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
            pipe.execute()

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

    # Submissions and cancellations

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

        Leaves `pipe`, which watches the run's key or its turn, in a transaction that is to be executed. An end stays:
        what its planning refuses changes no finished run.
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
                pipe.execute()
            elif found[1] is not None:
                pipe.multi()
                pipe.hdel(self._key, "plan_job")  # one that is enqueued once more is a new submission
                pipe.execute()
                raise RunCancelled(self.run)

        self._change(enter, self._key)

    def cancel(self, submission: int, **reason: str) -> None:
        """Mark a submission cancelled, and all before it. Raises RunResubmitted when another one came."""

        def mark(pipe: Pipeline) -> None:
            # By the clock too: of the jobs of a run that Redis lost, nobody knows which submission they are of.
            number = max(submission, _now_ms())
            pipe.multi()
            self.take_turn(pipe)
            self._put(pipe, {"cancelled": 1, "cancelled_submission": number, **reason})
            pipe.execute()

        self.as_of(submission, mark)

    def stop(self, verdict: Verdict) -> None:
        """Cancel a submission for a reason of its own. Raises RunResubmitted when it is not the last one."""
        self.cancel(verdict.submission, stopped=verdict.reason)

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

    def judge(self) -> Verdict | None:
        """Return why the run is to be stopped, by the parts recorded since it was submitted, or None."""
        fields: Any = self._redis.hmget(self._key, *JUDGED, "max_errors", "submission")
        rows, errors, text, submission = fields
        told = ErrorLimit.parse(stored.text(text) if text else None).told(_number(rows), _number(errors))
        if told is None:
            return None
        reason = f"{told}, then submit another input, or the same again with a higher limit to resume"
        return Verdict(reason, _number(submission))

    # The end

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
        """Mark the run finished: its folder says so."""
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
                pipe.execute()

        self._change(unmark, self._key)

    # Who may write

    def write(self, change: Callable[[Pipeline], T], *watched: str) -> T:
        """Make a change with no planner, submission or cancel between it and its looks. Raises RunBusy."""
        return self._change(change, self._turn_key, *watched)

    def take_turn(self, pipe: Pipeline) -> None:
        """Have others who `write` look again once `pipe` is executed."""
        pipe.set(self._turn_key, "", ex=RUN_TTL_S)


def _number(raw: bytes | None) -> int:
    """Return a stored number, 0 for none."""
    return int(raw or 0)


def _now_ms() -> int:
    return int(time.time() * 1000)
