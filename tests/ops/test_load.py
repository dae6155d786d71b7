"""Every load scenario, shortened: its counts hold. `ops.load` alone judges what depends on the machine."""

from __future__ import annotations

from ops.load.queued import queued
from ops.load.report import Report
from ops.load.rows import rows
from ops.load.sharing import workers


def check(report: Report) -> None:
    assert report.lines
    assert not report.broken(measured=False), report.table()


def test_every_queued_prompt_is_answered_once_by_one_worker_or_two() -> None:
    check(queued(jobs=2000, worker_counts=(1, 2)))


def test_workers_share_prompts_and_shards_and_double_nothing() -> None:
    check(workers(count=3, jobs=400, shards=12))


def test_a_run_leaves_every_row_once_and_nothing_else() -> None:
    check(rows(sizes=(3000,), row_group_rows=700, rows_per_shard=250))
