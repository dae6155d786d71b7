"""Stands in for the engine: `answer` maps a request to its completion, and `drive` runs a task to its end."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from redis import Redis
from rq import Queue
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from jobs import errors
from jobs.context import JobContext
from jobs.context.answers import Answer as RowAnswer
from jobs.context.checks import Checks
from jobs.context.served_model import ServedModel
from jobs.items.runner import ItemRunner
from jobs.parquet.asks.ask import RowAsk
from jobs.parquet.asks.generate import Generate
from jobs.parquet.asks.row_keys import RowKeys, row_keys
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.shards.row_items import row_runner
from jobs.parquet.tables.columns import RowProblem
from jobs.runs.plans.spec import RunSpec
from jobs.table import own_function, task_of
from jobs.tasks import OpenTask, Request


@dataclass(frozen=True)
class FakeCompletion:
    text: str = ""
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "stop"
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_continued: int = 0
    error: str | None = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    reasoning: str | None = None
    tool_calls: Any = None
    tool_call_error: str | None = None
    prompt_text: str | None = None
    prompt_tokens: Any = None
    loglikelihoods: Any = None
    embedding: list[float] | None = None
    class_scores: dict[str, float] | None = None
    lacks_adapter: bool = False


#: What the contexts of these tests serve.
MODEL = ServedModel("m", "fingerprint of m", "float32", "none", ("/models/m",))

Answer = Callable[[Request], FakeCompletion]


def shout(request: Request) -> FakeCompletion:
    """Answer with the prompt in capitals; one token a character."""
    text = (
        request.prompt
        if isinstance(request.prompt, str)
        else str(request.messages or request.prompt)
    )
    return FakeCompletion(
        text.upper(), 0, list(range(len(text))), "stop", len(text), len(text) // 2
    )


def refuse(reason: str) -> FakeCompletion:
    return FakeCompletion(finish_reason="error", error=reason)


def feed(task: OpenTask, answer: Answer = shout) -> list[Request]:
    """Deliver all answers, the last request's first; then to what they lead to. Return the requests in order.

    Of n samples of a request, each further one ends with one more "!"; the last comes first.
    """
    requests: list[Request] = []
    while True:
        begin = len(requests)
        requests += task.requests()
        for index, request in reversed(list(enumerate(requests))[begin:]):
            first = answer(request)
            n = 1 if first.finish_reason == "error" else request.sampling.get("n", 1)
            samples = [
                replace(first, index=each, text=first.text + "!" * each) for each in range(n)
            ]
            if task.inspects:
                task.inspect(index, samples[::-1])
            task.deliver(index, samples[::-1])
        if not task.has_more:
            return requests


def keep(task: OpenTask, so_far: Mapping[int, Mapping[int, Sequence[int]]]) -> bool:
    """Write an entry of its journal; return whether anything was new."""
    write = task.keep(so_far)
    if write is not None:
        write()
    return write is not None


def keyed(ask: RowAsk, spec: RunSpec) -> RowAsk:
    """Return what is asked with the keys of its rows."""
    ask.keys = RowKeys(spec, ask.opening_request, "")
    return ask


def shard_of(
    prompts: Sequence[str | RowProblem], sampling: Mapping[str, Any], **others: Any
) -> ItemRunner[RowAnswer]:
    """Ask prompts as a run does, whose seed is 0, from its row 1,000 on. others: as of row_runner."""
    spec = RunSpec.from_arguments("in", "out", sampling=dict(sampling))
    ask = keyed(Generate(spec, 0, *spec.chat, spec.is_chat), spec)
    rows = [Row(each) if isinstance(each, str) else each for each in prompts]
    memo_keys = row_keys(ask.key_of, rows)
    return row_runner(rows, ask, Checks(), lambda row: 1000 + row, memo_keys=memo_keys, **others)


def run_task(
    context: JobContext, name: str, *args: Any, answer: Answer = shout, **kwargs: Any
) -> Any:
    """Run one engine job as a worker would."""
    opened = opened_task(context, name, args, kwargs)
    try:
        feed(opened, answer)
        return opened.result()
    finally:
        opened.close()


def opened_task(
    context: JobContext, name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> OpenTask:
    task = task_of(name, args, kwargs)
    assert task is not None
    return task.open(context)


def score_parquet(context: JobContext, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Plan a run as a worker would."""
    function = own_function("jobs.score_parquet")
    assert function is not None
    result = function(context, *args, **kwargs)
    assert isinstance(result, dict)
    return result


def queued_jobs(redis: Redis, queue: str = "bulk") -> list[Job]:
    return Queue(queue, connection=redis, serializer=JSONSerializer).jobs


def work_off(
    redis: Redis,
    make_context: Callable[[], JobContext],
    queue: str = "bulk",
    answer: Answer = shout,
    but: Collection[str] = (),
) -> list[Any]:
    """Run every queued job in order; delete each but those of the functions `but`, as its expiry would."""
    results = []
    for job in queued_jobs(redis, queue):
        if job.func_name in but:
            continue
        context = replace(make_context(), job_id=job.id)
        if (function := own_function(job.func_name)) is not None:
            results.append(function(context, *job.args, **job.kwargs))
        else:
            results.append(run_task(context, job.func_name, *job.args, answer=answer, **job.kwargs))
        job.delete()
    return results


def fail(redis: Redis, job: Job, text: str) -> None:
    """Leave a job as a worker leaves one that raised."""
    redis.lrem("rq:queue:bulk", 1, job.id)
    job.ended_at = job.enqueued_at
    job.save()
    job.set_status(JobStatus.FAILED)
    with redis.pipeline() as pipe:
        job._handle_failure(f"Traceback:\n  somewhere\n{text}", pipe)
        pipe.execute()


def add_worker(redis: Redis, name: str) -> None:
    """Leave what a worker that listens on `bulk` says of itself."""
    redis.sadd("rq:workers", f"rq:worker:{name}")
    redis.hset(f"rq:worker:{name}", mapping={"state": "idle", "queues": "high,bulk"})


def fails(
    kind: type[errors.JobsError], context: JobContext, source: Any, output: Any, **arguments: Any
) -> errors.JobsError:
    """Check that planning fails with `kind` and enqueued nothing; return the error."""
    with pytest.raises(kind) as caught:
        score_parquet(
            context, source if isinstance(source, list) else str(source), str(output), **arguments
        )
    assert type(caught.value) is kind or kind is errors.InvalidJob  # which InvalidValue is too
    assert queued_jobs(context.connection) == []
    return caught.value
