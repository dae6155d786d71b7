"""Every load scenario, shortened: its counts hold. `ops.load` alone judges what depends on the machine."""

from __future__ import annotations

from ops.load.flood import flood
from ops.load.hostile import hostile
from ops.load.inflight import inflight
from ops.load.queued import queued
from ops.load.repeats import repeats
from ops.load.report import Report
from ops.load.rows import rows
from ops.load.sharing import workers
from ops.load.soak import slope, soak
from ops.load.urgent import urgent


def check(report: Report) -> None:
    assert report.lines
    assert not report.broken(measured=False), report.table()


def test_every_queued_prompt_is_answered_once() -> None:
    check(queued(jobs=1500, worker_counts=(2,)))


def test_workers_share_prompts_and_shards_and_double_nothing() -> None:
    check(workers(count=3, jobs=400, shards=12))


def test_a_run_leaves_every_row_once_and_nothing_else() -> None:
    check(rows(sizes=(3000,), row_group_rows=700, rows_per_shard=250))


def test_prompts_that_repeat_are_computed_once_on_a_worker() -> None:
    check(repeats(num_rows=5000, distinct=200))


def test_jobs_in_flight_outlive_their_leases() -> None:
    check(inflight(jobs=100, hold_s=3.5, busy_s=(0.05,)))


def test_neither_lane_starves_the_other() -> None:
    check(flood(bulk=3000, intervals=2))


def test_urgent_prompts_are_answered_while_bulk_work_holds_every_block() -> None:
    check(urgent(prompts=4, kinds=["blocks"]))


def test_no_attack_costs_another_tenant_a_prompt() -> None:
    check(hostile(seconds=0.5, rounds=1, scale=0.01, apart=False))


def test_everything_at_once_ends_and_expires() -> None:
    check(soak(minutes=0.05))


def test_a_broken_bound_is_reported() -> None:
    report = Report("title")
    report.equal("lost", 1, 0)
    report.at_most("ratio", 1.2, 1.1, measured=True)
    report.at_least("share", 3, 2)
    assert [line.what for line in report.broken()] == ["lost", "ratio"]
    assert [line.what for line in report.broken(measured=False)] == ["lost"]
    assert report.table().count("BROKEN") == 2
    assert slope([0, 1, 2], [5, 7, 9]) == 2
