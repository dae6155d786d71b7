"""A seeded sample of faults; `python -m ops.faults` runs thousands."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.faults.faulty_worker import STEPS
from tests.faults.file_faults import kill_half_way_through_a_run
from tests.faults.harness import Harness, harness
from tests.faults.mounts import MountRefused
from tests.faults.scenarios import SCENARIOS
from tests.faults.worker_faults import kills_at_every_step

COUNTS = {"kills": 24, "freezes": 6, "shutdowns": 4, "cut_connections": 9, "lost_replies": 4}


@pytest.fixture
def faults(tmp_path: Path) -> Iterator[Harness]:
    with (
        TemporaryDirectory(prefix="f") as folder,  # a socket's path must stay short
        harness(Path(folder), seed=20, evidence=tmp_path) as running,
    ):
        yield running


def test_each_step_is_one_that_a_worker_takes() -> None:
    assert [step for step, (owner, name) in STEPS.items() if not hasattr(owner, name)] == []


@pytest.mark.long
def test_a_kill_at_any_step_loses_and_doubles_nothing(faults: Harness) -> None:
    kills_at_every_step(faults)
    assert faults.is_clean(), faults.table()


@pytest.mark.long
def test_a_run_killed_half_way_repeats_no_more_than_the_shards_in_flight(faults: Harness) -> None:
    run = kill_half_way_through_a_run(faults)
    assert faults.is_clean(), faults.table()
    assert 0 <= run.repeated == run.in_flight
    assert (
        run.in_flight < run.rows // 4
    )  # SLOTS + PREFETCH, and MAX_OPENING parts that wait to be written


@pytest.mark.processes
def test_a_few_kills_lose_and_double_no_job_and_no_row(faults: Harness) -> None:
    SCENARIOS["kills"](faults, 8)
    assert faults.is_clean(), faults.table()


@pytest.mark.long
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_fault_loses_or_doubles_a_job_or_a_row(faults: Harness, scenario: str) -> None:
    try:
        SCENARIOS[scenario](faults, COUNTS.get(scenario, 3))
    except MountRefused as error:
        pytest.skip(str(error))
    assert faults.is_clean(), faults.table()
