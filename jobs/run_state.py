"""A run's state in Redis: what the CLI shows, and the count that tells the last shard that it is the last.

Nothing here is needed to resume: parts on disk are the truth, and the planner rebuilds these keys from them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from redis.exceptions import LockError, LockNotOwnedError

from . import stored
from .error_limit import DEFAULT_LIMIT, ErrorLimit
from .errors import RunBusy, RunCancelled, UnknownRun
from .keys import RUN_TTL_S, run_folder_key, run_key, run_lock_key, run_parts_key
from .part_stats import PartStats
from .run_lock import RunLock

if TYPE_CHECKING:
    from redis import Redis

_TOTAL = b"total"

#: A planner or canceller that is silent for this long has lost the lock; it notices before it writes on. So
#: this is also what one costs that was killed: short, as whoever only was slow takes the lock anew.
LOCK_TTL_S = 10
LOCK_WAIT_S = 120


@dataclass(frozen=True)
class PartCount:
    """done: shards with a recorded part. total: shards of the run, None when Redis lost the run's keys."""

    done: int
    total: int | None


class RunState:
    """The keys of one run."""

    def __init__(self, connection: Redis, run: str) -> None:
        self.connection = self._redis = connection
        self.run = run
        self._key, self._parts_key = run_key(run), run_parts_key(run)

    def describe(self, facts: Mapping[str, str | int]) -> None:
        """Store facts for the CLI: output, queue, plan_job, plan_model, rows, shards, model, model_text."""
        with self._redis.pipeline() as pipe:
            fields: dict[Any, Any] = dict(facts)
            pipe.hset(self._key, mapping=fields)
            pipe.expire(self._key, RUN_TTL_S)
            pipe.execute()

    def facts(self) -> dict[str, str]:
        """Return what `describe` stored, and the marks `cancelled` and `finished`.

        Raises UnknownRun when Redis has no such run, or lost all but a mark of it.
        """
        found = cast("dict[bytes, bytes]", self._redis.hgetall(self._key))
        facts = {stored.text(key): stored.text(value) for key, value in found.items()}
        if not facts.keys() >= {"output", "queue"}:
            raise UnknownRun(self.run)
        return facts

    def submit(
        self,
        plan_job: str,
        output: str,
        queue: str,
        model: str | None = None,
        limit: ErrorLimit = DEFAULT_LIMIT,
    ) -> None:
        """Take back a cancellation or a stop: a new planning job submits the run.

        An end stays until the planning finds that it is none: what is refused there changes no finished run.
        model: the name of the only model that may plan it, if one was asked for. limit: counts what finishes
        from now on.
        """
        self._redis.hdel(self._key, "cancelled", "stopped", "plan_model", "judged_rows", "judged_errors")
        asked_for = {} if model is None else {"plan_model": model}
        self.describe(
            {"output": output, "queue": queue, "plan_job": plan_job, "max_errors": str(limit), **asked_for}
        )
        self._redis.set(run_folder_key(output), self.run, ex=RUN_TTL_S)

    def was_submitted_by(self, plan_job: str) -> bool:
        """Say whether this job is the last one that submitted the run."""
        return bool(self._redis.hget(self._key, "plan_job") == plan_job.encode())

    def forget_submission(self) -> None:
        """Take a planning job of this id, should there be one again, for a new submission."""
        self._redis.hdel(self._key, "plan_job")

    def withdraw_finished(self) -> None:
        """Take back an end that is no longer true."""
        self._redis.hdel(self._key, "finished")

    def has_finished(self) -> bool:
        """Say whether the run was marked finished, and that was not taken back."""
        return bool(self._redis.hexists(self._key, "finished"))

    def mark_cancelled(self) -> None:
        self.describe({"cancelled": 1})

    def stop(self, reason: str) -> None:
        """Cancel the run for a reason of its own."""
        self.describe({"cancelled": 1, "stopped": reason})

    def judge(self, stats: PartStats) -> str | None:
        """Count a part's errors, each time; return why the run is to be stopped, or None."""
        with self._redis.pipeline() as pipe:
            pipe.hincrby(self._key, "judged_rows", stats.rows)
            pipe.hincrby(self._key, "judged_errors", stats.errors)
            pipe.hget(self._key, "max_errors")
            rows, errors, text = pipe.execute()
        limit = ErrorLimit.parse(text.decode() if text else None)
        told = limit.told(rows, errors)
        return told and f"{told}, then submit another input, or the same again with a higher limit to resume"

    def mark_finished(self) -> None:
        self.describe({"finished": 1})

    def check_not_cancelled(self) -> None:
        """Raise RunCancelled after `mark_cancelled`, until the run is submitted again."""
        if self._redis.hexists(self._key, "cancelled"):
            raise RunCancelled(self.run)

    def record_part(self, stats: PartStats) -> PartCount:
        """Record a finished shard; recording it again changes nothing but its statistics."""
        with self._redis.pipeline() as pipe:
            pipe.hset(self._parts_key, str(stats.shard), stats.to_text())
            pipe.expire(self._parts_key, RUN_TTL_S)
            pipe.expire(self._key, RUN_TTL_S)
            pipe.hlen(self._parts_key)
            pipe.hget(self._parts_key, _TOTAL)
            *_, length, total = pipe.execute()
        return PartCount(length, None) if total is None else PartCount(length - 1, int(total))

    def forget_part(self, shard: int) -> None:
        """Drop the record of a part that is not what it says."""
        self._redis.hdel(self._parts_key, str(shard))

    def amend_parts(self, found: Mapping[int, PartStats], gone: Collection[int], total: int) -> PartCount:
        """Add parts that a listing found and drop those it did not; the others stay as they are.

        Never replaces the whole record: a shard may finish between the listing and this call.
        """
        fields: dict[Any, Any] = {str(shard): stats.to_text() for shard, stats in found.items()}
        with self._redis.pipeline() as pipe:
            if gone:
                pipe.hdel(self._parts_key, *map(str, gone))
            pipe.hset(self._parts_key, mapping={**fields, _TOTAL: total})
            pipe.expire(self._parts_key, RUN_TTL_S)
            pipe.hlen(self._parts_key)
            *_, length = pipe.execute()
        return PartCount(length - 1, total)

    def parts(self) -> dict[int, PartStats]:
        """Return the recorded parts by shard; what is no record of ours counts as none."""
        found = cast("dict[bytes, bytes]", self._redis.hgetall(self._parts_key))
        parts = {}
        for field, record in found.items():
            with suppress(ValueError):  # `total` is none either
                parts[int(field)] = PartStats.from_text(record)
        return parts

    @contextmanager
    def lock(self) -> Iterator[RunLock]:
        """Hold the run for planning or cancelling; call `keep` on it between long steps.

        Raises RunBusy when it cannot be had within LOCK_WAIT_S, or was lost to another before the body ended.
        """
        lock = RunLock(
            self._redis,
            run_lock_key(self.run),
            timeout=LOCK_TTL_S,
            blocking_timeout=LOCK_WAIT_S,
            raise_on_release_error=False,  # `keep` has told while it mattered
        )
        try:
            with lock:
                yield lock
        except LockError:
            raise RunBusy(self.run) from None

    def keep(self, lock: RunLock) -> None:
        """Hold the lock on, or anew where it has run out and is free: another may have had it in between.

        Raises redis.exceptions.LockError, RunBusy outside of `lock`, when another has it.
        """
        try:
            lock.reacquire()
        except LockNotOwnedError:
            if not lock.acquire(blocking=False):
                raise
