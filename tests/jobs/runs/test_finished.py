"""A run that has ended stays as it is, and one that is ended again is put together from what is there."""

import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from redis import Redis

from jobs import errors
from jobs.runs.plans.names import KEYS, PARTS, part_name
from jobs.runs.plans.spec import RunSpec
from jobs.runs.watching.reading import read_snapshot
from tests.jobs.answering import run_task
from tests.jobs.conftest import Invoke
from tests.jobs.killing import Executions, Fuse, FusedStorage, Killed, Sleeper, finish
from tests.jobs.local_runs import Runs

ROWS, SHARDS = 5, 3
MADE = ("output.csv", "_report.html", "_manifest.json")


class Site(Executions):
    """A run of three shards of JSONL into one CSV file."""

    def __init__(self, runs: Runs) -> None:
        self.source, self.output = runs.source.with_suffix(".jsonl"), runs.output
        self.source.write_text("".join(f'{{"prompt": "p{row}"}}\n' for row in range(ROWS)))
        options = {"sampling": {"temperature": 0}, "rows_per_shard": 2, "single_file": "csv"}
        super().__init__(
            runs, RunSpec.from_arguments(str(self.source), str(self.output), **options)
        )

    def part(self, shard: int) -> Path:
        return self.output / PARTS / part_name(shard)

    def files(self) -> dict[str, tuple[bytes, int]]:
        """Return of each name in the folder what it holds and when that was written."""
        return {
            str(path.relative_to(self.output)): (
                path.read_bytes() if path.is_file() else b"",
                path.stat().st_mtime_ns,
            )
            for path in (self.output, *self.output.rglob("*"))
        }

    def whole(self) -> dict[str, tuple[bytes, int]]:
        """Check that the run has ended, and return its files."""
        assert (self.output / "output.csv").read_text().splitlines()[1:] == [
            f"p{row},P{row},stop,2,2,1," for row in range(ROWS)
        ]
        found = self.files()
        parts = {f"{PARTS}/{part_name(shard)}" for shard in range(SHARDS)}
        keys = {f"{KEYS}/_part-{shard:05d}.bin" for shard in range(SHARDS)}
        assert found.keys() == {".", PARTS, KEYS, "_plan.json", "_SUCCESS", *MADE, *parts, *keys}
        return found


@pytest.fixture
def site(runs: Runs) -> Site:
    return Site(runs)


@pytest.fixture
def ended(site: Site) -> Site:
    site.plan()
    site.runs.work()
    return site


@pytest.fixture
def all_but_one(site: Site) -> Site:
    site.plan()
    for shard in range(SHARDS - 1):
        finish(site.open(shard))
    return site


def test_no_command_changes_a_finished_folder(ended: Site, redis: Redis, invoke: Invoke) -> None:
    before, run = ended.whole(), ended.spec.run
    assert ended.plan()["already_finished"]
    redis.flushall()
    assert ended.plan()["already_finished"]
    for command in ("status", "errors", "tail", "report", "cancel"):
        told = invoke(command, ended.output)
        assert told.exit_code == 0, told.output
    asked = {"run": run, "plan": str(ended.output / "_plan.json"), "sample": "100%"}
    assert run_task(ended.runs.context(), "jobs.verify_rows", **asked)["rows_equal"] == ROWS
    assert ended.whole() == before


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_before_the_footer(path: Path) -> None:
    contents = path.read_bytes()
    path.write_bytes(contents[:4] + contents[104:])


@pytest.mark.parametrize(
    ("name", "harm", "found"),
    [
        (f"{PARTS}/{part_name(1)}", Path.unlink, "it is gone"),
        (f"{PARTS}/{part_name(1)}", cut, "not readable"),
        (f"{PARTS}/{part_name(1)}", cut_before_the_footer, "bytes before its footer are gone"),
        ("output.csv", Path.unlink, "it is gone"),
    ],
)
def test_what_a_finished_run_lacks_is_named_and_the_rest_stays(
    ended: Site, redis: Redis, name: str, harm: Callable[[Path], None], found: str
) -> None:
    harm(ended.output / name)
    left = ended.files()
    with pytest.raises(
        errors.PartDamaged, match=rf"{name} .*{found}.*with --reuse {ended.output}, "
    ):
        ended.plan()
    assert read_snapshot(redis, ended.spec.run).finished
    if found == "it is gone" and name != "output.csv":
        with pytest.raises(errors.PartDamaged, match=name):
            ended.open(1)  # a shard that somebody has enqueued again
    assert ended.files() == left


def test_an_unfinished_run_computes_what_was_removed_as_it_was_damaged(all_but_one: Site) -> None:
    cut(all_but_one.part(0))
    with pytest.raises(
        errors.PartDamaged, match="no _SUCCESS, you may also remove the file and submit again"
    ):
        all_but_one.plan()
    all_but_one.part(0).unlink()
    assert all_but_one.plan()["shards_missing"] == 2
    all_but_one.runs.work()
    all_but_one.whole()


def test_what_was_made_of_parts_one_of_which_is_gone_is_made_again(
    ended: Site, redis: Redis
) -> None:
    """By whoever was killed before he put the mark."""
    for path in (ended.output / "_SUCCESS", ended.part(1)):
        path.unlink()
    for name in MADE:
        (ended.output / name).write_text("of other answers")
    assert ended.plan()["shards_enqueued"] == 1
    assert not any((ended.output / name).exists() for name in MADE)
    assert not read_snapshot(redis, ended.spec.run).finished
    ended.runs.work()
    ended.whole()
    assert read_snapshot(redis, ended.spec.run).finished


#: Of the steps each so many-eth is tried.
STRIDES = [13, pytest.param(1, marks=pytest.mark.long)]


@pytest.mark.parametrize("stride", STRIDES)
def test_an_end_that_was_cut_short_at_any_step_is_brought_to_its_end(
    all_but_one: Site, stride: int
) -> None:
    before = shutil.copytree(all_but_one.output, all_but_one.output.with_name("before"))
    for step in itertools.count(0, stride):
        fuse = Fuse(step)
        with suppress(Killed):
            finish(all_but_one.open(2, lambda roots, fuse=fuse: FusedStorage(roots, fuse)))  # type: ignore[misc]
        if not fuse.burnt:
            break
        has_ended = (all_but_one.output / "_SUCCESS").exists()
        if step // stride % 2:
            all_but_one.plan()
        if not has_ended:
            finish(all_but_one.open(2))
        all_but_one.whole()
        shutil.rmtree(all_but_one.output)
        shutil.copytree(before, all_but_one.output)
    assert step > 20


ACTORS: dict[str, Callable[[Site, Fuse], None]] = {
    "planner": lambda site, fuse: site.plan(lambda roots: FusedStorage(roots, fuse)) and None,
    "last shard": lambda site, fuse: finish(site.open(2, lambda roots: FusedStorage(roots, fuse))),
}


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("actor", ACTORS)
def test_who_sleeps_at_any_step_while_others_end_the_run_changes_nothing(
    all_but_one: Site, actor: str, stride: int
) -> None:
    before = shutil.copytree(all_but_one.output, all_but_one.output.with_name("before"))
    if actor == "planner":
        shutil.rmtree(before / "_input")  # so that it makes them
    for step in itertools.count(0, stride):
        shutil.rmtree(all_but_one.output)
        shutil.copytree(before, all_but_one.output)
        ended = []

        def end(ended: list[object] = ended) -> None:
            all_but_one.plan()
            finish(all_but_one.open(2))
            ended.append(all_but_one.whole())

        sleeper = Sleeper(step, end)
        with suppress(errors.JobsError):
            ACTORS[actor](all_but_one, sleeper)
        if sleeper.left >= 0:
            break
        found = all_but_one.whole()
        folders = {".", PARTS, KEYS}  # in which he has made a file of his own, and removed it
        (expected,) = ended
        assert {name: each for name, each in found.items() if name not in folders} == {
            name: each for name, each in expected.items() if name not in folders
        }
    assert step > 5
