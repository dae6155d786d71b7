"""A scene for the dashboard: what a busy fleet in some trouble has in Redis, written through the real records.

Eight runs, five workers of which one is dead, one loads and one is suspended, sixty failed jobs of three kinds, and
many jobs that wait. An hour of it has been recorded, so the charts have something to show.
"""

import json
import random
import time
import traceback
from dataclasses import replace
from typing import Any

from redis import Redis
from rq import Queue
from rq.job import Job, JobStatus
from rq.registry import FailedJobRegistry
from rq.results import Result

from jobs.common import rq_jobs
from jobs.common.keys import (
    FORMAT,
    PROGRESS_FIELD,
    REPORTED_AT,
    WORKER_STATS_TTL_S,
    run_key,
    worker_key,
)
from jobs.common.worker_deaths import record_deaths
from jobs.common.workers import Point
from jobs.errors import AnswerMissing, DiskFull, InvalidJob
from jobs.runs.plans.names import plan_job_id, shard_job_id
from jobs.runs.redis_state.state import RunState, record_reasons
from jobs.runs.redis_state.submission import Submission
from jobs.runs.statistics.run_statistics import PartStats, Reasons
from jobs.runs.watching.api_records import BatchRecord, record_batch, record_limited
from tokenmill.dashboard.history.recorder import LOCK_KEY, Recorder
from tokenmill.dashboard.seen.watcher import Look, Watcher
from worker.store.worker_record import WorkerRecord, process_facts, shown_loading

#: Seconds of the past that are recorded.
PAST_S = 3600
STEP_S = 10

#: Jobs that wait beside the many.
NUM_PROMPTS = 14

_MODEL = {
    "model": "Qwen3-4B",
    "model_source": "/models/Qwen3-4B",
    "models": ["Qwen3-4B"],
    "fingerprint": "9f31c2ab77d0",
    "max_model_len": 40960,
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "format": FORMAT,
}

_PART = PartStats(
    run="",
    shard=0,
    rows=1000,
    errors=0,
    prompt_tokens=412_000,
    completion_tokens=96_000,
    cached_tokens=150_000,
    generated_tokens=96_000,
    started_at=0.0,
    ended_at=0.0,
    model="Qwen3-4B",
    fingerprint="9f31c2ab77d0",
    dtype="bfloat16",
    attention_backend="triton",
    version="0.1.0",
    worker="gpu-1",
)

#: The errors of failed jobs, and how many have each.
FAILURES: tuple[tuple[Exception, int], ...] = (
    (InvalidJob("the prompt has 41,208 tokens, expected 40,960 or fewer"), 31),
    (DiskFull("/data/answers", "No space left on device"), 20),
    (AnswerMissing("chat-117", "it has expired"), 9),
)


class Scene:
    """Writes the scene into an empty Redis. now: the moment that it shows, in Unix seconds."""

    def __init__(self, connection: Redis, now: float | None = None) -> None:
        self.connection = connection
        self._now = time.time() if now is None else now
        self._random = random.Random(46)
        self._bulk = Queue("bulk", connection=connection, serializer="json")
        self._prompts = Queue("prompts", connection=connection, serializer="json")
        #: Runs by what they show.
        self.runs: dict[str, str] = {}
        self._coming: list[PartStats] = []
        self._began_at: dict[str, float] = {}
        self._workers: dict[str, _WorkerSeen] = {}

    def write(self, num_waiting: int = 100_000, past_s: int = PAST_S) -> None:
        """Write everything. num_waiting: the jobs that wait in queue bulk. past_s: how much of the past is recorded."""
        self._write_runs()
        for number in range(NUM_PROMPTS):
            self._prompts.enqueue("jobs.complete", "secret", job_id=f"chat-{number:03}")
        self._live(num_waiting, past_s)
        self._fail_jobs()
        self._write_batches()

    def _write_runs(self) -> None:
        self._run("running", "reviews-labelled", 48, done=31, errors=37, started=2)
        self._run("behind", "tickets-summarised", 120, done=4, started=1, checks=12, cut=55)
        self._run("finished", "products-embedded", 25, done=25, errors=3)
        self._run("perfect", "dates-normalised", 8, done=8)
        self._run("cancelled", "logs-classified", 60, done=22)
        self._run("failed", "letters-translated", 12, done=10, errors=212, failed=2)
        self._run("planning", "invoices-read", 0)
        self._run("refused", "claims-scored", 0)

    def _run(
        self,
        word: str,
        folder: str,
        shards: int,
        done: int = 0,
        errors: int = 0,
        started: int = 0,
        failed: int = 0,
        checks: int = 0,
        cut: int = 0,
    ) -> None:
        """Write one run as planner and workers do. errors, checks, cut: rows of all parts together."""
        run = f"{46 + len(self.runs):02x}c0ffee{self._random.getrandbits(32):08x}"
        self.runs[word] = run
        state = RunState(self.connection, run)
        output = f"/data/{folder}"
        state.open_submission(plan_job_id(run), output, Submission("bulk", model="Qwen3-4B"))
        arguments = {
            "input": f"{output}.parquet",
            "output": output,
            "template": "{text}",
            "sampling": {"temperature": 0, "max_tokens": 96},
        }
        plan = self._job("jobs.score_parquet", plan_job_id(run), **arguments)
        if word == "planning":
            self._enqueue_again(plan)
            return
        if word == "refused":
            error = InvalidJob("no column 'text' in claims.parquet, which has 'id', 'body', 'date'")
            self._fail(plan, error)
            return

        facts: dict[str, str | int] = {
            "output": output,
            "queue": "bulk",
            "format": FORMAT,
            "rows": 1000 * shards,
        }
        state.describe({**facts, "shards": shards, "model_text": "Qwen3-4B"})
        self.connection.hset(run_key(run, "parts"), "total", shards)
        began_at = self._now - 60 * done - 90
        state.begin(began_at)
        self._began_at[word] = began_at
        parts = []
        for shard in range(done):
            split = [
                count * (shard + 1) // done - count * shard // done
                for count in (errors, checks, cut)
            ]
            ended_at = began_at + (shard + 1) * 60
            parts.append(
                replace(
                    _PART,
                    run=run,
                    shard=shard,
                    errors=split[0],
                    failed_checks=split[1],
                    cut=split[2],
                    started_at=ended_at - 75,
                    ended_at=ended_at,
                    worker=f"gpu-{1 + shard % 2}",
                )
            )
        for shard in range(done, done if word == "cancelled" else shards):
            job = self._job("jobs.score_shard", shard_job_id(run, shard))
            if shard < done + started:
                self._start(job, f"gpu-{1 + shard % 2}")
            elif shard < done + started + failed:
                self._fail(job, DiskFull(output, "No space left on device"))
            else:
                self._enqueue_again(job)
        if started:
            # Its parts come while the fleet is recorded.
            self._coming += parts
            return
        for part in parts:
            self._add_part(part)
        if word == "cancelled":
            state.cancel(state.submission())
        elif done == shards:
            state.mark_finished({})

    def _add_part(self, part: PartStats) -> None:
        RunState(self.connection, part.run).record_part(part)
        self._give_reasons(part.run, part.shard, part.errors)

    def _give_reasons(self, run: str, shard: int, count: int) -> None:
        reasons = Reasons()
        for number in range(count):
            row = 1000 * shard + 17 * number
            is_long = self._random.random() < 0.7
            text = f"the prompt has {41_000 + row} tokens" if is_long else "the column is null"
            reasons.add(text, [row])
        record_reasons(self.connection, run, shard, reasons)

    def _job(self, function: str, job_id: str, **arguments: Any) -> Job:
        """Return a saved job that is nowhere yet."""
        job = Job.create(
            function,
            kwargs=arguments,
            id=job_id,
            origin="bulk",
            connection=self.connection,
            serializer=self._bulk.serializer,
        )
        job.save()
        return job

    def _enqueue_again(self, job: Job) -> None:
        self._bulk.enqueue_job(job)
        moment = _rq_time(self._now - PAST_S - 600)
        self.connection.hset(rq_jobs.job_key(job.id), "enqueued_at", moment)

    def _start(self, job: Job, worker: str) -> None:
        """Have a worker run a job."""
        progress = '{"rows": 1000, "rows_done": 0, "tokens": 0}'
        fields: Any = {
            "status": "started",
            "worker_name": worker,
            "started_at": _rq_time(self._now - 30),
            PROGRESS_FIELD: progress,
        }
        self.connection.hset(rq_jobs.job_key(job.id), mapping=fields)
        self.connection.zadd(rq_jobs.QueueKeys("bulk").started, {f"{job.id}:1": 1e12})
        self.connection.sadd(rq_jobs.QUEUES_KEY, rq_jobs.QueueKeys("bulk").waiting)

    def _fail_jobs(self) -> None:
        for error, count in FAILURES:
            for number in range(count):
                name = type(error).__name__.lower()
                job = self._job("jobs.complete", f"{name}-{number:03}", prompt="secret")
                self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        """Have a job fail as a worker does."""
        try:
            raise error
        except Exception as raised:  # noqa: BLE001  its text is what is wanted
            text = "".join(traceback.format_exception(raised))
        ended_at = self._now - self._random.uniform(20, 3000)
        job.set_status(JobStatus.FAILED)
        FailedJobRegistry("bulk", connection=self.connection, serializer=self._bulk.serializer).add(
            job, ttl=int(365 * 86400 - (self._now - ended_at)), exc_string=text
        )
        Result.create_failure(job, 86400, text, worker_name="gpu-2")
        fields: Any = {"ended_at": _rq_time(ended_at), "worker_name": "gpu-2", "exc_info": ""}
        self.connection.hset(rq_jobs.job_key(job.id), mapping=fields)

    def _live(self, num_waiting: int, past_s: int) -> None:
        """Let the fleet work, and record it, until now."""
        moment = self._now - past_s
        clock = _Clock(moment)
        recorder = Recorder(_FreshWatcher(self.connection, clock), clock)
        self._workers = {
            name: _WorkerSeen(self.connection, name, speed, self._now - past_s)
            for name, speed in (("gpu-1", 1.0), ("gpu-2", 1.1), ("gpu-3", 0.9), ("gpu-5", 0.6))
        }
        steps = past_s // STEP_S
        template = self._template()
        step = -1
        # It goes on until this moment, as writing the past has taken a while.
        while step < steps or clock.at < time.time() - STEP_S:
            step += 1
            clock.at = moment + STEP_S * step
            since = num_waiting * step // (steps + 1)
            until = num_waiting * (step + 1) // (steps + 1)
            if step <= steps:
                self._wait(template, since, until, clock.at)
            self._run_on(clock.at)
            self._tell(clock.at, step / max(1, steps))
            recorder.record()
        self.connection.delete(LOCK_KEY)
        # It never ends loading here. If nobody held the context, it would end.
        self._loading = shown_loading(
            self.connection, "gpu-4", ["prompts", "bulk"], "Qwen3-4B", "/models/Qwen3-4B"
        )
        self._loading.__enter__()

    def _tell(self, at: float, share: float) -> None:
        """Have the workers tell of themselves. share: how much of the past is over."""
        for name, worker in self._workers.items():
            is_there = share < 0.8 if name == "gpu-5" else share >= 0.15 or name != "gpu-2"
            if is_there:
                is_suspended = name == "gpu-3" and share > 0.6
                worker.tell(at, "suspended" if is_suspended else "busy")
        if share >= 0.83 and "gpu-5" in self._workers:
            del self._workers["gpu-5"]
            # The record of a worker that has died lives on, and tells by its age how long it is silent.
            silent_ms = (WORKER_STATS_TTL_S - 120) * 1000
            self.connection.pexpire(worker_key("gpu-5"), silent_ms)
            record_deaths(self.connection, {"gpu-5": [shard_job_id(self.runs["running"], 31)]})

    def _run_on(self, at: float) -> None:
        """Let the runs that are under way come as far as they are at a moment."""
        for part in [part for part in self._coming if part.ended_at <= at]:
            self._coming.remove(part)
            self._add_part(part)
        for word, shard in (("running", 31), ("behind", 4)):
            seconds = at - self._began_at[word]
            rows = int(seconds % 60 / 60 * 1000) if seconds > 0 else 0
            progress = {"rows": 1000, "rows_done": rows, "tokens": 96 * rows, REPORTED_AT: at}
            key = rq_jobs.job_key(shard_job_id(self.runs[word], shard))
            self.connection.hset(key, PROGRESS_FIELD, json.dumps(progress))

    def keep_alive(self) -> None:
        """Have the living workers tell of themselves once more. Without that they are silent after ten seconds."""
        self._run_on(time.time())
        for name, worker in self._workers.items():
            worker.tell(time.time(), "suspended" if name == "gpu-3" else "busy")

    def _template(self) -> dict[bytes, bytes]:
        """Return the fields of a job that RQ has enqueued."""
        job = self._bulk.enqueue("jobs.complete", "secret", job_id="row-template", max_tokens=64)
        fields: Any = self.connection.hgetall(rq_jobs.job_key(job.id))
        self._bulk.remove(job)
        job.delete()
        return dict(fields)

    def _wait(self, template: dict[bytes, bytes], first: int, last: int, at: float) -> None:
        """Have some jobs wait, each like the one that RQ has enqueued."""
        key = rq_jobs.QueueKeys("bulk").waiting
        moment = _rq_time(at)
        with self.connection.pipeline(transaction=False) as pipe:
            for number in range(first, last):
                fields: Any = {**template, b"created_at": moment, b"enqueued_at": moment}
                pipe.hset(rq_jobs.job_key(f"row-{number:06}"), mapping=fields)
                pipe.rpush(key, f"row-{number:06}")
            pipe.execute()

    def _write_batches(self) -> None:
        for number, word in enumerate(("running", "finished", "cancelled")):
            run = self.runs[word]
            created_at = int(self._now - 3000 + 600 * number)
            batch = BatchRecord(f"batch_{run}", "search", run, created_at, created_at + 86400)
            record_batch(self.connection, batch)
        record_limited(self.connection, "search", "requests", self._now - 90)


class _Clock:
    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


class _FreshWatcher(Watcher):
    """Reads Redis at each call, because the scene's hour passes in seconds."""

    def look(self) -> Look:
        return self._read_look()


class _WorkerSeen:
    """A worker that tells of itself and does nothing."""

    def __init__(self, connection: Redis, name: str, speed: float, at: float) -> None:
        facts = {"worker": name, **_MODEL, **process_facts(), "host": f"{name}.example"}
        self._record = WorkerRecord(connection, name, ["prompts", "bulk"], self._beat, facts)
        self._name = name
        self._speed = speed
        self._told_at = at
        self._tokens = 0.0
        self._jobs = 0.0
        self._random = random.Random(name)

    def tell(self, at: float, state: str) -> None:
        """Tell of the time since the last call. state: "busy", or "suspended" for a worker that does nothing."""
        seconds = at - self._told_at
        self._told_at = at
        pace = 0.0 if state == "suspended" else self._speed * self._random.uniform(0.85, 1.0)
        self._tokens += seconds * 2400 * pace
        self._jobs += seconds * 0.8 * pace
        ended = int(self._jobs)
        badly = ended // 40
        point = Point(
            at=at,
            prompt_tokens=int(self._tokens * 3.1),
            cached_tokens=int(self._tokens * 1.2),
            generation_tokens=int(self._tokens),
            num_requests_running=int(230 * pace),
            max_num_seqs=256,
            kv_cache_usage=0.62 * pace,
            jobs_held=int(40 * pace),
            jobs_finished=ended - badly,
            jobs_failed=badly,
            depth=self._depth(),
            ended={"bulk": ended, "prompts": ended // 3},
            ended_badly={"bulk": badly},
            waited_ms={"bulk": ended * 41_000, "prompts": ended * 120},
            ran_ms={"bulk": ended * 5_200, "prompts": ended * 700},
        )
        self._record.show(state, None, {"held": {"bulk": point.jobs_held}}, point)
        self._record.add_point(point)

    def _depth(self) -> dict[str, int]:
        jobs, _ = self._record.count()
        return {name: by_status["queued"] for name, by_status in jobs.items()}

    def _beat(self, client: Redis, state: str, job_id: str | None) -> None:
        """Write what RQ's worker writes of itself."""
        key = rq_jobs.WORKER_PREFIX + self._name
        client.sadd(rq_jobs.WORKERS_KEY, key)
        client.hset(key, mapping={"state": state, "queues": "prompts,bulk"})
        client.expire(key, 480)


def _rq_time(at: float) -> bytes:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at))}.{int(at % 1 * 1e6):06}Z".encode()
