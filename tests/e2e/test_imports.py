"""Whatever a worker may need is imported before it serves."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rq import Callback, Retry

from tests.e2e.conftest import RealWorkers
from tests.rq_workers import ROOT
from worker import BatchWorker

OURS = {
    "jobs",
    "worker",
    "engine",
    "rq",
    "redis",
    "pyarrow",
    "pandas",
    "numpy",
    "torch",
    "transformers",
    "tests",
}
F = "tests.worker.functions."


class ImportWatcher(BatchWorker):
    """Writes to the file LATE_IMPORTS which modules were imported once it served."""

    def subscribe(self) -> Any:  # the last step before it serves
        self._early = set(sys.modules)
        return super().subscribe()

    def register_death(self) -> None:
        late = set(sys.modules) - self._early
        Path(os.environ["LATE_IMPORTS"]).write_text(json.dumps(sorted(late)))
        super().register_death()


@pytest.mark.long
@pytest.mark.usefixtures("new_interpreters")
def test_a_worker_imports_nothing_of_ours_once_it_serves(
    workers: RealWorkers, tmp_path: Path
) -> None:
    queue = workers.queue("bulk")
    source = tmp_path / "in.parquet"
    messages = [[{"role": "user", "content": "March 3rd"}]] * 4
    pq.write_table(pa.table({"prompt": ["a", "b", None, "d"], "messages": messages}), source)
    jobs = [
        queue.enqueue(
            "jobs.complete", "a", max_tokens=2, temperature=0.7, top_p=0.9, top_k=4, stop=["x"]
        ),
        queue.enqueue("jobs.chat", messages[0], max_tokens=2),
        queue.enqueue(F + "add", 1, 2, on_success=Callback(F + "on_success")),
    ]
    for name, prompts in (
        ("column", {"prompt_column": "prompt"}),
        ("messages", {"messages_column": "messages"}),
        ("template", {"template": "{prompt}?"}),
    ):
        arguments = (str(source), str(tmp_path / name))
        options = {"rows_per_shard": 2, "sampling": {"max_tokens": 2}}
        jobs.append(queue.enqueue("jobs.score_parquet", *arguments, **options, **prompts))
    queue.enqueue(F + "boom", "no", on_failure=Callback(F + "on_failure"), retry=Retry(max=1))
    queue.enqueue(F + "add", 1, 2, depends_on=jobs[0])
    late = tmp_path / "late.json"
    watcher = f"{__name__}.{ImportWatcher.__name__}"
    log = workers.burst(
        "--with-scheduler", worker_class=watcher, LATE_IMPORTS=str(late), PYTHONPATH=str(ROOT)
    )
    assert all(job.get_status() == "finished" for job in jobs), log
    assert all(
        (tmp_path / name / "_SUCCESS").exists() for name in ("column", "messages", "template")
    )
    imported = json.loads(late.read_text())
    assert [name for name in imported if name.split(".")[0] in OURS] == []
