"""The record of a run's parts in Redis: which are there, what they count, and why rows failed."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar, cast

from redis import Redis
from redis.client import Pipeline

from jobs.common.keys import RUN_TTL_S, run_key
from jobs.context import Lease
from jobs.errors import RunBusy
from jobs.runs.redis_state.transactions import transact
from jobs.runs.statistics.part_stats import COUNTED, PartStats
from jobs.runs.statistics.reasons import Reasons, read_reasons, reasons_text
from jobs.runs.statistics.run_statistics import working_s

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


def record_reasons(connection: Redis, run: str, shard: int, reasons: Reasons) -> None:
    """Keep a part's reasons; without any, forget what was kept of an earlier one."""
    key = run_key(run, "errors")
    with connection.pipeline() as pipe:
        pipe.hdel(key, str(shard))
        pipe.hlen(key)
        _, length = pipe.execute()
        if reasons.rows and length < MAX_PARTS:
            pipe.hset(key, str(shard), reasons_text(reasons, MAX_OF_PART))
            pipe.expire(key, RUN_TTL_S)
            pipe.execute()


def recorded_reasons(connection: Redis, run: str) -> Reasons:
    """Return what is kept of a run's parts: of more than MAX_PARTS with errors not of all."""
    found: Any = connection.hgetall(run_key(run, "errors"))
    return read_reasons(islice(found.values(), 2 * MAX_PARTS))


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
class Verdict:
    """Why a run is to be stopped, and the submission whose limit says so."""

    reason: str
    submission: int


T = TypeVar("T")

_TOTAL = b"total"

#: Parts of a run that one look reads; of a run that has more, the last ones.
MAX_LOOKED = 1000


@dataclass(frozen=True)
class SeenParts:
    """The recorded parts at one look.

    shards: those that are recorded. latest: what is recorded of them, or of the last ones before those under
    way. counts: what all of them have together, by the names of COUNTED.
    """

    shards: Collection[int]
    latest: Mapping[int, PartStats]
    counts: Mapping[str, int]

    @classmethod
    def of(cls, parts: Mapping[int, PartStats]) -> SeenParts:
        """Return what is seen where these are all of them."""
        counts = {name: sum(getattr(part, name) for part in parts.values()) for name in COUNTED}
        return cls(parts.keys(), parts, counts)


class RecordedParts:
    """The keys of one run. lease: of the job that writes what a planner writes, where it may lose it."""

    def __init__(self, connection: Redis, run: str, lease: Lease | None = None) -> None:
        self.connection = self._redis = connection
        self.run, self._lease = run, lease
        self._key, self._parts_key, self._failed_key = run_key(run), run_key(run, "parts"), run_key(run, "failed")
        self._turn_key = run_key(run, "turn")

    def record_part(self, stats: PartStats) -> PartCount:
        """Record a finished shard, unless it is recorded, and add it to the run's totals.

        Nothing is watched, as many shards end at once: a worker killed in between leaves a part uncounted until a count
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
        """Ask for what `part_count` takes."""
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
        """Return the recorded parts by shard, as they are stored."""
        found = cast("dict[bytes, bytes]", self._redis.hgetall(self._parts_key))
        return {int(field): record for field, record in found.items() if field != _TOTAL}

    def parts(self) -> dict[int, PartStats]:
        """Return the recorded parts by shard."""
        return _read(self.records())

    def parts_of(self, shards: Sequence[int]) -> dict[int, PartStats]:
        """Return what is recorded of these shards' parts, as `parts` does."""
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
        """Return what the recorded parts tell, in bounded time: of more than MAX_LOOKED by their totals.

        running: shards under way. Totals may lack a part whose worker was killed as it recorded it, until a count anew.
        """
        if self._redis.hlen(self._parts_key) <= MAX_LOOKED:
            return SeenParts.of(self.parts())
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.hkeys(self._parts_key)
            pipe.hmget(self._key, TOTALS)
            fields, totals = pipe.execute()
        shards = set(_shards(fields))
        latest = self.parts_of(_latest(shards, running))
        return SeenParts(shards, latest, dict(zip(COUNTED, (int(each or 0) for each in totals), strict=True)))

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
    """Return what the replies to `RecordedParts._count` say."""
    if raw_total is None:
        return PartCount(length, None, failed)
    return PartCount(length - 1, int(raw_total), failed)


def _shards(fields: Iterable[bytes]) -> list[int]:
    """Return the shards among the fields of a record."""
    return [int(field) for field in fields if field != _TOTAL]


def _latest(shards: Collection[int], running: Collection[int]) -> list[int]:
    """Return the shards that were done last, as far as numbers tell: those before the ones under way."""
    ordered = sorted(shards)
    at = bisect(ordered, max(running, default=-1))
    return [*ordered[at:], *ordered[:at]][-MAX_LOOKED:]


def _read(records: Mapping[int, bytes]) -> dict[int, PartStats]:
    return {shard: PartStats.from_text(record) for shard, record in records.items()}
