"""Job hashes of any content through a real worker: each ends by itself, and the worker goes on."""

import subprocess
from dataclasses import dataclass

from hypothesis import strategies as st
from redis import Redis
from rq.results import Result
from rq.serializers import JSONSerializer

from tests.fuzz.named import NAMED
from tests.fuzz.values import HASHES, PAYLOADS
from tests.rq_workers import Workers, leftovers


@dataclass(frozen=True)
class Hash:
    """The payload of a job, and fields of its hash that are not as RQ writes them."""

    data: bytes
    other: dict[str, bytes]


CASES = st.builds(Hash, PAYLOADS, st.just({}) | HASHES)


def check_hashes(workers: Workers, hashes: list[Hash], timeout_s: float) -> None:
    """Let one burst worker end all of them, good jobs between them; each fails by name or has a result."""
    queue = workers.queue("bulk")
    ids, good = [], []
    for number, each in enumerate(hashes):
        job = queue.enqueue("jobs.complete", "x", result_ttl=-1, failure_ttl=-1, job_timeout=10)
        workers.redis.hset(job.key, mapping={"data": each.data, **each.other})
        ids.append(job.id)
        if number % 25 == 0:
            good.append(queue.enqueue("jobs.complete", "good", max_tokens=1, result_ttl=-1))
    process = workers.start("--burst", TOKENMILL_MAX_WORKER_DEATHS="1000")
    try:
        assert process.wait(timeout=timeout_s) == 0, workers.log(process)[-4000:]
    except subprocess.TimeoutExpired:
        held = [
            job_id
            for job_id in ids
            if workers.redis.hget(f"rq:job:{job_id}", "status") != b"failed"
        ]
        stuck = [each for job_id, each in zip(ids, hashes, strict=True) if job_id in held]
        raise AssertionError(f"{workers.log(process)[-2000:]}\nstill there: {stuck}") from None
    for job_id, each in zip(ids, hashes, strict=True):
        problem = _problem(workers.redis, job_id)
        assert problem is None, f"{each}: {problem}"
    for job in good:
        assert workers.result(job).return_value["choices"][0]["text"] == "echo:good"
    assert leftovers(workers.redis, "bulk") == []


def _problem(redis: Redis, job_id: str) -> str | None:
    """What is wrong with a job's end, or None."""
    entries = redis.xrange(Result.get_key(job_id))
    listed = sum(
        redis.zscore(f"rq:{name}:bulk", job_id) is not None for name in ("finished", "failed")
    )
    if redis.llen("rq:queue:bulk"):
        return "the queue is not empty"
    if not entries:
        status = redis.hget(f"rq:job:{job_id}", "status")
        # A time to live of 0 leaves nothing, and one of a few seconds may be over.
        return None if status is None else f"it has no result, its status is {status!r}"
    result = Result.restore(job_id, entries[-1][0].decode(), entries[-1][1], redis, JSONSerializer)
    text = result.exc_string
    if text is not None and not NAMED.search(text):
        return f"it failed without a named error: {text[-500:]}"
    return None if listed <= 1 else "it is in two registries"
