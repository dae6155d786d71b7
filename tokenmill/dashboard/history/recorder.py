"""Writes a row every ten seconds, whether or not anybody looks at a page.

One of several dashboards does it: the one that has the turn. Workers write nothing for it, beyond what they tell of
themselves anyway. So there are gaps where no dashboard ran, except for what workers still tell of the last hour.
"""

import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from redis import Redis
from redis.exceptions import RedisError

from jobs.common.keys import HISTORY_PREFIX
from jobs.common.workers import WorkerSample
from jobs.queues import head_ages
from jobs.runs.watching.snapshot import RunSnapshot
from tokenmill.dashboard.history import marks
from tokenmill.dashboard.history.rings import (
    ALL,
    FLEET,
    QUEUE,
    RINGS,
    RUN,
    WORKER,
    Kind,
    Rings,
    Values,
)
from tokenmill.dashboard.seen.growth import Growth, growth, read_points
from tokenmill.dashboard.seen.watcher import Look, Watcher

logger = logging.getLogger("tokenmill.dashboard")

TURN_KEY = f"{HISTORY_PREFIX}:turn"

#: How long a dashboard that is silent keeps the turn.
TURN_S = 35

#: Seconds without a row after which what workers have told meanwhile is read.
MAX_PAUSE_S = 30.0

#: The rows of one moment by the name of their series.
Rows = dict[str, Values]

_WIDTH_S = RINGS[0].width_s


class Recorder:
    """Keeps the history. One thread uses it. clock: Unix seconds."""

    def __init__(self, watcher: Watcher, clock: Callable[[], float] = time.time) -> None:
        self._watcher = watcher
        self._connection: Redis = watcher.connection
        self._clock = clock
        self._rings = Rings(self._connection)
        self._own = secrets.token_hex(8)
        self._workers: dict[str, WorkerSample] = {}
        self._runs: dict[str, tuple[float, RunSnapshot]] = {}
        #: The number after that of the last row, of each ring but the first; {} without the turn.
        self._next: dict[int, int] = {}
        self.problem = ""

    def start(self) -> None:
        """Record in a thread of its own, for as long as the process lives."""
        threading.Thread(target=self._run, name="tokenmill-history", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_WIDTH_S - time.time() % _WIDTH_S)
            self.attempt()

    def attempt(self) -> None:
        """Record this moment. If that fails, `problem` says why until it is done again."""
        try:
            self.record()
            problem = ""
        except RedisError as error:
            problem = f"{type(error).__name__}: {error}"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            logger.exception("the history misses a moment")
        if problem and not self.problem:
            logger.warning("the history is not written: %s", problem)
        self.problem = problem

    def record(self) -> bool:
        """Write a row for this moment, if this dashboard has the turn. Return whether it has. Raises RedisError."""
        now = self._clock()
        if not self._takes_turn():
            self._workers, self._runs, self._next = {}, {}, {}
            return False
        look = self._watcher.look()
        samples = [row.sample for row in look.workers if row.sample is not None]
        if not self._next:
            self._catch_up(samples, [queue.name for queue in look.queues], now)
            self._next = {ring: _oldest(ring, now) for ring in range(1, len(RINGS))}
        rows = self._rows(look, samples, now)
        number = int(now // _WIDTH_S)
        self._write({kind: {number: named} for kind, named in rows.items()}, now)
        marks.note(self._connection, samples, now)
        for ring, first in self._next.items():
            last = int(now // RINGS[ring].width_s) - 1
            if first <= last:
                for kind in rows:
                    self._rings.roll_up(kind, ring, first, last)
                self._next[ring] = last + 1
        return True

    def _takes_turn(self) -> bool:
        """Whether this dashboard writes. Two that both do, for a moment, write the same row twice."""
        if self._connection.set(TURN_KEY, self._own, nx=True, ex=TURN_S):
            return True
        if self._connection.get(TURN_KEY) != self._own.encode():
            return False
        self._connection.expire(TURN_KEY, TURN_S)
        return True

    def _rows(self, look: Look, samples: Sequence[WorkerSample], now: float) -> dict[Kind, Rows]:
        """Return the rows of this moment."""
        growths = {}
        for sample in samples:
            last = self._workers.get(sample.name)
            grown = growth(last, sample) if last is not None else None
            if grown is not None and not sample.is_silent:
                growths[sample.name] = grown
        self._workers = {sample.name: sample for sample in samples}

        queues = {queue.name: queue.counts["waiting"] for queue in look.queues[: QUEUE.most]}
        ages = head_ages(self._connection, list(queues), now)
        depths = {name: (float(waiting), ages.get(name)) for name, waiting in queues.items()}
        rows = _rows(depths, growths)
        rows[RUN] = self._run_rows(look.runs, look.at)
        return rows

    def _run_rows(self, runs: Iterable[RunSnapshot], at: float) -> Rows:
        """Return what active runs, and those that have ended since the last row, have added in a second."""
        rows: Rows = {}
        seen = {}
        for run in runs:
            seen[run.run] = (at, run)
            last_at, last = self._runs.get(run.run, (at, run))
            if not run.is_active and not last.is_active:
                continue
            seconds = at - last_at
            grown = [
                run.rows_done - last.rows_done,
                run.errors - last.errors,
                run.tokens - last.tokens,
            ]
            if seconds > 0 and min(grown) >= 0:
                rows[run.run] = [count / seconds for count in grown]
        self._runs = seen
        return rows

    def _write(self, rows: Mapping[Kind, Mapping[int, Rows]], now: float) -> None:
        """Write rows by kind, number and series. Where there are too many series, the first ones are kept."""
        with self._connection.pipeline(transaction=False) as pipe:
            for kind, numbered in rows.items():
                names = dict.fromkeys(name for named in numbered.values() for name in named)
                for name in self._rings.admit(kind, names, now):
                    own = {at: named[name] for at, named in numbered.items() if name in named}
                    self._rings.write(pipe, kind, 0, name, own)
                    pipe.zadd(kind.index_key, {name: now})
            pipe.execute()

    def _catch_up(self, samples: Sequence[WorkerSample], queues: Sequence[str], now: float) -> None:
        """Write what workers have told since the last row, for an hour at most."""
        since = max([*self._rings.names(FLEET, 0).values(), now - RINGS[0].num_rows * _WIDTH_S])
        if now - since < MAX_PAUSE_S:
            return
        told = samples[: WORKER.most]
        points = read_points(self._connection, [sample.name for sample in told])
        growths: dict[int, dict[str, Growth]] = defaultdict(dict)
        depths: dict[int, dict[str, tuple[float, None]]] = defaultdict(dict)
        for sample in told:
            ahead_s = sample.at - (now - sample.silent_s)  # its clock's, of ours
            own = points[sample.name]
            for older, newer in pairwise(own):
                grown = growth(older, newer)
                for number in _numbers(older.at - ahead_s, newer.at - ahead_s, since, now):
                    if grown is not None:
                        growths[number][sample.name] = grown
                    for name in queues[: QUEUE.most]:
                        if name in newer.depth:
                            depths[number][name] = (float(newer.depth[name]), None)
        rows: dict[Kind, dict[int, Rows]] = {QUEUE: {}, WORKER: {}, FLEET: {}}
        for number in {*growths, *depths}:
            for kind, named in _rows(depths[number], growths[number]).items():
                rows[kind][number] = named
        self._write(rows, now)


def _rows(
    depths: Mapping[str, tuple[float, float | None]], growths: Mapping[str, Growth]
) -> dict[Kind, Rows]:
    """Return the rows of one moment. depths: waiting jobs and the oldest one's age, by queue."""
    queues: Rows = {}
    for name, (waiting, oldest_s) in depths.items():
        told = [each.queues[name] for each in growths.values() if name in each.queues]
        if not told:
            queues[name] = [waiting, oldest_s, None, None, None, None]
            continue
        queues[name] = [
            waiting,
            oldest_s,
            sum(each.ended for each in told),
            sum(each.badly for each in told),
            sum(each.waited_s for each in told),
            sum(each.ran_s for each in told),
        ]
    workers: Rows = {name: each.tokens for name, each in growths.items()}
    columns = zip(*workers.values(), strict=True)
    fleet: Rows = {ALL: [sum(filter(None, column)) for column in columns]} if workers else {}
    return {QUEUE: queues, WORKER: workers, FLEET: fleet}


def _numbers(since: float, until: float, first_at: float, last_at: float) -> range:
    """Return the rows whose middle lies between two moments, and that lie between two others as a whole."""
    first = max(int(since / _WIDTH_S + 0.5), int(first_at // _WIDTH_S) + 1)
    last = min(int(until / _WIDTH_S + 0.5), int(last_at // _WIDTH_S))
    return range(first, last)


def _oldest(ring: int, now: float) -> int:
    """Return the oldest row of a ring that is still there in the rows of the finer one."""
    finer = RINGS[ring - 1]
    width_s = RINGS[ring].width_s
    return int((now - finer.num_rows * finer.width_s) // width_s) + 1
