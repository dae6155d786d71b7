"""What RQ's own workers do beside running jobs, and what they leave behind."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from rq import Queue, Retry
from rq.group import Group
from rq.serializers import JSONSerializer
from rq.webhook import Webhook

from tests.rq_workers import Workers, wait_until
from tests.worker.webhook_server import WebhookServer, webhook_server
from worker import BatchWorker
from worker.store.scheduler import Scheduler

F = "tests.worker.functions."


def enqueue_with_webhooks(queue: Queue, url: str) -> None:
    hooks = [Webhook(url, status, method="POST") for status in ("finished", "failed")]
    queue.enqueue(F + "add", 1, 1, job_id="finishes", webhooks=hooks)
    queue.enqueue(F + "boom", "no", job_id="fails", webhooks=hooks)
    queue.enqueue(F + "boom", "no", job_id="retried", webhooks=hooks, retry=Retry(max=2))
    queue.enqueue(F + "ask_for_retry", 1, job_id="asks-for-retry", webhooks=hooks)
    queue.enqueue(F + "always_ask_for_retry", 2, job_id="asks-too-often", webhooks=hooks)
    queue.enqueue(F + "always_ask_for_retry", 2, interval=600, job_id="asks-for-later", webhooks=hooks)


def webhooks_sent(workers: Workers, server: WebhookServer, **options: Any) -> list[dict[str, Any]]:
    """What the webhooks of the same jobs say, but for moments and all lines but the last of a traceback."""
    workers.redis.flushall()
    server.received.clear()
    enqueue_with_webhooks(workers.queue("bulk"), server.url)
    workers.burst(TOKENMILL_ALLOWED_WEBHOOK_HOSTS="127.0.0.1", **options)
    return sorted(
        (
            {
                **{name: bool(value) if name.endswith("_at") else value for name, value in sent.items()},
                "exc_info": (sent.get("exc_info") or "").strip().splitlines()[-1:],
            }
            for sent in server.received
        ),
        key=str,
    )


def test_webhooks_say_what_those_of_rqs_own_worker_say(workers: Workers) -> None:
    with webhook_server() as server:
        ours = webhooks_sent(workers, server)
        assert ours == webhooks_sent(workers, server, worker_class="rq.worker.SimpleWorker")
    ends = sorted((sent["job_id"], sent["status"]) for sent in ours)
    assert ends == [
        ("asks-for-retry", "finished"),
        ("asks-too-often", "failed"),
        ("fails", "failed"),
        ("finishes", "finished"),
        ("retried", "failed"),
    ]


def test_a_burst_in_which_the_scheduler_raises_keeps_none_of_its_locks(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boom(scheduler: Scheduler) -> None:
        assert workers.redis.keys("rq:scheduler*"), "it has none to keep"
        raise RuntimeError("boom")

    monkeypatch.setattr(Scheduler, "enqueue_scheduled_jobs", boom)
    worker = BatchWorker(["bulk"], connection=workers.redis, serializer=JSONSerializer)
    with pytest.raises(RuntimeError, match="boom"):
        worker._start_scheduler(burst=True)
    assert workers.redis.keys("rq:scheduler*") == []


def test_a_scheduler_that_is_killed_is_started_again(workers: Workers) -> None:
    import psutil

    worker = workers.start("--with-scheduler")
    wait_until(lambda: workers.redis.keys("rq:scheduler:*"))
    [scheduler] = psutil.Process(worker.pid).children()
    scheduler.kill()
    job = workers.queue("bulk").enqueue_in(timedelta(seconds=1), F + "add", 1, 2)
    assert workers.result(job).return_value == 3
    assert "The scheduler ended (exit status -9): starting it again" in workers.log(worker)
    worker.terminate()
    assert worker.wait(timeout=60) == 0


def test_groups_are_cleaned_of_jobs_that_are_gone_and_of_empty_groups(workers: Workers) -> None:
    bulk = workers.queue("bulk")
    for name in ("some-gone", "all-gone"):
        Group(workers.redis, name).enqueue_many(
            bulk, [Queue.prepare_data(F + "add", (1, 1), job_id=f"{name}-{n}") for n in range(2)]
        )
    workers.redis.delete("rq:job:some-gone-0", "rq:job:all-gone-0", "rq:job:all-gone-1")
    workers.burst()
    assert workers.redis.smembers("rq:groups") == {b"some-gone"}
    assert workers.redis.smembers("rq:group:some-gone") == {b"some-gone-1"}
