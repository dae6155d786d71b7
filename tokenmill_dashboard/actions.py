"""What the page's buttons do."""

from __future__ import annotations

from redis import Redis

from jobs.watch.requeue import REQUEUE_LIMIT, requeue, requeue_all


class Refused(Exception):
    """An action that changed nothing. code: which notice says so."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def retry_one(connection: Redis, form: dict[str, str]) -> str:
    """Put a failed job back on its queue. form: queue, job_id."""
    queue, job_id = form.get("queue", ""), form.get("job_id", "")
    if not requeue(connection, queue, [job_id.encode(errors="surrogatepass")]).done:
        raise Refused("gone")
    return "retried-1"


def retry_all(connection: Redis, form: dict[str, str]) -> str:
    """Put the failed jobs of a queue back, the oldest first, REQUEUE_LIMIT at most. form: queue."""
    done = sum(len(chunk.done) for chunk in requeue_all(connection, form.get("queue", ""), REQUEUE_LIMIT))
    if not done:
        raise Refused("gone")
    return f"retried-{done}"
