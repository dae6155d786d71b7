"""The queue side alone: prompts that cost no computing, through BatchWorker and RQ's own workers.

    python -m ops.bench.serving.queue --jobs 10000 --rounds 3

Each round runs the three workers one after the other, so that a busy machine slows all of them. CPU time is
that of the worker and its children between the call of `work()` and its end.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from redis import Redis
from rq import Queue, SimpleWorker, Worker
from rq.serializers import JSONSerializer

from engine import Completion, EngineStats, ModelIdentity, RequestParams, RequestProgress
from tests.redis_server import running_redis_server
from worker import BatchWorker
from worker.settings import WorkerSettings

BATCH = 128
CHOICE = {"index": 0, "text": "yes", "logprobs": None, "finish_reason": "stop"}


def answer(prompt: str, max_tokens: int) -> dict[str, Any]:
    """What a stock worker runs instead of the engine: nothing."""
    return {"choices": [CHOICE], "model": "none"}


class InstantEngine:
    """Answers everything in the next step."""

    identity = ModelIdentity("none", "none")
    attention_backend = "none"
    max_model_len = 0
    max_num_seqs = BATCH
    has_unfinished = False

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self.started: list[str] = []
        self._steps = 0

    def add(
        self,
        request_id: str,
        prompt: str | list[int],
        params: RequestParams,
        *,
        lane: int = 0,
        **_: Any,
    ) -> None:
        self._waiting.append(request_id)
        self.has_unfinished = True

    def texts_so_far(self, request_ids: Any) -> dict[str, Any]:
        return {}

    def samples_so_far(self) -> dict[str, dict[int, list[int]]]:
        return {}

    def step(self, *, launches: bool = True) -> list[Completion]:
        done = [Completion(each, 0, [1], "yes", "stop", 1, 0) for each in self._waiting]
        self.started, self._waiting = self._waiting, []
        self.has_unfinished = False
        self._steps += 1
        return done

    def progress(self) -> dict[str, RequestProgress]:
        return {}

    def stats(self) -> EngineStats:
        return EngineStats(self._steps, 0, 0, 0, 0, 0, 0, 0, 0, 0)

    def prepare(self, prompt: str | list[int], params: RequestParams) -> str | list[int]:
        return prompt

    def abort(self, request_id: str) -> None: ...

    def prepare_chat(
        self, messages: list[dict[str, Any]], params: RequestParams, **options: Any
    ) -> list[int]:
        return [1]

    def prepare_grammar(self, params: RequestParams) -> None: ...

    def close(self) -> None: ...


class NoModelWorker(BatchWorker):
    """BatchWorker in all but the model."""

    def load_engine(self, settings: WorkerSettings) -> Any:
        return InstantEngine()


KINDS: dict[str, tuple[type[Any], str]] = {
    "BatchWorker": (NoModelWorker, "jobs.complete"),
    "SimpleWorker": (SimpleWorker, "ops.bench.serving.queue.answer"),
    "Worker": (Worker, "ops.bench.serving.queue.answer"),
}


def serve(kind: str, url: str) -> None:
    """Work off the queue in this process; print what it took as JSON."""
    worker = KINDS[kind][0](
        ["bench"], connection=Redis.from_url(url), serializer=JSONSerializer, prepare_for_work=True
    )
    started, cpu = time.perf_counter(), _cpu_s()
    worker.work(burst=True, logging_level="WARNING")
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "cpu_s": _cpu_s() - cpu}))


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(kind: str, url: str, jobs: int) -> dict[str, float]:
    """Enqueue, let one worker process work it off, and return its figures per job."""
    with Redis.from_url(url) as redis:
        redis.flushall()
        queue = Queue("bench", connection=redis, serializer=JSONSerializer)
        name = KINDS[kind][1]
        for start in range(0, jobs, 1000):
            queue.enqueue_many(
                [
                    Queue.prepare_data(name, (f"prompt {i}",), {"max_tokens": 1}, timeout=-1)
                    for i in range(start, min(start + 1000, jobs))
                ]
            )
        command = [sys.executable, "-m", "ops.bench.serving.queue", "--serve", kind, "--url", url]
        environment = {
            **os.environ,
            "TOKENMILL_MODEL": "none",
            "TOKENMILL_MAX_NUM_SEQS": str(BATCH),
        }
        before = redis.info("stats")["total_commands_processed"]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        commands = redis.info("stats")["total_commands_processed"] - before
        assert redis.zcard("rq:finished:bench") == jobs, f"{kind} did not finish its jobs"
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "jobs/s": jobs / found["seconds"],
        "CPU ms/job": 1000 * found["cpu_s"] / jobs,
        "server commands/job": commands / jobs,
    }


def main() -> None:
    """Run the rounds; print each worker's median figures and the ratios within rounds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--jobs", type=int, default=10_000, help="for BatchWorker; the others get fewer"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.url)
        return
    shares = {"BatchWorker": 1, "SimpleWorker": 10, "Worker": 40}
    with running_redis_server() as url:
        rounds = [
            {kind: measure(kind, url, options.jobs // share) for kind, share in shares.items()}
            for _ in range(options.rounds)
        ]
    for kind in KINDS:
        medians = {
            name: statistics.median(each[kind][name] for each in rounds) for name in rounds[0][kind]
        }
        print(f"{kind:<13}" + "".join(f"{value:10.2f} {name}" for name, value in medians.items()))
    for kind in ("SimpleWorker", "Worker"):
        ratios = [each["BatchWorker"]["jobs/s"] / each[kind]["jobs/s"] for each in rounds]
        print(
            f"BatchWorker / {kind}: {', '.join(f'{ratio:.1f}' for ratio in ratios)} times the jobs/s"
        )


if __name__ == "__main__":
    main()
