"""RQ's own worker gives the same answers, slowly."""

import subprocess

import pytest
from rq.job import JobStatus

from ops.demo.prompts import BARE_PROMPT
from tests.e2e.conftest import RealWorkers
from tests.rq_workers import RQ


@pytest.mark.long
@pytest.mark.usefixtures("new_interpreters")
def test_a_stock_worker_runs_complete_and_chat(workers: RealWorkers) -> None:
    text = "the 3rd of March, '87"
    queue = workers.queue("bulk")
    sampling = {"max_tokens": 12, "temperature": 0}
    complete = queue.enqueue("jobs.complete", BARE_PROMPT.format(text=text), **sampling)
    chat = queue.enqueue("jobs.chat", [{"role": "user", "content": text}], **sampling)
    bad = queue.enqueue("jobs.complete", "x", max_tokens="4")
    command = [*RQ, "worker", "--burst", "-S", "json", "bulk"]
    subprocess.run(command, env=workers.environment(), cwd=workers.folder, check=True, timeout=280)
    assert complete.return_value()["choices"][0]["text"] == "1987-03-03"
    assert complete.return_value()["object"] == "text_completion"
    assert chat.return_value()["choices"][0]["message"] == {
        "role": "assistant",
        "content": "1987-03-03",
    }
    assert chat.return_value()["usage"]["completion_tokens"] == 11
    assert bad.get_status() == JobStatus.FAILED
    assert "max_tokens:=4" in str(workers.result(bad).exc_string)
