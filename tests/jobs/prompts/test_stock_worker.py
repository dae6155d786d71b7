"""A stock RQ worker runs our jobs with the same results."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis
from rq import Queue, Retry, SimpleWorker
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

import jobs
from engine import Completion, InvalidPrompt, SamplingParams
from jobs.context import JobContext
from jobs.errors import InvalidJob
from tests.jobs.answering import MODEL, opened_task
from worker import stock_worker
from worker.settings import WorkerSettings


@dataclass
class EchoEngine:
    """Answers the last request first, all samples of a request in one step."""

    waiting: list[tuple[str, Any, SamplingParams]] = field(default_factory=list)
    max_waiting: int = 0
    attention_backend: str = "none"
    max_model_len: int = 0
    max_num_seqs: int = 256

    def add(
        self, request_id: str, prompt: Any, params: SamplingParams, *, lane: int = 0, **_: Any
    ) -> None:
        if not prompt:
            raise InvalidPrompt("prompt is empty")
        self.waiting.append((request_id, prompt, params))
        self.max_waiting = max(self.max_waiting, len(self.waiting))

    def step(self) -> list[Completion]:
        request_id, prompt, params = self.waiting.pop()
        if prompt == "hangs":
            self.waiting.append((request_id, prompt, params))
            time.sleep(0.01)
            return []
        if prompt == "breaks":
            return [Completion(request_id, 0, [], "", "error", 6, 0, error="it broke")]
        return [
            Completion(request_id, index, [1, 2], f"{prompt}!{index}", "stop", len(prompt), 0)
            for index in reversed(range(params.n))
        ]

    def abort(self, request_id: str) -> None:
        self.waiting = [entry for entry in self.waiting if entry[0] != request_id]

    def prepare(self, prompt: Any, params: SamplingParams) -> Any:
        return prompt

    def prepare_chat(self, messages: list[dict[str, Any]], params: SamplingParams) -> list[int]:
        return [len(message["content"]) for message in messages]


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture
def queue(
    redis: Redis, tmp_path: Path, engine: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> Queue:
    roots = (str(tmp_path.resolve()),)
    settings = WorkerSettings(
        model="m",
        data_roots=roots,
        max_result_bytes=1 << 20,
        allowed_functions=("tests.worker.functions.must_shout",),
        check_timeout_s=5.0,
    )
    monkeypatch.setattr(WorkerSettings, "served_model", lambda *_: MODEL)
    stock_worker._shared_context.cache_clear()
    monkeypatch.setattr(stock_worker, "_identity", lambda: None)
    monkeypatch.setattr(stock_worker, "_settings", lambda: settings)
    monkeypatch.setattr(stock_worker, "_engine", lambda: engine)
    return Queue("stock", connection=redis, serializer=JSONSerializer)


def work(queue: Queue) -> None:
    worker = SimpleWorker([queue], connection=queue.connection, serializer=JSONSerializer)
    worker.work(burst=True)


def last_lines(job: Job) -> list[str]:
    """What went wrong, and whose fault it is."""
    result = job.latest_result()
    assert result is not None
    return (result.exc_string or "").strip().splitlines()[-2:]


def test_prompts_and_chats_are_answered(queue: Queue) -> None:
    complete = queue.enqueue("jobs.complete", ["a", "b"], n=2, max_tokens=4)
    chat = queue.enqueue("jobs.chat", messages=[{"role": "user", "content": "abc"}])
    work(queue)
    assert [choice["text"] for choice in complete.return_value()["choices"]] == [
        "a!0",
        "a!1",
        "b!0",
        "b!1",
    ]
    assert complete.return_value()["id"] == f"cmpl-{complete.id}"
    assert chat.return_value()["choices"][0]["message"]["content"] == "[3]!0"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompt": ["", ""]}, "request 0 of this job failed: prompt is empty"),
        ({"prompt": "breaks"}, "request 0 of this job failed: it broke"),
    ],
)
def test_a_bad_request_fails_its_job_by_name_at_the_first_try(
    queue: Queue, arguments: dict[str, Any], says: str
) -> None:
    bad = queue.enqueue("jobs.complete", kwargs=arguments, retry=Retry(max=2))
    good = queue.enqueue("jobs.complete", "fine")
    work(queue)
    assert bad.get_status() == JobStatus.FAILED
    problem, fault = last_lines(bad)
    assert says in problem
    assert fault == "tokenmill: client"
    assert len(bad.results()) == 1
    assert good.get_status() == JobStatus.FINISHED


def test_a_job_that_timed_out_leaves_nothing_to_the_next_one(
    queue: Queue, engine: EchoEngine
) -> None:
    slow = queue.enqueue("jobs.complete", ["of the slow job", "hangs"], job_timeout=1)
    good = queue.enqueue("jobs.complete", "fine")
    work(queue)
    assert slow.get_status() == JobStatus.FAILED
    assert [choice["text"] for choice in good.return_value()["choices"]] == ["fine!0"]
    assert engine.waiting == []


def test_a_parquet_run_is_planned_scored_and_ended(queue: Queue, tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"prompt": ["a", "", "b"] * 10, "id": range(30)}), tmp_path / "in.parquet"
    )
    plan = queue.enqueue(
        "jobs.score_parquet", str(tmp_path / "in.parquet"), str(tmp_path / "out"), rows_per_shard=7
    )
    work(queue)
    assert plan.return_value()["shards_enqueued"] == 5
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert [row["completion"] for row in rows] == ["a!0", None, "b!0"] * 10
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_the_engine_never_holds_more_than_the_window(
    context: JobContext, engine: EchoEngine
) -> None:
    task = opened_task(context, "jobs.complete", [["x"] * (stock_worker.MAX_PENDING + 50)])
    stock_worker.drive(task, engine)  # type: ignore[arg-type]
    assert engine.max_waiting == stock_worker.MAX_PENDING


def test_outside_of_a_job_the_error_says_what_to_do() -> None:
    with pytest.raises(InvalidJob, match="enqueue"):
        jobs.complete("a")
