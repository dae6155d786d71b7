"""How a run's progress looks on a terminal and in a log."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import sys
import termios
from typing import Any

import pytest
from rq.job import JobStatus

from jobs.cli.progress import LINE_EVERY_S, Bar, Lines, duration_text, progress
from jobs.runs.watching.snapshot import RunSnapshot


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
    bar.show(snapshot(rows_done=40, failed_jobs=("x",), left_s=3725.0), 7.4)
    bar.close()
    frames = [frame.strip() for frame in screen.getvalue().split("\r")]
    assert any(frame.startswith("planning:") for frame in frames)
    assert ": :" not in screen.getvalue()
    last = frames[-1]
    assert last.startswith("running:  40%")
    assert "40/100" in last
    assert "7 tok/s, 1 h 2 min left, 1 shards failed" in last


def test_rows_of_an_earlier_submit_are_not_this_ones_speed() -> None:
    screen = io.StringIO()
    bar = Bar(screen)
    bar.show(snapshot(rows_done=90), 0.0)
    bar.close()
    assert "90/100 [00:00, 0 tok/s]" in screen.getvalue()


def test_a_log_gets_a_line_for_each_state_and_every_few_seconds() -> None:
    log, now = io.StringIO(), 0.0
    lines = Lines(log, lambda: now)
    lines.show(PLANNING, 0.0)
    for step in range(int(LINE_EVERY_S * 4)):
        now = step / 2
        lines.show(snapshot(rows_done=step, left_s=60.4 - step / 2), 3.0)
    lines.show(snapshot(finished=True, rows_done=100, left_s=0.0), 5.0)
    lines.close()
    assert log.getvalue().splitlines() == [
        "planning",
        "running: 0 of 100 rows, 3 tok/s, 1 min 0 s left",
        "running: 20 of 100 rows, 3 tok/s, 50 s left",
        "finished: 100 of 100 rows, 5 tok/s",
    ]


def test_progress_begins_anew_when_planning_has_found_what_is_done() -> None:
    screen = io.StringIO()
    bar = Bar(screen)
    bar.show(snapshot(rows_done=0, plan_status=JobStatus.STARTED, started=0), 0.0)
    bar.show(snapshot(rows_done=90), 0.0)
    bar.show(snapshot(rows_done=40), 0.0)
    bar.close()
    assert "40/100 [00:00, 0 tok/s]" in screen.getvalue().split("\r")[-1]


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (3600, "1 h 0 min"), (200_000, "2 d 7 h")]
)
def test_a_time_is_told_in_its_two_largest_units(seconds: float, told: str) -> None:
    assert duration_text(seconds) == told


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
