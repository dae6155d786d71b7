"""With another RQ_KEY_PREFIX the dashboard, its metrics and the commands tell of the keys that have it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from tests.rq_workers import ROOT, RQ
from tests.tokenmill.dashboard.dashboard_process import get, running_dashboard

TOKENMILL = (sys.executable, "-c", "from jobs.cli import main; main()")


@pytest.mark.long
def test_all_that_shows_queues_and_runs_shows_those_of_the_prefix(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    variables = {"RQ_KEY_PREFIX": "{mine}", "RQ_REDIS_URL": redis_url, "PYTHONPATH": str(ROOT)}

    def run(*command: str) -> str:
        environment = {**os.environ, **variables}
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        return done.stdout

    run(*RQ, "enqueue", "-S", "json", "-q", "prompts", "jobs.complete", "prompt=x")
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "in.parquet")
    name = run(*TOKENMILL, "submit", "in.parquet", "out").split()[0]
    assert [key for key in redis.scan_iter() if not key.startswith(b"{mine}:")] == []
    assert "queue prompts: 1 waiting" in run(*TOKENMILL, "info")
    assert name in run(*TOKENMILL, "runs")
    with running_dashboard(redis_url, "--queue", "prompts", **variables) as address:
        assert 'rq_jobs{queue="prompts",status="queued"} 1.0' in get(address, "/metrics")
        page = get(address, "/")
        assert name in page
        row = r'id="queue-\d+" data-row>\s*<th scope="row"><a href="/queues/(\w+)"'
        queues = re.findall(row, page)
        assert set(queues) == {"bulk", "prompts"}
