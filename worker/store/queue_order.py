"""Puts the jobs of a queue into a fair order every few seconds. One worker does it for all."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redis import Redis

from jobs.common import stored
from jobs.common.keys import prefixed, run_key
from jobs.common.rq_jobs import QueueKeys
from jobs.runs.plans.names import plan_job_id, run_and_shard
from jobs.runs.redis_state.submission import DEADLINE, MAX_PRIORITY, PRIORITY
from worker.store.fair_order import PROMPTS, RunInQueue, WaitingJob, fair_order, urgent_runs
from worker.store.order_memory import OrderMemory
from worker.store.scripts import Call, Scripts

PERIOD_S = 5.0
MOST = 50_000
"""The most jobs of a queue that are put in order, counted from its front."""

_TURN_MS = 4500
"""Milliseconds for which one worker keeps the others from a queue. A little less than the period, so that no period is
left out."""

_MEMORY_S = 3600
"""Seconds for which Redis keeps what a look at a queue remembers for the next one."""


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
            if self._client.set(turn, "", nx=True, px=_TURN_MS):
                self._order(name)

    def _order(self, name: str) -> None:
        """Put one queue in order. A queue in which no run waits stays as it is."""
        entries: Any = self._client.lrange(QueueKeys(name).waiting, 0, MOST - 1)
        job_ids = list(map(stored.text, entries))
        run_of = {job_id: _run_of(job_id) for job_id in job_ids}
        run_ids = {run for run in run_of.values() if run != PROMPTS}
        if not run_ids:
            return

        now = self._clock()
        memory_key = prefixed(f"tokenmill:fair:{name}")
        memory = OrderMemory.from_object(stored.json_object(self._client.get(memory_key)))
        runs, finished_rows = self._read_runs(run_ids, known=list(memory.rows_of))
        memory.see(finished_rows, now)
        urgent = urgent_runs(list(runs.values()), memory.rows_per_s, now)
        priorities = {run.run: run.priority for run in runs.values() if run.priority != 1}

        num_in_order = 0
        is_as_before = urgent == memory.urgent and priorities == memory.priorities
        if is_as_before and memory.last in run_of:
            # The jobs behind the last one that was put in order have come since. If that job stands in the queue twice,
            # its last place counts.
            num_new = job_ids[::-1].index(memory.last)
            num_in_order = len(job_ids) - num_new

        jobs = [_waiting_job(job_id, runs) for job_id in job_ids]
        in_order = jobs[:num_in_order]
        new = jobs[num_in_order:]
        placed = fair_order(in_order, new, urgent, memory.waited(run_of))
        order = [job.id for job in placed]
        if order != job_ids:
            self._call_many([Call("reorder", {"queue": name, "order": order, "most": MOST})])
        memory.note(placed, urgent, priorities)
        self._client.set(memory_key, json.dumps(vars(memory)), ex=_MEMORY_S)

    def _read_runs(
        self, waiting: set[str], known: Sequence[str]
    ) -> tuple[dict[str, RunInQueue], dict[str, int]]:
        """Return the runs that wait and are planned, and the finished rows by run.

        waiting: the runs with jobs in the queue. known: the runs that the last look saw. The finished rows are those of
        waiting runs, and of known runs that have not finished.
        """
        ids = sorted({*waiting, *known})
        with self._client.pipeline(transaction=False) as pipe:
            for run in ids:
                pipe.hmget(
                    run_key(run), "rows", "shards", "total_rows", DEADLINE, PRIORITY, "finished"
                )
            replies = pipe.execute(raise_on_error=False)

        runs: dict[str, RunInQueue] = {}
        rows_of: dict[str, int] = {}
        for run, values in zip(ids, replies, strict=True):
            # Producers may write to these keys too, so a reply may be an error.
            if not isinstance(values, list):
                continue
            texts = [stored.text(value or b"") for value in values]
            rows_text, shards_text, rows_done_text, deadline_text, priority_text, finished_text = (
                texts
            )
            rows = stored.count(rows_text) or 0
            shards = stored.count(shards_text) or 0
            rows_done = stored.count(rows_done_text) or 0
            if run in waiting or not finished_text:
                rows_of[run] = rows_done
            if run in waiting and shards:
                priority = stored.count(priority_text) or 1
                runs[run] = RunInQueue(
                    run=run,
                    shard_rows=rows / shards,
                    rows_left=max(0, rows - rows_done),
                    deadline=stored.seconds(deadline_text),
                    priority=min(priority, MAX_PRIORITY),
                )
        return runs, rows_of


def _run_of(job_id: str) -> str:
    """Return a job's run, or PROMPTS."""
    run_shard = run_and_shard(job_id)
    if run_shard is None:
        return PROMPTS
    run, _ = run_shard
    return run


def _waiting_job(job_id: str, runs: Mapping[str, RunInQueue]) -> WaitingJob:
    """Return a job of the queue with its rows. runs: those that are planned.

    A planning job counts as no rows. So it comes first, and the shards that it queues soon get their share.
    """
    run = _run_of(job_id)
    if run != PROMPTS and job_id == plan_job_id(run):
        return WaitingJob(job_id, run, rows=0.0)
    if run in runs:
        return WaitingJob(job_id, run, runs[run].shard_rows, runs[run].priority)
    # A prompt, or a shard of a run that Redis has lost.
    return WaitingJob(job_id, run, rows=1.0)
