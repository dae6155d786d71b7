"""Marks on the charts: the moments at which a worker came, left or died."""

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
#: A hash of the workers that were present at the last call of `write_marks`, with the time when each of them started.
PRESENT_KEY = f"{HISTORY_PREFIX}:present"

#: The most marks that are kept, and for how many seconds.
MAX_MARKS = 500
KEPT_S = 7 * 24 * 3600

#: The state that a worker writes when it has ended in order.
STOPPED = "stopped"

CAME = "came"
LEFT = "left"
DIED = "died"


@dataclass(frozen=True)
class Mark:
    """An event in a worker's life. at: Unix seconds. what: "came", "left" or "died"."""

    at: float
    worker: str
    what: str


def write_marks(connection: Redis, samples: Sequence[WorkerSample], now: float) -> None:
    """Write a mark for each worker that has come or gone since any dashboard last called this function."""
    # By name of each worker that was present at the last call: when it started.
    stored: Any = connection.hgetall(PRESENT_KEY)
    known_starts = {text(name): seconds(text(raw)) or 0.0 for name, raw in stored.items()}
    # The same for the workers that are present now.
    starts = {}
    for sample in samples:
        if not sample.is_silent and sample.state not in (LOADING, STOPPED):
            starts[sample.name] = sample.started_at

    new_names = [name for name in starts if known_starts.get(name) != starts[name]]
    gone_names = [name for name in known_starts if name not in starts]
    if not new_names and not gone_names:
        return

    marks = []
    for name in new_names:
        came_at = now
        # The first dashboard ever finds workers that started long before it did.
        if not known_starts and 0 < starts[name] < now:
            came_at = starts[name]
        marks.append(Mark(came_at, name, CAME))
    marks += _end_marks(connection, gone_names, now)

    with connection.pipeline(transaction=False) as pipe:
        for raw_name in stored:
            if text(raw_name) in gone_names:
                pipe.hdel(PRESENT_KEY, raw_name)
        for name in new_names:
            pipe.hset(PRESENT_KEY, name, repr(starts[name]))
        for mark in marks:
            pipe.zadd(MARKS_KEY, {json.dumps(asdict(mark)): mark.at})
        pipe.zremrangebyscore(MARKS_KEY, "-inf", now - KEPT_S)
        pipe.zremrangebyrank(MARKS_KEY, 0, -MAX_MARKS - 1)
        pipe.expire(MARKS_KEY, KEPT_S)
        pipe.execute()


def _end_marks(connection: Redis, names: Sequence[str], now: float) -> list[Mark]:
    """Return a mark for each of these gone workers: LEFT if the worker reported its end, DIED if it did not."""
    stopped_names = set()
    for worker in read_workers(connection, names):
        if worker.sample is not None and worker.sample.state == STOPPED:
            stopped_names.add(worker.name)
    return [Mark(now, name, LEFT if name in stopped_names else DIED) for name in names]


def last_end(connection: Redis, name: str, now: float) -> Mark | None:
    """Return the mark of a worker's last end; None if Redis has no trace of it. Raises RedisError.

    name: of a worker that is not registered any more.
    """
    # A dashboard writes the mark some seconds after the end. Until then, the worker's last sample shows it.
    # A name from a page's address may hold characters that cannot be encoded for Redis.
    names = [name] if is_unicode(name) else []
    for worker in read_workers(connection, names):
        if worker.sample is not None and worker.sample.state == STOPPED:
            return Mark(now - worker.sample.silent_s, safe_name(name), LEFT)

    last = None
    for mark in read_marks(connection, 0):
        if mark.worker == safe_name(name) and mark.what != CAME:
            last = mark
    return last


def read_marks(connection: Redis, since: float) -> list[Mark]:
    """Return the marks since a moment, the earliest first. since: Unix seconds."""
    marks = []
    entries: Any = connection.zrangebyscore(MARKS_KEY, since, "+inf", start=0, num=MAX_MARKS)
    for entry in entries:
        stored = json_object(entry)
        at = stored.get("at")
        worker = stored.get("worker")
        what = stored.get("what")
        if isinstance(at, int | float) and isinstance(worker, str) and what in (CAME, LEFT, DIED):
            marks.append(Mark(float(at), safe_name(worker), what))
    return marks
