"""A seeded sample of faults; `python -m ops.faults` runs thousands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.faults.file_faults import kill_half_way_through_a_run
from tests.faults.harness import Harness, harness
from tests.faults.mounts import MountRefused
from tests.faults.scenarios import SCENARIOS
from tests.faults.worker_faults import kills_at_every_step
from tests.rq_suite.sdist import CannotFetch


@pytest.fixture
def faults(tmp_path: Path) -> Iterator[Harness]:
    with (
        TemporaryDirectory(prefix="f") as folder,  # a socket's path must stay short
        harness(Path(folder), seed=20, evidence=tmp_path) as running,
    ):
        yield running


@pytest.mark.long
def test_a_kill_at_any_step_loses_and_doubles_nothing(faults: Harness) -> None:
    kills_at_every_step(faults)
    assert faults.is_clean(), faults.table()


@pytest.mark.long
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
def test_a_run_killed_half_way_repeats_no_more_than_the_shards_in_flight(
    faults: Harness, elsewhere: bool
) -> None:
    run = kill_half_way_through_a_run(faults, elsewhere)
    assert faults.is_clean(), faults.table()
    assert 0 <= run.repeated == run.in_flight
    assert run.in_flight < run.rows // 4  # SLOTS + PREFETCH, and MAX_OPENING parts that wait to be written


@pytest.mark.parametrize(
    ("scenario", "count"),
    [
        ("kills", 8),
        pytest.param("kills", 24, marks=pytest.mark.long),
        pytest.param("freezes", 6, marks=pytest.mark.long),
        pytest.param("stragglers", 2, marks=pytest.mark.long),
        pytest.param("shutdowns", 4, marks=pytest.mark.long),
        pytest.param("engine_errors", 3, marks=pytest.mark.long),
        pytest.param("clock_jumps", 2, marks=pytest.mark.long),
        pytest.param("thaws", 3, marks=pytest.mark.long),
        pytest.param("two_models", 2, marks=pytest.mark.long),
        pytest.param("two_clients", 8, marks=pytest.mark.long),
        pytest.param("saving_code", 3, marks=pytest.mark.long),
        pytest.param("frozen_functions", 2, marks=pytest.mark.long),
        pytest.param("cut_connections", 9, marks=pytest.mark.long),
        pytest.param("lost_replies", 4, marks=pytest.mark.long),
        pytest.param("server_faults", 3, marks=pytest.mark.long),
        pytest.param("raised_disk_full", 2, marks=pytest.mark.long),
        pytest.param("full_disks", 1, marks=pytest.mark.long),
        pytest.param("read_only_disks", 1, marks=pytest.mark.long),
        pytest.param("changed_inputs", 4, marks=pytest.mark.long),
        pytest.param("other_formats", 2, marks=pytest.mark.long),
    ],
)
def test_no_fault_loses_or_doubles_a_job_or_a_row(faults: Harness, scenario: str, count: int) -> None:
    try:
        SCENARIOS[scenario](faults, count)
    except (MountRefused, CannotFetch) as error:
        pytest.skip(str(error))
    assert faults.is_clean(), faults.table()
