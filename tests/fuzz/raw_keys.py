"""Bytes of any kind, in any type of key, in all keys that RQ and we keep, beside jobs that are to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
from click.testing import CliRunner
from hypothesis import strategies as st
from redis.exceptions import ResponseError
from rq.job import Job

from jobs.cli import commands as cli
from tests.dashboard.dashboard_process import ask, running_dashboard
from tests.forking import ForkedWorkers
from tests.rq_workers import Workers, text_of, wait_until

LANES = ("high", "bulk")
NAME, RUN, TOKEN = "fuzzed", "0" * 16, "ab" * 12
PAST = datetime(2026, 1, 1, tzinfo=UTC)

SHARED_KEYS = {
    "rq:queues": "set",
    "rq:workers": "set",
    "rq:groups": "set",
    "rq:rl-keys": "set",
    "rq:workers:{queue}": "set",
    "rq:queue:{queue}": "list",
    "rq:queue:{queue}:intermediate": "list",
    "rq:wip:{queue}": "zset",
    "rq:finished:{queue}": "zset",
    "rq:failed:{queue}": "zset",
    "rq:deferred:{queue}": "zset",
    "rq:ready:{queue}": "zset",
    "rq:scheduled:{queue}": "zset",
    "rq:canceled:{queue}": "zset",
    "rq:clean_registries:{queue}": "string",
    "rq:worker:{worker}": "hash",
    "rq:worker:{worker}:executions": "set",
    "rq:scheduler:{scheduler}": "hash",
    "rq:scheduler-lock:{queue}": "string",
    "tokenmill:held:{queue}": "hash",
    "tokenmill:fleet:{queue}": "zset",
    "tokenmill:worker:{worker}": "string",
    "tokenmill:worker:{worker}:loading": "string",
    "tokenmill:samples:{worker}": "list",
    "tokenmill:run:index": "zset",
    "tokenmill:maintenance:{queue}": "string",
    "tokenmill:maintenance-stock:{queue}": "string",
    "tokenmill:quarantine": "stream",
}
"""Of all jobs, with the type that belongs there."""

OWN_KEYS = {
    "rq:job:{job}": "hash",
    "rq:job:{job}:dependents": "set",
    "rq:job::{job}:dependencies": "set",
    "rq:results:{job}": "stream",
    "rq:executions:{job}": "zset",
    "rq:execution:{job}:{execution}": "hash",
    "rq:queue:{queue}:intermediate:first_seen:{job}": "string",
    "rq:group:{group}": "set",
    "rq:rl:{limit}": "hash",
    "rq:rl:{limit}:allowed": "zset",
    "rq:rl:{limit}:rate_limited": "zset",
    "tokenmill:claim:{token}": "list",
    "tokenmill:removed:{execution}": "string",
    "tokenmill:deaths:{job}": "string",
    "tokenmill:run:{run}": "hash",
    "tokenmill:run:{run}:parts": "hash",
    "tokenmill:run:{run}:errors": "hash",
    "tokenmill:run:{run}:failed": "set",
    "tokenmill:run:{run}:lock": "string",
    "tokenmill:run:folder:{folder}": "string",
}
"""Of one job, run, group or claim."""

PAGES = ("/", "/failed?queue=bulk", "/series.json")

PLACES = ("rq:queue:{queue}", "rq:scheduled:{queue}")
"""Keys that get no time to live: what an innocent waits in would go with them."""

NOT_DAMAGED = {"rq:suspended": "whatever it holds suspends the workers, which is what it is for"}

TYPES = ("string", "list", "set", "zset", "hash", "stream")

_ENTRIES = st.one_of(
    st.binary(max_size=24),
    st.sampled_from([b"", b":", b"\xff", b"\xff:\xff", b"x:y", b"null", b"9" * 30, b"-1", b"nan", b"|"]),
)
_LARGE = st.builds(bytes, st.sampled_from([4096, 1 << 16, 1 << 20]))
_SCORES = st.one_of(st.floats(allow_nan=False), st.sampled_from([0, 1, 2**63, -1]))


@dataclass(frozen=True)
class Damage:
    """What is written: whether the key is emptied first, its type, and what may stand in one of that type."""

    template: str
    queue: str
    replaces: bool
    kind: str
    entries: list[bytes]
    score: float
    ttl_s: int | None
    field: str


_FIELDS = (
    "status origin enqueued_at sequences tokenmill_kind ended_by ended_ttl next_run ttl output "
    "successful_job_count total_working_time worker_name concurrency"
)


def _damages(template: str, kind: str) -> st.SearchStrategy[Damage]:
    """Another type in the place of the key, or entries that nobody wrote in a key of its own type."""
    few = st.lists(_ENTRIES | _LARGE, min_size=1, max_size=4)
    many = _ENTRIES.map(lambda entry: [entry + b"%d" % number for number in range(300)])
    names = (st.just(template), st.sampled_from(LANES))
    rest = (few | many, _SCORES, st.sampled_from([None, 1, 10**6]), st.sampled_from(_FIELDS.split()))
    other = st.sampled_from([each for each in TYPES if each != kind])
    return st.builds(Damage, *names, st.just(True), other, *rest) | st.builds(
        Damage, *names, st.booleans(), st.just(kind), *rest
    )


DAMAGES = st.one_of([_damages(*each) for each in (SHARED_KEYS | OWN_KEYS).items()])


class Site:
    """A worker with a scheduler, a dashboard, and jobs of two kinds: victims, whose keys are written to, and
    innocents, which have to end with their results."""

    def __init__(self, workers: Workers, dashboard: str) -> None:
        self._workers, self._dashboard, self.redis = workers, dashboard, workers.redis
        self.process = workers.start("--with-scheduler", "--name", NAME, TOKENMILL_MAX_WORKER_DEATHS="1000")
        wait_until(lambda: self.redis.exists(f"tokenmill:worker:{NAME}"))
        wait_until(lambda: list(self.redis.scan_iter("rq:scheduler:*")))
        self._scheduler = psutil.Process(self.process.pid).children()[0]
        self._folder, self._rounds = workers.folder, 0

    def spend(self, damages: list[Damage]) -> None:
        """Write some damage and see that all that is innocent ends, and that all processes live."""
        self._rounds += 1
        go = self._folder / f"go-{self._rounds}"
        victims = [self._victim(kind, go) for kind in ("held", "queued", "scheduled", "ended")]
        held = [self._enqueue(queue, f"file:{go}") for queue in LANES]
        wait_until(lambda: all(self.redis.exists(f"rq:executions:{job.id}") for job in held))
        for number, damage in enumerate(damages):
            self._write(damage, victims[number % len(victims)])
        later = [self._enqueue(queue, f"{queue} {self._rounds}") for queue in LANES]
        later.append(self._enqueue("bulk", f"scheduled {self._rounds}", at=PAST))
        for path in (*PAGES, f"/runs/{RUN}", *(f"/jobs/{victim.id}" for victim in victims)):
            answer = ask(self._dashboard, path)
            assert answer.status != 500, answer
        told = CliRunner().invoke(cli.main, ["--url", self._workers.url, "info"])
        assert told.exception is None or isinstance(told.exception, SystemExit), told.exception
        for job in later:
            self._check_answered(job)
        go.touch()
        for job in held:
            self._check_answered(job)
        self._check_alive()

    def _victim(self, kind: str, go: Path) -> Job:
        if kind == "scheduled":
            return self._enqueue("bulk", "victim", at=datetime(2030, 1, 1, tzinfo=UTC))
        job = self._enqueue("bulk", f"file:{go}" if kind == "held" else "victim")
        if kind == "ended":
            wait_until(lambda: self.redis.exists(f"rq:results:{job.id}"))
        return job

    def _enqueue(self, queue: str, prompt: str, at: datetime | None = None) -> Job:
        """As a producer does that tries again while a key that it writes to is of another type."""
        made: list[Job] = []

        def is_enqueued() -> bool:
            own, options = self._workers.queue(queue), {"max_tokens": 1, "job_id": uuid4().hex}
            try:
                made.append(
                    own.enqueue("jobs.complete", prompt, **options)
                    if at is None
                    else own.enqueue_at(at, "jobs.complete", prompt, **options)
                )
            except ResponseError:
                return False
            return True

        wait_until(is_enqueued)
        return made[0]

    def _write(self, damage: Damage, victim: Job) -> None:
        executions: Any = []
        with suppress(ResponseError):
            executions = self.redis.zrange(f"rq:executions:{victim.id}", 0, 0)
        scheduler = next(self.redis.scan_iter("rq:scheduler:*"), b"rq:scheduler:none").decode()
        key = damage.template.format(
            queue=damage.queue,
            worker=NAME,
            scheduler=scheduler.removeprefix("rq:scheduler:"),
            job=victim.id,
            execution=executions[0].decode(errors="surrogateescape") if executions else "none",
            group="group",
            limit="limit",
            token=TOKEN,
            run=RUN,
            folder="0" * 32,
        ).encode(errors="surrogateescape")
        with self.redis.pipeline() as pipe:
            if damage.replaces:
                pipe.delete(key)
            self._put(pipe, key, damage)
            pipe.execute(raise_on_error=False)

    def _put(self, pipe: Any, key: bytes, damage: Damage) -> None:
        entries: Any = damage.entries
        if damage.kind == "string":
            pipe.set(key, entries[0])
        elif damage.kind == "list":
            pipe.lpush(key, *entries)
        elif damage.kind == "set":
            pipe.sadd(key, *entries)
        elif damage.kind == "zset":
            pipe.zadd(key, dict.fromkeys(entries, damage.score))
        elif damage.kind == "hash":
            pipe.hset(key, mapping={damage.field: entries[0], **dict.fromkeys(entries, entries[-1])})
        else:
            last_id = "18446744073709551615-18446744073709551615"
            pipe.xadd(key, {entries[0]: entries[-1]}, id=last_id if damage.score < 0 else "*")
        if damage.ttl_s is not None and damage.template not in PLACES:
            pipe.expire(key, damage.ttl_s)

    def _check_answered(self, job: Job) -> None:
        try:
            prompt = str(job.args[0])
            assert text_of(self._workers.result(job)) == f"echo:{prompt}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._workers.log(self.process)[-3000:]}") from error

    def _check_alive(self) -> None:
        log = self._workers.log(self.process)
        assert self.process.poll() is None, log[-3000:]
        assert "Traceback" not in log, log[-3000:]
        assert self._scheduler.is_running(), log[-3000:]
        ask(self._dashboard, "/")


@contextmanager
def running_site(url: str, folder: Path) -> Iterator[Site]:
    """Start worker, scheduler and dashboard on the Redis at url; end them."""
    workers = ForkedWorkers(url, folder)
    try:
        with running_dashboard(url) as dashboard:
            yield Site(workers, dashboard)
    finally:
        workers.close()
        workers.redis.close()
