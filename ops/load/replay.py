"""What a worker sends to claim, begin and end jobs, recorded once and sent again by a light client.

A worker's own costs are left out, so that what is measured is the server.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from redis import Redis

from ops.load.raw_jobs import END, connected, enqueue_raw, job_ids, read_to
from ops.load.redis_usage import Usage, look, since
from worker.store.claimed_job import Wanted
from worker.store.client import own_client
from worker.store.job_store import JobStore
from worker.store.outcome import Outcome

ANSWER = {
    "id": "cmpl-0123456789abcdef",
    "object": "text_completion",
    "created": 1700000000,
    "model": "stub",
    "choices": [{"index": 0, "text": "echo:prompt 00000000", "logprobs": None, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 15, "completion_tokens": 1, "total_tokens": 16},
}


@dataclass(frozen=True)
class Recording:
    """Of one client: its queue, how many jobs it had, what it sent for each batch of them, send by send."""

    queue: str
    jobs: int
    batches: list[list[bytes]]

    @property
    def sends(self) -> int:
        """Round trips of all batches."""
        return sum(map(len, self.batches))


@dataclass(frozen=True)
class Replay:
    """Jobs that were ended, what the server did for it, seconds from when each batch was due to its end."""

    jobs: int
    usage: Usage
    batch_s: list[float]

    @property
    def jobs_per_s(self) -> float:
        return self.jobs / self.usage.seconds


def record(url: str, clients: int, jobs: int, batch: int) -> list[Recording]:
    """Let stores claim, begin and end `jobs` prompts each, `batch` at a time; return what they sent."""
    found = []
    with Redis.from_url(url) as redis:
        redis.flushdb()
        for number in range(clients):
            queue = f"q{number}"
            enqueue_raw(url, queue, job_ids(queue, jobs))
            sent: list[bytes] = []
            client = _recording_client(redis, sent.append)
            store = JobStore(client, f"w{number}", lease_s=600)
            store.quarantine.check([queue])  # loads the scripts
            store.claim([_wanted("none", 1)], float("inf"))
            batches = []
            while redis.llen(f"rq:queue:{queue}"):
                sent.clear()
                _work(client, store, queue, batch)
                batches.append([each + END for each in sent])
            client.close()
            found.append(Recording(queue, jobs, batches))
    return found


def replay(url: str, recordings: list[Recording], jobs_per_s: float | None = None) -> Replay:
    """Send it all again, each client on its connection: as fast as the server answers, or at a pace.

    Raises RuntimeError where not every job was ended, which a server without the scripts would do.
    """
    with Redis.from_url(url) as redis:
        redis.flushdb()
        for each in recordings:
            enqueue_raw(url, each.queue, job_ids(each.queue, each.jobs))
        jobs = sum(each.jobs for each in recordings)
        batch_s: list[float] = []
        before = look(redis)
        threads = [
            threading.Thread(target=_send, args=(url, each, _pace(each, recordings, jobs_per_s), batch_s))
            for each in recordings
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        usage = since(redis, before)
        ended = sum(redis.zcard(f"rq:finished:{each.queue}") for each in recordings)
    if ended != jobs:
        raise RuntimeError(f"{ended} of {jobs} jobs were ended")
    return Replay(jobs, usage, batch_s)


def _pace(one: Recording, all_of_them: list[Recording], jobs_per_s: float | None) -> float:
    """Seconds between the beginnings of two batches of this client; 0 for no pace."""
    if jobs_per_s is None:
        return 0.0
    return one.jobs / len(one.batches) * len(all_of_them) / jobs_per_s


def _send(url: str, recording: Recording, pace_s: float, batch_s: list[float]) -> None:
    with connected(url) as server:
        began = time.perf_counter()
        for number, batch in enumerate(recording.batches):
            due = began + number * pace_s if pace_s else time.perf_counter()
            time.sleep(max(0.0, due - time.perf_counter()))
            for each in batch:
                server.sendall(each)
                read_to(server)
            batch_s.append(time.perf_counter() - due)


def _work(client: Redis, store: JobStore, queue: str, batch: int) -> None:
    """What a worker does for a batch of prompts that are answered at once."""
    client.exists("rq:suspended")
    moment = datetime.now(UTC)
    claimed = store.claim([_wanted(queue, batch)], float("inf"))[0].jobs
    store.begin([(job, moment) for job in claimed])
    packed = json.dumps(ANSWER).encode()
    store.finish([Outcome(job, "finished", None, moment, 0.1, moment, packed=packed) for job in claimed])


def _wanted(queue: str, most: int) -> Wanted:
    return Wanted(queue, most, uuid4().hex[:24], takes_suspects=True)


def _recording_client(redis: Redis, sent: Callable[[bytes], None]) -> Redis:
    client = own_client(redis, 60.0)
    kind: Any = client.connection_pool.connection_class

    class Recorded(kind):  # type: ignore[misc]  # one of redis-py's
        def send_packed_command(self, packed: Any, *args: Any, **options: Any) -> Any:
            sent(b"".join(packed) if isinstance(packed, list) else packed)
            return super().send_packed_command(packed, *args, **options)

    client.connection_pool.connection_class = Recorded
    return client
