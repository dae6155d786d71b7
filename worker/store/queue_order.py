"""Puts the jobs of a queue into a fair order every few seconds. Each time, one of the queue's workers does so."""

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
"""Seconds between two orderings of a queue."""

MAX_ORDERED_JOBS = 50_000
"""The most jobs of a queue that are put in order, counted from its front."""

_TURN_MS = 4500
"""Milliseconds for which a worker that orders a queue keeps other workers from doing so. They are a little less than
PERIOD_S, so that no period is left out."""

_MEMORY_S = 3600
"""Seconds for which Redis keeps the OrderMemory of a queue."""

_RUN_FIELDS = ("rows", "shards", "total_rows", DEADLINE, PRIORITY, "finished")
"""The fields of a run's hash that are read. `total_rows` has the finished rows."""


class QueueOrder:
    """Keeps queues in a fair order. Not thread-safe; raises redis.exceptions.RedisError."""

    def __init__(self, client: Redis, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._clock = clock
        self._call_many = Scripts(client).call_many

    def put_in_order(self, queue_names: Sequence[str]) -> None:
        """Put each queue in order, unless a worker has done so within the last _TURN_MS."""
        for name in queue_names:
            turn_key = prefixed(f"tokenmill:fair-turn:{name}")
            if self._client.set(turn_key, "", nx=True, px=_TURN_MS):
                self._put_one_in_order(name)

    def _put_one_in_order(self, name: str) -> None:
        """Put one queue in order. A queue in which no run waits stays as it is."""
        entries: Any = self._client.lrange(QueueKeys(name).waiting, 0, MAX_ORDERED_JOBS - 1)
        job_ids = [stored.text(entry) for entry in entries]
        run_of = {job_id: _run_of(job_id) for job_id in job_ids}
        run_ids = set(run_of.values()) - {PROMPTS}  # PROMPTS stands for the jobs without a run
        if not run_ids:
            return

        memory_key = prefixed(f"tokenmill:fair:{name}")
        memory_text: Any = self._client.get(memory_key)
        memory = OrderMemory.from_object(stored.json_object(memory_text))
        runs, finished_rows = self._read_runs(run_ids, list(memory.rows_of))
        now = self._clock()
        memory.note_finished_rows(finished_rows, now)
        order = _decide_order(job_ids, run_of, runs, memory, now)
        if order != job_ids:
            arguments = {"queue": name, "order": order, "most": MAX_ORDERED_JOBS}
            self._call_many([Call("reorder", arguments)])
        self._client.set(memory_key, json.dumps(vars(memory)), ex=_MEMORY_S)

    def _read_runs(
        self, waiting_ids: set[str], known_ids: Sequence[str]
    ) -> tuple[dict[str, RunInQueue], dict[str, int]]:
        """Read runs from Redis. Returns the planned runs with jobs in the queue, and the finished rows by run.

        waiting_ids: the runs with jobs in the queue. known_ids: the runs whose finished rows the last ordering knew.
        Finished rows are returned for waiting runs, and for known runs that have not finished.
        """
        run_ids = sorted({*waiting_ids, *known_ids})
        with self._client.pipeline(transaction=False) as pipe:
            for run_id in run_ids:
                pipe.hmget(run_key(run_id), *_RUN_FIELDS)
            replies = pipe.execute(raise_on_error=False)

        runs: dict[str, RunInQueue] = {}
        finished_rows: dict[str, int] = {}
        for run_id, values in zip(run_ids, replies, strict=True):
            # Producers may write to these keys too, so a reply may be an error.
            if not isinstance(values, list):
                continue
            texts = [stored.text(value or b"") for value in values]
            text_of = dict(zip(_RUN_FIELDS, texts, strict=True))
            is_waiting = run_id in waiting_ids
            if is_waiting or not text_of["finished"]:
                finished_rows[run_id] = _count(text_of["total_rows"])
            is_planned = _count(text_of["shards"]) > 0
            if is_waiting and is_planned:
                runs[run_id] = _run_in_queue(run_id, text_of)
        return runs, finished_rows


def _decide_order(
    job_ids: Sequence[str],
    run_of: Mapping[str, str],
    runs: Mapping[str, RunInQueue],
    memory: OrderMemory,
    now: float,
) -> list[str]:
    """Return the ids of a queue's jobs in a fair order, and note this order in the queue's memory.

    job_ids: in the queue's order. run_of: the run of each job. runs: the planned runs by their ids. now: Unix seconds.
    """
    urgent = urgent_runs(list(runs.values()), memory.rows_per_s, now)
    priorities = {run.run: run.priority for run in runs.values() if run.priority != 1}

    # After a change of the urgent runs or the priorities, all jobs are put in order anew.
    num_in_order = 0
    if urgent == memory.urgent and priorities == memory.priorities:
        num_in_order = _num_in_order(job_ids, memory.last)
    jobs = [_waiting_job(job_id, runs) for job_id in job_ids]
    in_order = jobs[:num_in_order]
    new = jobs[num_in_order:]
    waited = memory.note_heads(run_of)
    placed = fair_order(in_order, new, urgent, waited)
    memory.note_order(placed, urgent, priorities)
    return [job.id for job in placed]


def _count(text: str) -> int:
    """Read a count in a run's hash. Return 0 if the field is missing or holds another text."""
    return stored.count(text) or 0


def _run_in_queue(run_id: str, text_of: Mapping[str, str]) -> RunInQueue:
    """Return a run, read from its hash in Redis. The run must be planned. text_of: the hash's texts, by field."""
    rows = _count(text_of["rows"])
    rows_done = _count(text_of["total_rows"])
    priority = _count(text_of[PRIORITY]) or 1
    return RunInQueue(
        run=run_id,
        shard_rows=rows / _count(text_of["shards"]),
        rows_left=max(0, rows - rows_done),
        deadline=stored.seconds(text_of[DEADLINE]),
        priority=min(priority, MAX_PRIORITY),
    )


def _num_in_order(job_ids: Sequence[str], last: str) -> int:
    """Return how many jobs at the queue's front are in order. last: the last job that was put in order.

    The jobs behind `last` are new. If `last` stands in the queue twice, its later position counts.
    """
    ids_from_back = list(reversed(job_ids))
    if last not in ids_from_back:
        return 0
    num_new = ids_from_back.index(last)
    return len(job_ids) - num_new


def _run_of(job_id: str) -> str:
    """Return the run of a job; PROMPTS if it has none."""
    run_shard = run_and_shard(job_id)
    if run_shard is None:
        return PROMPTS
    run, _ = run_shard
    return run


def _waiting_job(job_id: str, runs: Mapping[str, RunInQueue]) -> WaitingJob:
    """Return a job of the queue with its rows. runs: the runs that are planned.

    A planning job has no rows. So it comes first, and the shards that it queues get their share soon.
    """
    run = _run_of(job_id)
    if run != PROMPTS and job_id == plan_job_id(run):
        return WaitingJob(job_id, run, rows=0.0)
    if run in runs:
        return WaitingJob(job_id, run, runs[run].shard_rows, runs[run].priority)
    # A prompt, or a shard of a run that Redis has lost.
    return WaitingJob(job_id, run, rows=1.0)
