"""What only looks goes on where Redis refuses to write, and says on top why it does."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs
from tests.rq_workers import wait_until
from tests.tokenmill.dashboard.conftest import Open, open_page  # noqa: F401


@contextmanager
def full(redis: Redis) -> Iterator[str]:
    redis.config_set("maxmemory", "1")
    yield "no job can be enqueued"
    redis.config_set("maxmemory", "0")


@contextmanager
def replica(redis: Redis) -> Iterator[str]:
    redis.replicaof("127.0.0.1", "1")
    yield "this is a replica"
    redis.replicaof("NO", "ONE")


@contextmanager
def without_snapshot(redis: Redis) -> Iterator[str]:
    place = Path(redis.config_get("dir")["dir"], "dump.rdb")
    place.unlink(missing_ok=True)
    place.mkdir()
    redis.config_set("save", "3600 1")
    redis.bgsave()
    wait_until(lambda: redis.info("persistence")["rdb_last_bgsave_status"] == "err")
    yield "could not write to its disk"
    redis.config_set("save", "")
    place.rmdir()
    redis.bgsave()
    wait_until(lambda: redis.info("persistence")["rdb_last_bgsave_status"] == "ok")


@pytest.fixture(params=[full, replica, without_snapshot], ids=lambda way: way.__name__)
def why(request: pytest.FixtureRequest, redis: Redis, run: str) -> Iterator[str]:
    """In what way Redis refuses to write, as it is told."""
    with request.param(redis) as told:
        with pytest.raises(RedisError):
            redis.set("a", "b")
        yield told


@pytest.fixture
def run(runs: Runs, source: Path) -> str:
    """A run that waits for a worker."""
    return str(runs.plan(source)["run"])


@pytest.mark.parametrize("command", ["status", "status {run}", "runs", "workers", "info"])
def test_commands_that_look_show_what_there_is_and_why_it_stands_still(
    run: str, why: str, invoke: Invoke, command: str
) -> None:
    done = invoke(*command.format(run=run).split())
    assert done.exit_code == 0, done.output
    assert why in done.stderr
    shown = {"workers": "no worker", "info": "queue bulk: 1 waiting"}
    assert shown.get(command, run) in done.stdout


def test_a_program_gets_json_alone(run: str, why: str, invoke: Invoke) -> None:
    assert [each["run"] for each in json.loads(invoke("status", "--json").stdout)] == [run]


def test_the_dashboard_shows_what_there_is_and_why_it_stands_still(
    run: str,
    why: str,
    open_page: Open,  # noqa: F811
) -> None:
    page = open_page()
    for path in ("/", f"/runs/{run}"):
        answer = page.get(path)
        assert answer.status_code == 200
        assert run in answer.text
        assert why in answer.text


def test_a_full_redis_is_named_with_what_mends_it(
    redis: Redis, invoke: Invoke, source: Path, tmp_path: Path
) -> None:
    with full(redis):
        refused = invoke("submit", str(source), str(tmp_path / "out"))
    assert refused.exit_code == 1
    assert "Redis is full, and takes no writes: give it more memory" in refused.stderr
