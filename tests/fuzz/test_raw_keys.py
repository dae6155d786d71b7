"""Bytes and types of any kind in all keys: worker, scheduler and dashboard live, and other jobs end."""

from __future__ import annotations

import re
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from redis import Redis
from redis.connection import Connection
from rq.group import Group

from jobs.runs.control import submit_run
from tests.forking import ForkedWorkers
from tests.fuzz.raw_keys import DAMAGES, NOT_DAMAGED, OWN_KEYS, PAST, SHARED_KEYS, Damage, running_site
from tests.redis_server import running_redis_server

pytestmark = pytest.mark.long

ONE_KEY = ("SADD", "SREM", "HSET", "XADD", "SMEMBERS")
NO_KEYS = ("SCRIPT", "PUBLISH", "SUBSCRIBE", "UNSUBSCRIBE", "EVALSHA")


def test_jobs_end_whatever_stands_in_keys(tmp_path: Path) -> None:
    damages: list[Damage] = []

    @settings(max_examples=120, derandomize=True, database=None, phases=(Phase.generate,))
    @given(DAMAGES)
    def collect(damage: Damage) -> None:
        damages.append(damage)

    collect()
    with running_redis_server() as url, running_site(url, tmp_path) as site:
        for start in range(0, len(damages), 60):
            site.spend(damages[start : start + 60])


def test_every_key_that_is_touched_is_among_those_that_are_damaged(tmp_path: Path) -> None:
    with running_redis_server() as url:
        seen: set[str] = set()
        with Redis.from_url(url) as watcher:
            connection = watcher.connection_pool.get_connection()
            connection.send_command("MONITOR")
            connection.read_response()
            listener = Thread(target=_listen, args=(connection, seen))
            listener.start()
            _work(url, tmp_path)
            listener.join()
    named = [_pattern(template) for template in (*SHARED_KEYS, *OWN_KEYS, *NOT_DAMAGED)]
    unknown = {key for key in seen if not any(pattern.fullmatch(key) for pattern in named)}
    assert len(seen) > 20
    assert unknown == set()


def _listen(connection: Connection, seen: set[str]) -> None:
    """Keep the keys of all commands until the last one of `_work`."""
    while True:
        line = connection.read_response(disable_decoding=True)
        command, *words = [word.decode("latin-1") for word in re.findall(rb'"((?:[^"\\]|\\.)*)"', line)]
        if command.upper() == "ECHO":
            return
        if command.upper() in ONE_KEY:
            del words[1:]
        if command.upper() not in NO_KEYS:
            seen.update(word for word in words if re.match(r"(rq|tokenmill):", word))


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{\w+\\\}", "[^:]*", re.escape(template)))


def _work(url: str, folder: Path) -> None:
    """One of each kind of job, and a run."""
    workers = ForkedWorkers(url, folder)
    try:
        bulk = workers.queue("bulk")
        first = bulk.enqueue("jobs.complete", "a", max_tokens=1)
        bulk.enqueue("jobs.complete", "b", max_tokens=1, depends_on=first)
        bulk.enqueue_at(PAST, "jobs.complete", "c", max_tokens=1)
        bulk.enqueue("jobs.complete", "refuse", failure_ttl=0)
        Group.create(workers.redis, "group").enqueue_many(bulk, [bulk.prepare_data("jobs.complete", ("d",))])
        pq.write_table(pa.table({"prompt": ["e"]}), folder / "in.parquet")
        submit_run(workers.redis, "bulk", input=str(folder / "in.parquet"), output=str(folder / "out"))
        workers.burst("--with-scheduler")
        workers.redis.echo("the end")
    finally:
        workers.close()
        workers.redis.close()
