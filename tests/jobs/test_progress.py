"""How a run's progress looks on a terminal and in a log."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
from typing import Any

import pytest
from rq.job import JobStatus

from jobs.cli.progress import LINE_EVERY_S, Bar, Lines, progress
from jobs.runs.snapshot import RunSnapshot


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
        "claimed": 0,
        "failed_jobs": (),
        "rows_done": 0,
        "errors": 0,
        "tokens": 0,
        "workers": 1,
        "queue_length": 9,
        "awaited_model": None,
        "stopped": None,
        "too_many_errors": None,
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


def test_progress_begins_anew_when_planning_has_found_what_is_done() -> None:
    screen = io.StringIO()
    bar = Bar(screen)
    bar.show(snapshot(rows_done=0, plan_status=JobStatus.STARTED, started=0), 0.0)
    bar.show(snapshot(rows_done=90), 0.0)
    bar.show(snapshot(rows_done=40), 0.0)
    bar.close()
    assert "40/100 [00:00<?, ?row/s" in screen.getvalue().split("\r")[-1]


def test_the_time_left_counts_no_row_of_an_earlier_submit() -> None:
    log, now = io.StringIO(), 0.0
    lines = Lines(log, lambda: now)
    lines.show(snapshot(rows_done=0, plan_status=JobStatus.STARTED, started=0), 0.0)
    lines.show(snapshot(rows_done=80, plan_status=JobStatus.STARTED, started=1), 0.0)
    now = 2 * LINE_EVERY_S
    lines.show(snapshot(rows_done=80, plan_status=JobStatus.STARTED), 0.0)
    now = 3 * LINE_EVERY_S
    lines.show(snapshot(rows_done=90), 0.0)
    assert log.getvalue().splitlines()[-1] == "running: 90 of 100 rows, 10 s left, 0 tok/s"


@pytest.mark.parametrize(("columns", "kind"), [(0, Lines), (80, Bar)])
def test_a_terminal_without_size_gets_lines(
    columns: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    with os.fdopen(terminal, "w") as file, os.fdopen(controller):
        monkeypatch.setattr(sys, "stderr", file)
        display = progress(lambda: 0.0)
        display.close()
    assert isinstance(display, kind)
