"""Whatever a stranger sends or sets wrong: a clear error for it, and the rest unharmed."""

import shutil
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rq.job import Job, JobStatus

from ops.demo.prompts import CHAT_TEMPLATE
from tests.e2e.conftest import MODEL, RealWorkers
from tests.rq_workers import leftovers

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
SYSTEM = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "4 May 2001"}]


def bad_prompts(workers: RealWorkers) -> dict[str, Job]:
    """Jobs that cannot be answered, by words that their error must hold."""
    queue = workers.queue("bulk")

    def complete(prompt: Any, **sampling: Any) -> Job:
        return queue.enqueue("jobs.complete", prompt, **{**GREEDY, **sampling})

    return {
        "prompt is empty": complete(""),
        "600 tokens": complete([5] * 600),
        "bytes": complete("x" * 2**20 + "y"),
        "no_such_name": complete("a", no_such_name=1),
        "top_k must be between -1": complete("a", top_k=2**63),
        "vocabulary": complete([1, 2, 100_000]),
        "messages": queue.enqueue("jobs.chat", [], **GREEDY),
        "System role not supported": queue.enqueue("jobs.chat", SYSTEM, **GREEDY),
    }


def test_bad_jobs_fail_by_name_and_a_file_with_bad_rows_is_scored(workers: RealWorkers) -> None:
    """With a template that is chosen by its name, and refuses a system message."""
    templates = shutil.copytree(MODEL, workers.folder / "model") / "additional_chat_templates"
    templates.mkdir()
    (templates / "strict.jinja").write_text(STRICT + CHAT_TEMPLATE)
    good = workers.folder / "good.parquet"
    messages = [SYSTEM[1:], None, [], [{"role": "user", "content": "é" * 900}], SYSTEM]
    pq.write_table(pa.table({"id": range(5), "messages": messages}), good)
    jobs = bad_prompts(workers)
    fine = workers.queue("bulk").enqueue("jobs.chat", messages[0], **GREEDY)
    workers.queue("bulk").enqueue(
        "jobs.score_parquet",
        str(good),
        str(workers.folder / "out"),
        messages_column="messages",
        sampling=GREEDY,
    )
    log = workers.burst(TOKENMILL_MODEL=str(templates.parent), TOKENMILL_CHAT_TEMPLATE="strict")

    for words, job in jobs.items():
        assert job.get_status() == JobStatus.FAILED
        assert words in str(workers.result(job).exc_string), f"{words!r} not in the error: {log}"
    assert fine.return_value()["choices"][0]["message"]["content"] == "2001-05-04"
    rows = pq.read_table(workers.folder / "out").to_pylist()
    assert [row["completion"] for row in rows] == ["2001-05-04", *[None] * 4]
    assert rows[0]["error"] is None
    assert all(row["error"] for row in rows[1:])
    assert "System role not supported" in rows[4]["error"]
    assert (workers.folder / "out" / "_SUCCESS").exists()
    assert leftovers(workers.redis, "bulk") == []
