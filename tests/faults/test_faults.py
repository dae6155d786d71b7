"""A seeded sample of faults; `python -m ops.faults` runs thousands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.faults.harness import Harness, harness


@pytest.fixture
def faults() -> Iterator[Harness]:
    with TemporaryDirectory(prefix="f") as folder, harness(Path(folder), seed=20) as running:
        yield running


def test_a_kill_at_any_step_loses_and_doubles_nothing(faults: Harness) -> None:
    faults.kills_at_every_step()
    assert faults.is_clean(), faults.table()


def test_a_run_killed_half_way_repeats_no_more_than_the_shards_in_flight(faults: Harness) -> None:
    completed, rows = faults.kill_half_way_through_a_run()
    assert faults.is_clean(), faults.table()
    in_flight = 16 + 32 + 2  # slots, prefetch, and the shard that reaches over both
    assert rows <= completed <= rows + in_flight


@pytest.mark.parametrize(
    ("scenario", "count"),
    [
        ("kills", 30),
        ("freezes", 6),
        ("shutdowns", 4),
        ("cut_connections", 15),
        ("lost_replies", 4),
        ("server_faults", 3),
        ("disk_full", 2),
        ("engine_errors", 3),
    ],
)
def test_no_fault_loses_or_doubles_a_job_or_a_row(faults: Harness, scenario: str, count: int) -> None:
    getattr(faults, scenario)(count)
    assert faults.is_clean(), faults.table()
