"""Runs our jobs in one of RQ's own workers, one after the other.

RQ forks for each job, and each fork loads the model again. That is slow, but results do not depend on the worker class.
jobs/installed.py finds this module as an entry point.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rq import get_current_job
from rq.job import Job

from jobs.context import JobContext
from jobs.context.served_model import PromptMeter
from jobs.context.shared_files import ShardBytes, SharedFiles
from jobs.errors import InvalidJob, JobsError
from jobs.table import own_function, task_of
from jobs.tasks import OpenTask, Request

if TYPE_CHECKING:
    from redis import Redis

    from engine import Completion, Engine, ModelIdentity
    from worker.settings import WorkerSettings

#: Requests in the engine at once. They fill any batch, and a shard's further requests stay in its lazy stream.
MAX_PENDING = 1024


def run_job(function_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one of our functions as the current RQ job and return its result. Raises JobsError."""
    with _retried_after_server_faults_only():
        function = own_function(function_name)
        if function is not None:
            return function(_context(_current_job()), *args, **kwargs)

        task = task_of(function_name, args, kwargs)
        assert task is not None, function_name
        job = _current_job()
        engine = _engine()
        open_task = task.open(_context(job, engine.attention_backend))
        try:
            drive(open_task, engine)
            return open_task.result()
        finally:
            open_task.close()


@contextmanager
def _retried_after_server_faults_only() -> Iterator[None]:
    """Let the job be retried only after an error of the server. Any other error would come again in each try."""
    try:
        yield
    except JobsError as error:
        job = get_current_job()
        if job is not None and error.fault != "server":
            job.retries_left = None
        raise


def drive(task: OpenTask, engine: Engine) -> None:
    """Feed an open task's requests to the engine, and deliver the completions, until no request is left.

    After an error or timeout no request stays in the engine, because in a `SimpleWorker` the next job uses the same
    engine and the same request ids.
    """
    numbers = count()
    requests = task.requests()
    pending: dict[int, _Pending] = {}
    try:
        while True:
            # Fill the engine. When the stream of requests ends, the task begins another stream if the completions that
            # were delivered have led to more requests.
            while len(pending) < MAX_PENDING:
                request = next(requests, None)
                if request is not None:
                    _add(task, engine, next(numbers), request, pending)
                elif task.has_more:
                    requests = task.requests()
                else:
                    break
            if not pending:
                return  # every request is delivered

            for completion in engine.step():
                index = int(completion.request_id)
                if index not in pending:
                    continue  # another sample of a request that has failed already
                samples = pending[index].samples
                samples.append(completion)
                has_all = len(samples) == pending[index].num_samples
                if has_all or completion.finish_reason == "error":
                    # This aborts the other samples of a failed request. For any other request it does nothing.
                    engine.abort(str(index))
                    del pending[index]
                    _deliver(task, index, samples)
    finally:
        for index in pending:
            engine.abort(str(index))


@dataclass
class _Pending:
    """A request in the engine. num_samples: how many samples it gets. samples: the samples that have arrived."""

    num_samples: int
    samples: list[Completion] = field(default_factory=list)


def _add(
    task: OpenTask, engine: Engine, index: int, request: Request, pending: dict[int, _Pending]
) -> None:
    """Give the engine a request. If the engine refuses it, deliver the refusal at once."""
    from engine import Completion as EngineCompletion
    from engine import InvalidRequest
    from worker.engine_thread.intake import prepared_request

    try:
        prompt, params = prepared_request(engine, request)
        engine.add(str(index), prompt, params, continued=request.continued, resumed=request.resumed)
    except InvalidRequest as error:
        _deliver(task, index, [EngineCompletion.refused(str(index), error)])
    else:
        pending[index] = _Pending(params.n)


def _deliver(task: OpenTask, index: int, completions: Sequence[Completion]) -> None:
    """Give a task the completions of a request. If the task inspects completions, it does so first."""
    if task.inspects:
        task.inspect(index, completions)
    task.deliver(index, completions)


def _current_job() -> Job:
    """Return the job that RQ runs here. Raises InvalidJob if there is none."""
    job = get_current_job()
    if job is None:
        raise InvalidJob(
            "no RQ job is running: enqueue this function, or use engine.generate in Python"
        )
    return job


def _context(job: Job, attention_backend: str = "") -> JobContext:
    """Return the context of a job."""
    shared = _shared_context(job.connection, attention_backend)
    shared.adapters.refresh()
    return replace(
        shared,
        # An interrupted job does not give back what it has taken from these two. So each job gets new ones.
        files=SharedFiles(),
        shard_bytes=ShardBytes(_settings().max_shard_bytes),
        queue_name=job.origin,
        job_id=job.id,
        execution_id=uuid4().hex,
        worker_name=job.worker_name or "",
    )


@functools.cache
def _shared_context(connection: Redis, attention_backend: str) -> JobContext:
    """Return the context that all jobs of this process share."""
    settings = _settings()
    max_model_len = settings.max_model_len or _engine().max_model_len
    served = settings.served_model(_identity(), attention_backend, max_model_len)
    return settings.job_context(connection, served, _meter)


def _meter() -> PromptMeter:
    """Return the meter that counts the tokens of prompts."""
    from worker.job_environment import prompt_meter

    settings = _settings()
    return prompt_meter(_engine(), settings.block_size)


@functools.cache
def _settings() -> WorkerSettings:
    """Read the settings, once in this process."""
    from worker.settings import WorkerSettings

    return WorkerSettings.load()


@functools.cache
def _identity() -> ModelIdentity:
    """Read the model's identity from its files, once in this process."""
    from engine import model_identity

    return model_identity(_settings().engine_config())


@functools.cache
def _engine() -> Engine:
    """Return the engine of this process. The first call loads the model."""
    from engine import Engine

    return Engine(_settings().engine_config())
