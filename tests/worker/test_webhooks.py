"""Webhooks of jobs: what a worker sends, and to whom it sends nothing."""

from typing import Any

from rq import Callback, Queue, Retry
from rq.webhook import Webhook

from tests.rq_workers import Workers, wait_until
from tests.worker.webhook_server import WebhookServer, trickling_server, webhook_server

F = "tests.worker.functions."
ALLOWED = {"TOKENMILL_ALLOWED_WEBHOOK_HOSTS": "127.0.0.1"}


def enqueue_told(queue: Queue, url: str, **options: object) -> None:
    hook = Webhook(url, "finished", method="POST", **options)
    queue.enqueue(F + "add", 1, 1, webhooks=[hook])


def test_a_host_that_is_not_allowed_is_not_called(workers: Workers) -> None:
    with webhook_server() as server:
        enqueue_told(workers.queue("bulk"), server.url)
        log = workers.burst(TOKENMILL_ALLOWED_WEBHOOK_HOSTS="localhost")
        assert server.received == []
    assert "may not call the host '127.0.0.1'" in log


def enqueue_with_webhooks(queue: Queue, url: str) -> None:
    hooks = [Webhook(url, status, method="POST") for status in ("finished", "failed")]
    queue.enqueue(F + "add", 1, 1, job_id="finishes", webhooks=hooks)
    queue.enqueue(F + "boom", "no", job_id="fails", webhooks=hooks)
    queue.enqueue(F + "boom", "no", job_id="retried", webhooks=hooks, retry=Retry(max=2))
    queue.enqueue(F + "ask_for_retry", 1, job_id="asks-for-retry", webhooks=hooks)
    queue.enqueue(F + "always_ask_for_retry", 2, job_id="asks-too-often", webhooks=hooks)
    queue.enqueue(
        F + "always_ask_for_retry", 2, interval=600, job_id="asks-for-later", webhooks=hooks
    )


def webhooks_sent(workers: Workers, server: WebhookServer, **options: Any) -> list[dict[str, Any]]:
    """What the webhooks of the same jobs say, but for moments and all lines but the last of a traceback."""
    workers.redis.flushall()
    server.received.clear()
    enqueue_with_webhooks(workers.queue("bulk"), server.url)
    workers.burst(TOKENMILL_ALLOWED_WEBHOOK_HOSTS="127.0.0.1", **options)
    return sorted(
        (
            {
                **{
                    name: bool(value) if name.endswith("_at") else value
                    for name, value in sent.items()
                },
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


def test_an_allowed_host_cannot_send_the_worker_elsewhere(workers: Workers) -> None:
    with webhook_server() as inside, webhook_server(inside.url) as allowed:
        enqueue_told(
            workers.queue("bulk"), allowed.url, headers={"X-Token": "chosen by the producer"}
        )
        log = workers.burst(**ALLOWED)
        assert len(allowed.received) == 1
        assert inside.received == []
    assert "a webhook was not sent: it answered 302" in log


def test_webhooks_that_trickle_hold_up_neither_dependents_nor_callbacks(workers: Workers) -> None:
    with trickling_server() as server:
        bulk, high = workers.queue("bulk"), workers.queue("high")
        for _ in range(40):
            enqueue_told(bulk, server.url, timeout=10**9)
        workers.start(**ALLOWED)
        assert server.first.wait(60)
        first = high.enqueue(F + "add", 1, 2)
        second = high.enqueue(
            F + "add", 3, 4, depends_on=first, on_success=Callback(F + "on_success_state")
        )
        assert workers.result(second).return_value == 7
        wait_until(
            lambda: not workers.redis.zcard("rq:wip:bulk")
        )  # jobs do not wait for their webhooks


def test_ends_of_runs_that_trickle_hold_up_no_function(workers: Workers) -> None:
    with trickling_server() as server:
        for run in range(12):
            workers.queue("bulk").enqueue("jobs.post_run_end", server.url, {"run": str(run)})
        workers.start(**ALLOWED)
        assert server.first.wait(60)
        first = workers.queue("bulk").enqueue(F + "add", 1, 2)
        second = workers.queue("bulk").enqueue(F + "add", 3, 4, depends_on=first)
        assert workers.result(second, 30).return_value == 7
