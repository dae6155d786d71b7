"""Marks: when a worker came, left or died."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redis import Redis

from jobs.common.display import is_unicode, safe_name
from jobs.common.keys import HISTORY_PREFIX
from jobs.common.stored import json_object, seconds, text
from jobs.common.workers import LOADING, WorkerSample, read_workers

MARKS_KEY = f"{HISTORY_PREFIX}:marks"
PRESENT_KEY = f"{HISTORY_PREFIX}:present"

#: The most marks that are kept, and for how long.
MAX_MARKS = 500
KEPT_S = 7 * 24 * 3600

#: The state that a worker writes when it ends in peace.
STOPPED = "stopped"

CAME = "came"
LEFT = "left"
DIED = "died"


@dataclass(frozen=True)
class Mark:
    """What became of a worker at a moment. what: "came", "left" or "died"."""

    at: float
    worker: str
    what: str


def note(connection: Redis, samples: Sequence[WorkerSample], now: float) -> None:
    """Keep a mark for each worker that has come or gone since the last call, by this dashboard or another one."""
    stored: Any = connection.hgetall(PRESENT_KEY)
    present = {text(name): seconds(text(at)) or 0.0 for name, at in stored.items()}
    living = {
        sample.name: sample.started_at
        for sample in samples
        if not sample.is_silent and sample.state not in (LOADING, STOPPED)
    }
    came = [name for name, started_at in living.items() if present.get(name) != started_at]
    gone = [name for name in present if name not in living]
    if not came and not gone:
        return

    marks = []
    for name in came:
        # The first dashboard ever finds workers that have been there for long.
        is_late = not present and 0 < living[name] < now
        marks.append(Mark(living[name] if is_late else now, name, CAME))
    last_states = {
        worker.name: worker.sample.state
        for worker in read_workers(connection, gone)
        if worker.sample is not None
    }
    for name in gone:
        marks.append(Mark(now, name, LEFT if last_states.get(name) == STOPPED else DIED))
    with connection.pipeline(transaction=False) as pipe:
        for name in stored:
            if text(name) in gone:
                pipe.hdel(PRESENT_KEY, name)
        for name in came:
            pipe.hset(PRESENT_KEY, name, repr(living[name]))
        for mark in marks:
            pipe.zadd(MARKS_KEY, {json.dumps(asdict(mark)): mark.at})
        pipe.zremrangebyscore(MARKS_KEY, "-inf", now - KEPT_S)
        pipe.zremrangebyrank(MARKS_KEY, 0, -MAX_MARKS - 1)
        pipe.expire(MARKS_KEY, KEPT_S)
        pipe.execute()


def last_end(connection: Redis, worker: str, now: float) -> Mark | None:
    """Return when a worker that is not registered any more left or died; None if nobody knows. Raises RedisError.

    A dashboard marks it some seconds later. Until then the worker's own last word tells it.
    """
    for found in read_workers(connection, [worker] if is_unicode(worker) else []):
        if found.sample is not None and found.sample.state == STOPPED:
            return Mark(now - found.sample.silent_s, safe_name(worker), LEFT)
    ends = [
        mark
        for mark in read_marks(connection, 0)
        if mark.worker == safe_name(worker) and mark.what != CAME
    ]
    return ends[-1] if ends else None


def read_marks(connection: Redis, since: float) -> list[Mark]:
    """Return the marks since a moment, the earliest first."""
    marks = []
    found: Any = connection.zrangebyscore(MARKS_KEY, since, "+inf", start=0, num=MAX_MARKS)
    for raw in found:
        stored = json_object(raw)
        at = stored.get("at")
        worker = stored.get("worker")
        what = stored.get("what")
        if isinstance(at, int | float) and isinstance(worker, str) and what in (CAME, LEFT, DIED):
            marks.append(Mark(float(at), safe_name(worker), what))
    return marks
