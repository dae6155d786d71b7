"""How a run's progress looks on a terminal and in a log."""

from __future__ import annotations

import io
import re
from typing import Any

from rq.job import JobStatus

from jobs.progress import LINE_EVERY_S, Bar, Lines
from jobs.run_snapshot import RunSnapshot


def snapshot(**changed: Any) -> RunSnapshot:
    """A run of 100 rows on which one worker works."""
    facts: dict[str, Any] = {
        "run": "r",
        "output": "/out",
        "queue": "bulk",
        "cancelled": False,
        "finished": False,
        "plan_job": None,
        "plan_status": None,
        "rows": 100,
        "shards": 10,
        "done": 0,
        "started": 1,
        "failed_jobs": (),
        "rows_done": 0,
        "errors": 0,
        "tokens": 0,
        "workers": 1,
        "queue_length": 9,
        "awaited_model": None,
    }
    return RunSnapshot(**{**facts, **changed})


PLANNING = snapshot(rows=None, shards=None, started=0, plan_status=JobStatus.QUEUED)


def test_a_bar_names_the_state_rows_speed_and_time_left() -> None:
    screen = io.StringIO()
    bar = Bar(screen)
    bar.show(PLANNING, 0.0)
    bar.show(snapshot(), 0.0)
    bar.show(snapshot(rows_done=40, failed_jobs=("x",)), 7.4)
    bar.close()
    frames = [frame.strip() for frame in screen.getvalue().split("\r")]
    assert any(frame.startswith("planning: 0row") for frame in frames)
    assert ": :" not in screen.getvalue()
    last = frames[-1]
    assert last.startswith("running:  40%")
    assert "40/100" in last
    assert "7 tok/s, 1 shards failed" in last
    assert re.search(r"<\d\d:\d\d", last)


def test_rows_of_an_earlier_submit_are_not_this_ones_speed() -> None:
    screen = io.StringIO()
    bar = Bar(screen)
    bar.show(snapshot(rows_done=90), 0.0)
    bar.close()
    assert "90/100 [00:00<?, ?row/s" in screen.getvalue()


def test_a_log_gets_a_line_for_each_state_and_every_few_seconds() -> None:
    log, now = io.StringIO(), 0.0
    lines = Lines(log, lambda: now)
    lines.show(PLANNING, 0.0)
    for step in range(int(LINE_EVERY_S * 4)):
        now = step / 2
        lines.show(snapshot(rows_done=step), 3.0)
    lines.show(snapshot(finished=True, rows_done=100), 5.0)
    lines.close()
    assert log.getvalue().splitlines() == [
        "planning",
        "running: 0 of 100 rows, 3 tok/s",
        "running: 20 of 100 rows, 40 s left, 3 tok/s",
        "finished: 100 of 100 rows, 5 tok/s",
    ]
