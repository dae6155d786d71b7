"""What a command costs Redis while it waits for a worker's answer."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from jobs.cli import trial_commands
from jobs.errors import TrialFailed


class Clock:
    """Stands still but for naps, after each of which it calls `then`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: Any = lambda moment: None) -> None:
        self.moment, self.then = 0.0, then
        monkeypatch.setattr(
            trial_commands, "time", SimpleNamespace(monotonic=lambda: self.moment, sleep=self.nap)
        )

    def nap(self, seconds: float) -> None:
        self.moment += seconds
        self.then(self.moment)


def looks_for_workers(redis: Redis) -> int:
    return int(redis.info("commandstats").get("cmdstat_smembers", {"calls": 0})["calls"])


def test_a_command_that_waits_for_its_job_looks_for_workers_every_few_seconds(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.sadd("rq:workers", "rq:worker:w")
    redis.hset("rq:worker:w", mapping={"state": "busy", "queues": "bulk"})

    def answer(moment: float) -> None:
        if moment >= 60:
            (key,) = redis.keys("rq:job:trial-*")
            redis.hset(key, "status", "finished")

    Clock(monkeypatch, answer)
    monkeypatch.setattr(
        trial_commands, "last_result", lambda connection, job_id: json.dumps({"rows": 1})
    )
    redis.config_resetstat()
    assert trial_commands.try_job(redis, "bulk", "jobs.survey_parquet", {}) == {"rows": 1}
    assert 10 <= looks_for_workers(redis) <= 31


def test_a_command_for_which_no_worker_listens_gives_up_after_seconds(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(TrialFailed, match="no worker listens on queue 'bulk'"):
        trial_commands.try_job(redis, "bulk", "jobs.survey_parquet", {})
    assert 3 <= clock.moment <= 6
