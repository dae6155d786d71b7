"""rq-dashboard beside our page: running and failed jobs, no prompts; a deleted job hides no other."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rq.job import Job, JobStatus

from tests.dashboard.dashboard_process import act, ask, get, get_json, running_dashboard
from tests.forking import ForkedWorkers
from tests.redis_server import running_redis_server
from tests.rq_workers import Workers, wait_until, wait_until_started
from tests.worker.test_hostile_jobs import Bomb


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with running_redis_server() as url:
        running = ForkedWorkers(url, tmp_path)
        yield running
        running.close()
        running.redis.close()


@pytest.fixture
def dashboard(workers: Workers) -> Iterator[str]:
    """Its address on this machine."""
    with running_dashboard(workers.url) as address:
        yield address


def test_dashboard_shows_queues_a_running_and_a_failed_job_without_their_prompts(
    workers: Workers, dashboard: str
) -> None:
    running = workers.queue("high").enqueue("jobs.complete", "hang: secret words", max_tokens=3)
    failed = workers.queue("bulk").enqueue("os.getcwd")
    workers.start("--name", "w")
    wait_until_started(running)
    workers.result(failed)
    wait_until(lambda: workers.redis.hget("rq:worker:w", "current_job"))
    late = [workers.queue("late").enqueue("jobs.complete", f"secret words {i}") for i in range(3)]

    queues = {queue["name"]: queue for queue in get_json(dashboard, "/rq/0/data/queues.json")["queues"]}
    assert queues["late"]["count"] == len(late)
    assert queues["high"]["started_job_registry_count"] == 1
    assert queues["bulk"]["failed_job_registry_count"] == 1
    shown = get_json(dashboard, "/rq/0/data/jobs/high/started/8/asc/1.json")["jobs"]
    assert [job["id"] for job in shown] == [running.id]
    shown = get_json(dashboard, "/rq/0/data/jobs/bulk/failed/8/asc/1.json")["jobs"]
    assert "TOKENMILL_ALLOWED_FUNCTIONS" in shown[0]["exc_info"]
    worker = get_json(dashboard, "/rq/0/data/workers.json")["workers"][0]
    assert worker["current_job"]["job_id"] == running.id
    pages = ["/rq/", "/rq/0/view/workers", "/rq/0/view/jobs", "/rq/0/data/workers.json"]
    pages += ["/rq/0/data/jobs/late/queued/8/asc/1.json", "/rq/0/data/jobs/high/started/8/asc/1.json"]
    pages += ["/", "/failed", f"/jobs/{running.id}", f"/jobs/{late[0].id}"]
    for page in pages:
        assert "secret" not in get(dashboard, page)


def test_a_worker_whose_current_job_was_deleted_is_shown_as_idle(workers: Workers, dashboard: str) -> None:
    workers.redis.sadd("rq:workers", "rq:worker:w")
    workers.redis.hset("rq:worker:w", mapping={"queues": "high", "state": "busy", "current_job": "gone"})
    worker = get_json(dashboard, "/rq/0/data/workers.json")["workers"][0]
    assert worker["current_job"] == "idle"


@pytest.mark.parametrize("where", ["unix://:pass@word@{path}", "unix://{path}?password=pass@word"])
def test_pages_show_no_password(workers: Workers, where: str) -> None:
    failed = workers.queue("bulk").enqueue("os.getcwd")
    workers.burst()
    workers.redis.config_set("requirepass", "pass@word")
    with running_dashboard(where.format(path=workers.url.removeprefix("unix://"))) as address:
        pages = ["/", "/failed", f"/jobs/{failed.id}", "/rq/", "/rq/0/view/workers", "/rq/0/view/jobs"]
        pages += [f"/rq/0/view/job/{failed.id}", "/rq/0/data/workers.json"]
        pages += ["/rq/0/data/queues.json", f"/rq/0/data/job/{failed.id}.json"]
        for page in pages:
            assert "word" not in get(address, page).replace("password", "")


def failed_job(workers: Workers, job_id: str = "job") -> Job:
    """Put a job among the failed ones, as a worker would."""
    job = workers.queue("bulk").enqueue("jobs.complete", "a", max_tokens=1, job_id=job_id)
    workers.redis.lrem("rq:queue:bulk", 1, job.id)
    workers.redis.zadd("rq:failed:bulk", {job.id: 1e12})
    job.set_status(JobStatus.FAILED)
    return job


def test_a_pickle_is_not_loaded_by_any_page_or_action(
    workers: Workers, dashboard: str, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    bomb = pickle.dumps(Bomb(mark))
    for job in (failed_job(workers), failed_job(workers, "other")):
        workers.redis.hset(job.key, mapping={"data": bomb, "meta": bomb, "result": bomb})
        workers.redis.xadd(f"rq:results:{job.id}", {"type": 1, "return_value": bomb, "created_at": "0"})
    pages = ["/rq/", "/rq/0/view/workers", "/rq/0/view/jobs", "/rq/0/view/job/job", "/rq/0/data/job/job.json"]
    pages += ["/rq/0/view/jobs/bulk/failed/8/asc/1", "/rq/0/data/jobs/bulk/failed/8/asc/1.json"]
    for page in pages:
        ask(dashboard, page)
    act(dashboard, "/rq/job/job/requeue")
    act(dashboard, "/rq/requeue/bulk")
    act(dashboard, "/rq/queue/bulk/compact")
    assert not mark.exists()
    pickle.loads(bomb)  # what this test would have seen
    assert mark.exists()


def test_a_damaged_job_is_listed_as_such_and_hides_no_other(workers: Workers, dashboard: str) -> None:
    good, hash_, result = (failed_job(workers, job_id) for job_id in ("good", "hash", "result"))
    workers.redis.hset(hash_.key, "timeout", "abc")
    workers.redis.set(f"rq:results:{result.id}", "no stream")
    jobs = get_json(dashboard, "/rq/0/data/jobs/bulk/failed/8/asc/1.json")["jobs"]
    shown = {job["id"]: job["description"].partition(":")[0] for job in jobs}
    assert shown == {good.id: "jobs.complete", hash_.id: "cannot be read", result.id: "cannot be read"}


def test_a_key_of_another_type_is_named_and_hides_no_other(workers: Workers, dashboard: str) -> None:
    client = workers.redis
    good = failed_job(workers)
    for name in ("odd", "\xff"):
        client.sadd("rq:queues", f"rq:queue:{name}".encode("latin-1"))
    client.sadd("rq:workers", "rq:worker:odd", b"rq:worker:\xff")
    client.hset("rq:queue:odd", "a", "b")
    lists = ("started", "failed", "finished", "deferred", "scheduled", "canceled")
    for registry in (*lists, "worker"):
        client.set(f"rq:{registry.replace('started', 'wip')}:odd", "text")
    queues = {queue["name"]: queue for queue in get_json(dashboard, "/rq/0/data/queues.json")["queues"]}
    assert queues["bulk"]["failed_job_registry_count"] == 1
    assert {value for name, value in queues["odd"].items() if name.endswith("count")} == {"?"}
    for name, order in (("queued", "asc"), *((registry, "dsc") for registry in lists)):
        page = get_json(dashboard, f"/rq/0/data/jobs/odd/{name}/8/{order}/1.json")
        expected = "hash, expected list" if name == "queued" else "string, expected zset"
        assert expected in page["jobs"][0]["description"]
        get(dashboard, f"/rq/0/view/jobs/odd/{name}/8/{order}/1")
    [shown] = get_json(dashboard, "/rq/0/data/jobs/bulk/failed/8/asc/1.json")["jobs"]
    assert shown["id"] == good.id
    client.zadd("rq:failed:bulk", {b"\xff": 1e12})
    [shown] = get_json(dashboard, "/rq/0/data/jobs/bulk/failed/8/asc/1.json")["jobs"]
    assert "no UTF-8" in shown["description"]
    assert get_json(dashboard, "/rq/0/data/workers.json")["workers"] == []
    client.set("rq:queues", "text")
    answer = ask(dashboard, "/rq/0/data/queues.json")
    assert (answer.status, "WRONGTYPE" in answer.text) == (502, True)


def test_an_action_needs_post_and_the_token_of_the_dashboards_own_pages(
    workers: Workers, dashboard: str
) -> None:
    job = failed_job(workers)
    assert ask(dashboard, "/rq/requeue/bulk").status == 405
    for action in (
        "/rq/requeue/bulk",
        f"/rq/job/{job.id}/requeue",
        "/rq/queue/bulk/compact",
        "/rq/queue/bulk/failed/empty",
    ):
        assert ask(dashboard, action, "POST").status == 403
        assert ask(dashboard, action, "POST", X_CSRFToken="guess", Cookie="_csrf_token=guess").status == 403
    assert job.get_status() == JobStatus.FAILED
    assert act(dashboard, "/rq/requeue/bulk").status == 200
    assert workers.queue("bulk").job_ids == [job.id]
    assert "SameSite=Strict" in ask(dashboard, "/rq/").headers["set-cookie"]


def test_a_job_that_cannot_be_read_keeps_no_other_from_being_requeued(
    workers: Workers, dashboard: str
) -> None:
    bad, gone, good = (failed_job(workers, job_id) for job_id in ("a-bad", "b-gone", "c-good"))
    workers.redis.hset(bad.key, mapping={"timeout": "abc", "data": b"\x80\x04junk"})
    workers.redis.delete(gone.key)
    assert act(dashboard, "/rq/requeue/bulk").text.strip() == '{"count":2,"status":"OK"}'
    assert workers.queue("bulk").job_ids == [bad.id, good.id]
    for job in (good, gone):
        assert act(dashboard, f"/rq/job/{job.id}/requeue").status == 409


def test_a_name_that_others_point_at_this_machine_gets_no_answer(workers: Workers, dashboard: str) -> None:
    failed_job(workers, "my-job")
    for path in ("/", "/failed", "/rq/", "/rq/0/data/jobs/bulk/failed/8/asc/1.json"):
        refused = ask(dashboard, path, Host="evil.example")
        assert refused.status == 403
        assert "my-job" not in refused.text
    port = dashboard.rpartition(":")[2]
    assert ask(dashboard, "/", Host=f"localhost:{port}").status == 200
    with running_dashboard(workers.url, "--host", "jobs.example") as proxied:
        assert ask(proxied, "/", Host="jobs.example").status == 200


def test_nothing_that_producers_write_becomes_part_of_a_page(workers: Workers, dashboard: str) -> None:
    failed_job(workers)
    queue = "x');alert(1);//"
    page = get(dashboard, f"/rq/0/view/jobs/{queue}/queued/8/asc/1".replace("'", "%27"))
    assert queue not in page
    pages = [page, *(get(dashboard, path) for path in ("/rq/", "/rq/0/view/workers", "/rq/0/view/job/job"))]
    for page in pages:
        # Underscore writes <%= as it stands and escapes <%-; jQuery's text() escapes too.
        assert re.findall(r"<%=(?! \$\('<div/>'\)\.text\()", page) == []
        assert "<%-" in page
