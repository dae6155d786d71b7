"""Puts the jobs of a queue into a fair order every few seconds. One worker does it for all."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from jobs.common import stored
from jobs.common.keys import prefixed, run_key
from jobs.common.rq_jobs import QueueKeys
from jobs.runs.plans.names import plan_job_id, run_and_shard
from jobs.runs.redis_state.submission import DEADLINE
from worker.store.fair_order import (
    PROMPTS,
    PlacedJob,
    RunInQueue,
    WaitingJob,
    fair_order,
    urgent_runs,
)
from worker.store.scripts import Call, Scripts

PERIOD_S = 5.0
MOST = 50_000
"""The jobs of a queue that are looked at and put in order, from its front on."""

_RATE_OVER_S = 600.0
"""How far back the rate goes by which deadlines are judged."""

_SAMPLE_EVERY_S = 20.0
_RESTED_S = 4 * PERIOD_S
"""After such a time without a look, no run was waiting, and the rate of before says nothing."""

_MEMORY_S = 3600
_MOST_REMEMBERED = 200
"""The jobs at the front whose places are remembered. If more are claimed between two looks, waiting counts for less."""


@dataclass
class _Memory:
    """What the last look at a queue leaves for the next one.

    last: the last job that was put in order. urgent: the runs that came first. rows_of: the finished rows of each run.
    samples: pairs of a time and the rows that were finished until then, the earliest first. front: the ids of the first
    jobs, with the ends of their places. heads: each run's first job, with the rows that its share should have had while
    this job was the first.
    """

    last: str = ""
    urgent: list[str] = field(default_factory=list)
    rows_of: dict[str, int] = field(default_factory=dict)
    samples: list[tuple[float, float]] = field(default_factory=list)
    front: list[tuple[str, float]] = field(default_factory=list)
    heads: dict[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def rows_per_s(self) -> float:
        """Return the rate of the queue's runs; 0 if it is not known."""
        if len(self.samples) < 2:
            return 0.0
        began_at, rows_before = self.samples[0]
        ended_at, rows = self.samples[-1]
        return (rows - rows_before) / (ended_at - began_at) if ended_at > began_at else 0.0

    def see(self, rows_of: dict[str, int], now: float) -> None:
        """Count the rows that were finished since the last look."""
        if self.samples and now - self.samples[-1][0] > _RESTED_S:
            self.samples.clear()
        new_rows = sum(max(0, rows - self.rows_of.get(run, rows)) for run, rows in rows_of.items())
        self.rows_of = rows_of
        rows = (self.samples[-1][1] if self.samples else 0.0) + new_rows
        self.samples = [sample for sample in self.samples if now - sample[0] <= _RATE_OVER_S]
        is_fresh = len(self.samples) > 1 and now - self.samples[-2][0] < _SAMPLE_EVERY_S
        if is_fresh:
            self.samples.pop()
        self.samples.append((now, rows))

    def waited(self, run_of: Mapping[str, str]) -> dict[str, float]:
        """Return the rows that each run's share should have had while its first job waited.

        run_of: the run of each job in the queue, in the queue's order.
        """
        claimed_ends = [end for job_id, end in self.front if job_id not in run_of]
        new_rows = max(claimed_ends, default=0.0)
        heads: dict[str, tuple[str, float]] = {}
        for job_id, run in run_of.items():
            if run in heads:
                continue
            known_id, rows = self.heads.get(run, ("", 0.0))
            heads[run] = (job_id, rows + new_rows if known_id == job_id else 0.0)
        self.heads = heads
        return {run: rows for run, (_, rows) in heads.items()}

    def note(self, placed: Sequence[PlacedJob], urgent: list[str]) -> None:
        """Remember the order that was made."""
        self.last = placed[-1].id
        self.urgent = urgent
        self.front = [(job.id, job.end) for job in placed[:_MOST_REMEMBERED]]


class QueueOrder:
    """Keeps queues in a fair order. Not thread-safe; raises redis.exceptions.RedisError."""

    def __init__(self, client: Redis, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._clock = clock
        self._call_many = Scripts(client).call_many

    def put_in_order(self, queue_names: Sequence[str]) -> None:
        """Put each queue in order, if no other worker has done so in this period."""
        for name in queue_names:
            turn = prefixed(f"tokenmill:fair-turn:{name}")
            if self._client.set(turn, "", nx=True, px=int(PERIOD_S * 900)):
                self._order(name)

    def _order(self, name: str) -> None:
        queue = QueueKeys(name).waiting
        entries: Any = self._client.lrange(queue, 0, MOST - 1)
        job_ids = list(map(stored.text, entries))
        run_of: dict[str, str] = {}
        for job_id in job_ids:
            run_shard = run_and_shard(job_id)
            run_of[job_id] = PROMPTS if run_shard is None else run_shard[0]
        run_ids = {run for run in run_of.values() if run != PROMPTS}
        key = prefixed(f"tokenmill:fair:{name}")
        if not run_ids:
            return

        now = self._clock()
        memory = _read(stored.json_object(self._client.get(key)))
        runs, rows_of = self._read_runs(run_ids, [*memory.rows_of])
        memory.see(rows_of, now)
        urgent = urgent_runs(list(runs.values()), memory.rows_per_s, now)
        jobs = []
        for job_id in job_ids:
            run = run_of[job_id]
            is_planning = run != PROMPTS and job_id == plan_job_id(run)
            rows = runs[run].shard_rows if run in runs else 1.0
            # A run is planned at once, so that its shards can have their share.
            jobs.append(WaitingJob(job_id, run, 0.0 if is_planning else rows))

        num_in_order = 0
        if urgent == memory.urgent and memory.last in run_of:
            num_in_order = len(job_ids) - job_ids[::-1].index(memory.last)
        waited = memory.waited(run_of)
        placed = fair_order(jobs[:num_in_order], jobs[num_in_order:], urgent, waited)
        order = [job.id for job in placed]
        if order != job_ids:
            arguments = {"queue": name, "order": order, "most": MOST}
            self._call_many([Call("reorder", arguments)])
        memory.note(placed, urgent)
        self._client.set(key, json.dumps(vars(memory)), ex=_MEMORY_S)

    def _read_runs(
        self, waiting: set[str], known: Sequence[str]
    ) -> tuple[dict[str, RunInQueue], dict[str, int]]:
        """Return the runs that wait and are planned, and the finished rows of these and of the known runs."""
        ids = sorted({*waiting, *known})
        with self._client.pipeline(transaction=False) as pipe:
            for run in ids:
                pipe.hmget(run_key(run), "rows", "shards", "total_rows", DEADLINE, "finished")
            replies = pipe.execute(raise_on_error=False)

        runs: dict[str, RunInQueue] = {}
        rows_of: dict[str, int] = {}
        for run, values in zip(ids, replies, strict=True):
            # Producers may write to these keys too, so a reply may be an error.
            if not isinstance(values, list):
                continue
            texts = [stored.text(value or b"") for value in values]
            rows = stored.count(texts[0]) or 0
            shards = stored.count(texts[1]) or 0
            rows_done = stored.count(texts[2]) or 0
            if run in waiting or not texts[4]:
                rows_of[run] = rows_done
            if run in waiting and shards:
                deadline = stored.seconds(texts[3])
                runs[run] = RunInQueue(run, rows / shards, max(0, rows - rows_done), deadline)
        return runs, rows_of


def _read(fields: dict[str, Any]) -> _Memory:
    """Return what the last look has left; nothing if it cannot be read."""
    try:
        samples = [(float(at), float(rows)) for at, rows in fields["samples"]]
        rows_of = {str(run): int(rows) for run, rows in fields["rows_of"].items()}
        front = [(str(job_id), float(end)) for job_id, end in fields["front"]]
        heads = {
            str(run): (str(job_id), float(rows)) for run, (job_id, rows) in fields["heads"].items()
        }
        return _Memory(str(fields["last"]), list(fields["urgent"]), rows_of, samples, front, heads)
    except (KeyError, TypeError, ValueError, AttributeError):
        return _Memory()
