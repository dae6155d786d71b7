"""Runs our jobs inside a stock `rq worker`, one after the other.

RQ forks for each job, which loads the model again: slow, but results never depend on the worker class.
jobs/installed.py finds this module as an entry point.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rq import get_current_job
from rq.job import Job

from jobs.context import JobContext
from jobs.context.check_processes import Checks
from jobs.context.served_model import PromptMeter
from jobs.context.shared_files import ShardBytes
from jobs.errors import InvalidJob, JobsError
from jobs.installed import check_sampling
from jobs.table import own_function, task_of
from jobs.tasks import OpenTask, Request

if TYPE_CHECKING:
    from engine import Completion, Engine, ModelIdentity
    from worker.settings import WorkerSettings

#: Requests in the engine at once: enough for any batch, few enough to keep a shard's stream lazy.
MAX_PENDING = 256


def run_task(function_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one engine job as the current RQ job and return its result. Raises JobsError."""
    with _tried_once():
        task = task_of(function_name, args, kwargs)
        assert task is not None, function_name
        job, engine = _current_job(), _engine()
        opened = task.open(_context(job, engine.attention_backend))
        try:
            drive(opened, engine)
            return opened.result()
        finally:
            opened.close()


def run_own_function(function_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one of our ordinary functions as the current RQ job. Raises JobsError."""
    function = own_function(function_name)
    assert function is not None, function_name
    with _tried_once():
        return function(_context(_current_job()), *args, **kwargs)


@contextmanager
def _tried_once() -> Iterator[None]:
    """Take the retries from a job that would fail alike each time."""
    try:
        yield
    except JobsError as error:
        job = get_current_job()
        if job is not None and error.fault != "server":
            job.retries_left = None
        raise


def drive(task: OpenTask, engine: Engine) -> None:
    """Feed an open task's requests to the engine until every one is delivered.

    None stays behind after an error or timeout: a `SimpleWorker` gives the next job the same engine and the same ids.
    """
    samples: dict[int, list[Completion]] = {}  # of the requests inside the engine
    missing: dict[int, int] = {}
    stream = _stream(task)
    try:
        while True:
            _refill(task, engine, stream, samples, missing)
            if not samples:
                return
            for completion in engine.step():
                index = int(completion.request_id)
                if index not in samples:
                    continue  # another sample of a request that has failed already
                samples[index].append(completion)
                missing[index] -= 1
                if missing[index] == 0 or completion.finish_reason == "error":
                    engine.abort(str(index))  # what is left of a request that failed
                    _deliver(task, index, samples.pop(index))
    finally:
        for index in samples:
            engine.abort(str(index))


def _stream(task: OpenTask) -> Iterator[tuple[int, Request] | None]:
    """Yield a task's requests by number, and those that its answers lead to; None where there is none by now."""
    numbers, requests = count(), task.requests()
    while True:
        yield from ((next(numbers), request) for request in requests)
        if task.has_more:
            requests = task.requests()
        else:
            yield None


def _deliver(task: OpenTask, index: int, completions: Sequence[Completion]) -> None:
    if task.inspects:
        task.inspect(index, completions)
    task.deliver(index, completions)


def _refill(
    task: OpenTask,
    engine: Engine,
    stream: Iterator[tuple[int, Request] | None],
    samples: dict[int, list[Completion]],
    missing: dict[int, int],
) -> None:
    from engine import Completion, InvalidRequest
    from worker.engine_thread.intake import read_request

    while len(samples) < MAX_PENDING and (item := next(stream)) is not None:
        index, request = item
        try:
            prompt, params = read_request(engine, request)
            engine.add(str(index), prompt, params, continued=request.continued, resumed=request.resumed)
        except InvalidRequest as error:
            _deliver(task, index, [Completion(str(index), 0, [], "", "error", 0, 0, error=str(error))])
        else:
            samples[index], missing[index] = [], params.n


def _current_job() -> Job:
    job = get_current_job()
    if job is None:
        raise InvalidJob("no RQ job is running: enqueue this function, or use engine.generate in Python")
    return job


def _context(job: Job, attention_backend: str = "") -> JobContext:
    settings = _settings()
    return JobContext(
        connection=job.connection,
        queue_name=job.origin,
        job_id=job.id,
        execution_id=uuid4().hex,
        data_roots=settings.data_roots,
        model=settings.served_model(_identity(), attention_backend),
        check_sampling=check_sampling,
        max_result_bytes=settings.max_result_bytes,
        shard_bytes=ShardBytes(settings.max_shard_bytes),
        meter=_meter,
        checks=_checks(),
        webhook_hosts=frozenset(settings.allowed_webhook_hosts),
        allowed_functions=frozenset(settings.allowed_functions),
        worker_name=job.worker_name or "",
    )


def _meter() -> PromptMeter:
    from worker.job_environment import prompt_meter

    settings = _settings()
    return prompt_meter(_engine(), settings.max_num_seqs, settings.block_size)


@functools.cache
def _settings() -> WorkerSettings:
    from worker.settings import WorkerSettings

    return WorkerSettings.load()


@functools.cache
def _checks() -> Checks:
    settings = _settings()
    return Checks(settings.allowed_functions, settings.check_timeout_s)


@functools.cache
def _identity() -> ModelIdentity:
    from engine import model_identity

    return model_identity(_settings().engine_config())


@functools.cache
def _engine() -> Engine:
    from engine import Engine

    return Engine(_settings().engine_config())
