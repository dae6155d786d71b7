"""What hits the files of Parquet runs: a kill half-way, and disks that are full."""

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.faults.harness import Harness
from tests.faults.ledger import Run, write_rows

NUM_HALF_WAY_SHARDS = 200


@dataclass(frozen=True)
class HalfWay:
    """Rows of a run: all, those answered and in no part when its worker was killed, and those repeated."""

    rows: int
    in_flight: int
    repeated: int


def kill_half_way_through_a_run(faults: Harness) -> HalfWay:
    """One Parquet run of 200 shards of two rows, its worker killed at half."""
    answers, rows = faults.folder / "answers", 2 * NUM_HALF_WAY_SHARDS
    source = write_rows(faults.folder / "data" / "half-way.parquet", rows)
    run = faults.ledger.ask_run(rows_per_shard=2, source=source, rows=rows)
    first = faults.start(answers=answers)
    faults.wait_for_parts(run, NUM_HALF_WAY_SHARDS // 2)
    faults.end(first)
    in_flight = answers.stat().st_size - 2 * len(run.parts())
    faults.count("SIGKILL half-way through a run")
    for _ in range(2):
        faults.start(answers=answers)
    faults.settle("half-way")
    return HalfWay(rows, in_flight, answers.stat().st_size - rows)


def full_disks(faults: Harness, count: int) -> None:
    """A tmpfs too small for its run; then its owner makes room and submits again. Raises MountRefused."""
    for _ in range(count):
        size_kb = faults.rng.randrange(16, 120, 4)
        disk = faults.mounts.tmpfs(_new_folder(faults, "disk"), size_kb)
        run = faults.ledger.ask_run(output=disk / "out")
        faults.top_up()
        name = faults.start()
        _wait_for_failure(faults, run)
        faults.end_cleanly(name, (0, -signal.SIGTERM))
        _expect(faults, run, ("DiskFull",))
        faults.count("disk full (tmpfs)")
        faults.mounts.change(disk, "size=4m")
    faults.settle("disk full (tmpfs)", resume=True)


def _expect(faults: Harness, run: Run, kinds: tuple[str, ...]) -> None:
    """Every failure of a run must be one of these errors."""
    for text in faults.ledger.failures(run):
        if not any(f"errors.{kind}" in text for kind in kinds):
            faults.wrong(f"{run.output} did not fail with {kinds}: {text[-500:]}")


def _wait_for_failure(faults: Harness, run: Run) -> None:
    """Return once a job of the run has failed, or the run has ended before it met the fault."""
    deadline = time.monotonic() + 10
    while not faults.ledger.failures(run) and not run.has_ended and time.monotonic() < deadline:
        time.sleep(0.02)


def _new_folder(faults: Harness, name: str) -> Path:
    return faults.folder / "data" / f"{sum(faults.faults.values())}-{name}"
