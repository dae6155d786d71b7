"""Writes a row of each series every ten seconds, whether or not anybody looks at a page.

If several dashboards run, only one of them writes: the one that holds the lock. Rows are computed from the samples that
workers report anyway. So the history has a gap where no dashboard ran, except in the last hour, whose points workers
keep in Redis.
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
from tokenmill.dashboard.history.marks import write_marks
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

#: The lock: it holds the token of the dashboard that writes.
LOCK_KEY = f"{HISTORY_PREFIX}:turn"

#: The seconds for which a dashboard holds the lock without renewing it.
LOCK_S = 35

#: The longest gap in seconds that is not filled from the points of workers.
MAX_PAUSE_S = 30.0

#: The rows of one moment, by the name of their series.
Rows = dict[str, Values]

_WIDTH_S = RINGS[0].width_s


class Recorder:
    """Writes the history. For one thread. clock: Unix seconds.

    problem: why the last attempt to write failed; "" if it did not.
    """

    def __init__(self, watcher: Watcher, clock: Callable[[], float] = time.time) -> None:
        self._watcher = watcher
        self._connection: Redis = watcher.connection
        self._clock = clock
        self._rings = Rings(self._connection)
        self._token = secrets.token_hex(8)
        self._last_samples: dict[str, WorkerSample] = {}
        #: By run id: when the run was last looked at, in Unix seconds, and its snapshot.
        self._last_runs: dict[str, tuple[float, RunSnapshot]] = {}
        #: For each ring but the first, the number of the next row to write; {} while another dashboard holds the lock.
        self._next_rows: dict[int, int] = {}
        self.problem = ""

    def start(self) -> None:
        """Start a thread that records until the process ends."""
        threading.Thread(target=self._run, name="tokenmill-history", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_WIDTH_S - time.time() % _WIDTH_S)
            self.attempt()

    def attempt(self) -> None:
        """Record this moment, and set `problem`. Raise nothing."""
        problem = ""
        try:
            self.record()
        except RedisError as error:
            problem = f"{type(error).__name__}: {error}"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            logger.exception("the history misses a moment")
        if problem and not self.problem:
            logger.warning("the history is not written: %s", problem)
        self.problem = problem

    def record(self) -> bool:
        """Write a row of each series for this moment, if this dashboard holds the lock. Raises RedisError.

        Return whether it holds the lock.
        """
        now = self._clock()
        if not self._hold_lock():
            self._last_samples = {}
            self._last_runs = {}
            self._next_rows = {}
            return False

        look = self._watcher.look()
        samples = [row.sample for row in look.workers if row.sample is not None]
        if not self._next_rows:
            self._catch_up(samples, [queue.name for queue in look.queues], now)
            for ring in range(1, len(RINGS)):
                self._next_rows[ring] = _first_complete(ring, now)

        rows_by_kind = self._current_rows(look, samples, now)
        row_number = int(now // _WIDTH_S)
        new_rows = {kind: {row_number: rows} for kind, rows in rows_by_kind.items()}
        self._write(new_rows, now)
        write_marks(self._connection, samples, now)

        # Join the wider rows whose time has ended since the last call.
        for ring, first in self._next_rows.items():
            last = int(now // RINGS[ring].width_s) - 1
            if first <= last:
                for kind in rows_by_kind:
                    self._rings.roll_up(kind, ring, first, last)
                self._next_rows[ring] = last + 1
        return True

    def _hold_lock(self) -> bool:
        """Take the lock, or renew it for LOCK_S. Return False if another dashboard holds it.

        If two dashboards hold it for a moment, that does no harm: they write the same row.
        """
        if self._connection.set(LOCK_KEY, self._token, nx=True, ex=LOCK_S):
            return True
        if self._connection.get(LOCK_KEY) != self._token.encode():
            return False
        self._connection.expire(LOCK_KEY, LOCK_S)
        return True

    def _current_rows(
        self, look: Look, samples: Sequence[WorkerSample], now: float
    ) -> dict[Kind, Rows]:
        """Return the rows of this moment, by kind. Remember samples and runs for the next call."""
        growths = {}
        for sample in samples:
            last_sample = self._last_samples.get(sample.name)
            if last_sample is None or sample.is_silent:
                continue
            worker_growth = growth(last_sample, sample)
            if worker_growth is not None:
                growths[sample.name] = worker_growth
        self._last_samples = {sample.name: sample for sample in samples}

        queues = look.queues[: QUEUE.most]
        ages_s = head_ages(self._connection, [queue.name for queue in queues], now)
        depths = {}
        for queue in queues:
            depths[queue.name] = (float(queue.counts["waiting"]), ages_s.get(queue.name))

        rows_by_kind = _rows(depths, growths)
        rows_by_kind[RUN] = self._run_rows(look.runs, look.at)
        return rows_by_kind

    def _run_rows(self, runs: Iterable[RunSnapshot], at: float) -> Rows:
        """Return a row for each run that is active, or was active at the last call. at: when the runs were read."""
        rows: Rows = {}
        snapshots = {}
        for run in runs:
            snapshots[run.run] = (at, run)
            last_at, last = self._last_runs.get(run.run, (at, run))
            if not run.is_active and not last.is_active:
                continue
            seconds = at - last_at
            increases = [
                run.rows_done - last.rows_done,
                run.errors - last.errors,
                run.tokens - last.tokens,
            ]
            if seconds > 0 and min(increases) >= 0:
                rows[run.run] = [increase / seconds for increase in increases]
        self._last_runs = snapshots
        return rows

    def _write(self, rows_by_kind: Mapping[Kind, Mapping[int, Rows]], now: float) -> None:
        """Write rows to the first ring. rows_by_kind: by kind, the rows of each moment by their number.

        If a kind has too many series, the series that come first are written.
        """
        with self._connection.pipeline(transaction=False) as pipe:
            for kind, rows_by_number in rows_by_kind.items():
                series: dict[str, dict[int, Values]] = {}
                for number, rows in rows_by_number.items():
                    for name, values in rows.items():
                        series.setdefault(name, {})[number] = values
                for name in self._rings.admit(kind, series, now):
                    self._rings.write(pipe, kind, 0, name, series[name])
                    pipe.zadd(kind.index_key, {name: now})
            pipe.execute()

    def _catch_up(self, samples: Sequence[WorkerSample], queues: Sequence[str], now: float) -> None:
        """Fill the gap since the last row from the points of workers. They reach back an hour at most."""
        last_rows_at = self._rings.names(FLEET, 0).values()
        since = max([*last_rows_at, now - RINGS[0].num_rows * _WIDTH_S])
        if now - since < MAX_PAUSE_S:
            return

        samples = samples[: WORKER.most]
        queues = queues[: QUEUE.most]
        points = read_points(self._connection, [sample.name for sample in samples])
        growths: dict[int, dict[str, Growth]] = defaultdict(dict)
        depths: dict[int, dict[str, tuple[float, None]]] = defaultdict(dict)
        for sample in samples:
            # How far the worker's clock is ahead of this one's.
            ahead_s = sample.at - (now - sample.silent_s)
            for older, newer in pairwise(points[sample.name]):
                worker_growth = growth(older, newer)
                for number in _numbers_between(older.at - ahead_s, newer.at - ahead_s, since, now):
                    if worker_growth is not None:
                        growths[number][sample.name] = worker_growth
                    for name in queues:
                        if name in newer.depth:
                            depths[number][name] = (float(newer.depth[name]), None)

        rows_by_kind: dict[Kind, dict[int, Rows]] = {QUEUE: {}, WORKER: {}, FLEET: {}}
        for number in {*growths, *depths}:
            for kind, rows in _rows(depths[number], growths[number]).items():
                rows_by_kind[kind][number] = rows
        self._write(rows_by_kind, now)


def _rows(
    depths: Mapping[str, tuple[float, float | None]], growths: Mapping[str, Growth]
) -> dict[Kind, Rows]:
    """Return the rows of queues, workers and the fleet at one moment.

    depths: for each queue, how many jobs wait, and the age of the oldest one in seconds. growths: by worker.
    """
    queue_rows: Rows = {}
    for name, (waiting, oldest_s) in depths.items():
        # How this queue's counts grow, by each worker that serves the queue.
        reported = []
        for worker_growth in growths.values():
            if name in worker_growth.queues:
                reported.append(worker_growth.queues[name])
        if not reported:
            queue_rows[name] = [waiting, oldest_s, None, None, None, None]
            continue
        queue_rows[name] = [
            waiting,
            oldest_s,
            sum(queue_growth.ended for queue_growth in reported),
            sum(queue_growth.failed for queue_growth in reported),
            sum(queue_growth.waited_s for queue_growth in reported),
            sum(queue_growth.ran_s for queue_growth in reported),
        ]

    worker_rows: Rows = {}
    fleet_rows: Rows = {}
    if growths:
        totals = [0.0] * len(FLEET.columns)
        for name, worker_growth in growths.items():
            worker_rows[name] = worker_growth.tokens
            for index, tokens in enumerate(worker_growth.tokens):
                totals[index] += tokens
        fleet_rows[ALL] = totals
    return {QUEUE: queue_rows, WORKER: worker_rows, FLEET: fleet_rows}


def _numbers_between(older_at: float, newer_at: float, since: float, now: float) -> range:
    """Return the numbers of the rows of the first ring that two points of a worker fill.

    The middle of such a row lies between the two points, and the whole row lies between `since` and `now`.
    """
    first = max(int(older_at / _WIDTH_S + 0.5), int(since // _WIDTH_S) + 1)
    last = min(int(newer_at / _WIDTH_S + 0.5), int(now // _WIDTH_S))
    return range(first, last)


def _first_complete(ring: int, now: float) -> int:
    """Return the number of a ring's first row that can be joined: the next finer ring still has all rows for it."""
    finer = RINGS[ring - 1]
    width_s = RINGS[ring].width_s
    return int((now - finer.num_rows * finer.width_s) // width_s) + 1
