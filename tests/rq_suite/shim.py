"""A pytest plugin that puts BatchWorker in the place of RQ's workers, for RQ's own tests.

It runs in a process of its own, in which `tests` is RQ's package: nothing of ours is imported from there.
The environment says where the engine that computes nothing is (RQ_SUITE_ENGINE), where to write what came out
(RQ_SUITE_REPORT) and whether workers were made, in whichever process (RQ_SUITE_MADE).
"""

import importlib.util
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import rq
import rq.serializers
import rq.worker
import rq.worker.worker_classes
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.queue import Queue

from worker.start import load_parts
from worker.store.user_code import Webhooks

TEST_TIMEOUT_S = 60


def _engine_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_engine", os.environ["RQ_SUITE_ENGINE"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_engine"] = module
    spec.loader.exec_module(module)
    return module


_FakeEngineWorker = _engine_module().FakeEngineWorker


class SuiteWorker(_FakeEngineWorker):  # type: ignore[misc, valid-type]
    """BatchWorker under the names of RQ's workers, with ports of the steps that their tests take by hand."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with open(os.environ["RQ_SUITE_MADE"], "a") as made:
            made.write(".")
        super().__init__(*args, **kwargs)

    def perform_job(self, job: Job, queue: Queue, execution: Execution | None = None) -> bool:
        """Bring one job to its end, whether it waits in its queue or was taken from there already."""
        self.register_death()  # some tests have taken the worker's first steps by hand, or the job's
        if execution is not None:
            with self.connection.pipeline() as pipeline:
                self.cleanup_execution(job, pipeline=pipeline, execution=execution)
                pipeline.execute()
        job.set_status(JobStatus.QUEUED)
        if job.id not in queue.job_ids:
            queue.push_job_id(job.id, at_front=True)
        return bool(self.work(burst=True, max_jobs=1))

    def execute_job(self, job: Job, queue: Queue) -> None:
        """As `perform_job`: there is no work horse."""
        self.perform_job(job, queue)


def _send_webhooks(sender: Webhooks, job: Job, status: str, exc_string: str | None = None) -> None:
    """Tell RQ's tests, which replace `Webhook.send`, what a worker sends with a sender of its own."""
    for webhook in job.webhooks:
        if webhook.job_status == status:
            webhook.send(job, exc_string=exc_string)


def _install() -> None:
    load_parts()  # here, so that the workers that RQ's tests fork start as soon as RQ's own
    Webhooks.send = _send_webhooks  # type: ignore[method-assign]
    json_only = rq.serializers.JSONSerializer  # where a test names no serializer
    rq.serializers.PickleSerializer = rq.serializers.DefaultSerializer = json_only
    places = [module for name, module in sys.modules.items() if name.split(".")[0] == "rq"]
    for place in places:
        for name in {"Worker", "SimpleWorker"} & set(vars(place)):
            setattr(place, name, SuiteWorker)


_install()
_reports: dict[str, dict[str, Any]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Note whether one of our workers takes part in a test, and end one that hangs."""
    made = Path(os.environ["RQ_SUITE_MADE"])
    made.unlink(missing_ok=True)
    signal.signal(signal.SIGALRM, _out_of_time)
    result = yield
    _reports[_name(item.nodeid)]["workers"] = int(made.exists())
    for process in multiprocessing.active_children():  # RQ's tests leave some behind
        process.kill()
    Path(os.environ["RQ_SUITE_REPORT"]).write_text(json.dumps(_reports))
    return result


def _out_of_time(*_: object) -> None:
    raise TimeoutError(f"RQ's test ran longer than {TEST_TIMEOUT_S} s")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    signal.alarm(TEST_TIMEOUT_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def _name(nodeid: str) -> str:
    return nodeid.split("/")[-1]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the worst of a test's three reports."""
    entry = _reports.setdefault(_name(report.nodeid), {"outcome": "passed", "text": ""})
    if report.outcome != "passed" and entry["outcome"] != "failed":
        entry["outcome"], entry["text"] = report.outcome, str(report.longrepr)
