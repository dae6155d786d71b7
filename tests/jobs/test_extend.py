"""`--extend`: a run whose input has gained files or rows computes what is new, and is one run."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

import jobs as tokenmill
from jobs import errors
from jobs.context import JobContext
from jobs.parquet import inputs
from jobs.parquet.planner import Submission, plan_run
from jobs.parquet.read_back import FolderReader
from jobs.parquet.storage import Storage
from jobs.runs.control import submit_run
from jobs.runs.refusals import CannotExtend, InputBeingWritten
from jobs.runs.spec import RunSpec
from jobs.watch.runs import list_runs
from tests.jobs.answering import (
    FakeCompletion,
    feed,
    opened_task,
    queued_jobs,
    refuse,
    score_parquet,
    shout,
    work_off,
)
from tests.jobs.conftest import Invoke
from tests.jobs.killing import Fuse, FusedRedis, FusedStorage, Killed
from tests.jobs.test_kills import finish, open_work, release_lock

MakeContext = Callable[[], JobContext]


class Site:
    """A folder of input files, and the run of them."""

    def __init__(self, redis: Redis, make_context: MakeContext, folder: Path, **arguments: Any) -> None:
        self.redis, self.make_context = redis, make_context
        self.input, self.output = folder / "in", folder / "out"
        self.input.mkdir(parents=True)
        self.arguments = {"rows_per_shard": 2, "sampling": {"seed": 1}, **arguments}

    def parquet(self, name: str, *ids: int) -> Path:
        path = self.input / name
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"prompt": [f"p{each}" for each in ids], "id": ids}), path)
        return path

    def lines(self, name: str, *ids: int) -> Path:
        """Write these rows behind those that are there."""
        path = self.input / name
        with path.open("a") as file:
            file.writelines(json.dumps({"prompt": f"p{each}", "id": each}) + "\n" for each in ids)
        return path

    def submit(self, extend: bool = False, **options: Any) -> dict[str, Any]:
        given = {"input": str(self.input), "output": str(self.output), **self.arguments, **options}
        return score_parquet(self.make_context(), **given, extend=extend)

    def work(self, answer: Callable[[Any], FakeCompletion] = shout) -> None:
        while queued_jobs(self.redis):
            work_off(self.redis, self.make_context, answer=answer)

    def run(self) -> None:
        self.submit()
        self.work()

    def extend(self) -> int:
        """Extend the run; return how many rows it has gained."""
        added: int = self.submit(extend=True)["rows_added"]
        self.work()
        return added

    @property
    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.output / "_manifest.json").read_text()))

    def rows(self) -> list[dict[str, Any]]:
        parts = sorted(self.output.rglob("part-*.parquet"))
        return [row for part in parts for row in pq.ParquetFile(part).read().to_pylist()]

    def check(self, *ids: int) -> None:
        """The run has ended with these rows, in this order."""
        assert [(row["id"], row["completion"]) for row in self.rows()] == [(each, f"P{each}") for each in ids]
        assert (self.output / "_SUCCESS").is_file()
        assert self.manifest["rows"] == len(ids)
        (found,) = list_runs(self.redis)
        assert (found.state, found.rows_done, found.rows) == ("finished", len(ids), len(ids))
        assert not list(self.output.rglob("_tmp.*"))


@pytest.fixture
def site(redis: Redis, make_context: MakeContext, tmp_path: Path) -> Site:
    return Site(redis, make_context, tmp_path)


def test_a_folder_that_gains_files_has_their_rows_behind_those_of_before(site: Site) -> None:
    site.parquet("b.parquet", 1, 2, 3)
    site.run()
    parts = {path.name: path.read_bytes() for path in site.output.glob("part-*")}
    site.parquet("a.parquet", 4, 5, 6)  # sorts before the one that there was
    site.parquet("c.parquet", 7)
    with pytest.raises(errors.InputChanged, match="--extend"):
        site.submit()
    assert (site.output / "_SUCCESS").is_file()
    planned = site.submit(extend=True)
    assert (planned["rows_added"], planned["shards"], planned["shards_enqueued"]) == (4, 5, 3)
    assert not (site.output / "_SUCCESS").exists()
    assert list_runs(site.redis)[0].state == "running"
    site.work()
    site.check(1, 2, 3, 4, 5, 6, 7)
    assert {name: (site.output / name).read_bytes() for name in parts} == parts
    (gained,) = site.manifest["extensions"]
    assert (gained["files"], gained["rows"], gained["input"]) == (2, 4, [str(site.input)])
    names = [Path(each["path"]).name for each in site.manifest["inputs"]]
    assert names == ["b.parquet", "a.parquet", "c.parquet"]
    mark = (site.output / "_SUCCESS").stat()
    for again in (site.submit(), site.submit(extend=True)):
        assert again["already_finished"]
        assert again["shards_enqueued"] == 0
    assert (site.output / "_SUCCESS").stat() == mark
    site.parquet("d.parquet", 8)
    site.extend()
    site.check(1, 2, 3, 4, 5, 6, 7, 8)
    assert [each["rows"] for each in site.manifest["extensions"]] == [4, 1]


def test_lines_behind_the_end_of_a_file_are_new_rows(site: Site) -> None:
    first = site.lines("a.jsonl", 1, 2, 3)
    site.lines("b.jsonl", 4)
    site.run()
    site.lines("a.jsonl", 5, 6)
    assert site.extend() == 2
    site.check(1, 2, 3, 4, 5, 6)
    site.lines("a.jsonl", 7)
    site.lines("b.jsonl", 8, 9, 10)
    assert site.extend() == 4
    site.check(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    with first.open("a") as file:
        file.write("\n")  # no row
    assert site.extend() == 0
    site.check(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert site.submit()["already_finished"]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("a.jsonl", "file_fingerprint"),
        ("a.jsonl", "scan_lines"),
        ("a.parquet", "file_fingerprint"),
        ("a.parquet", "check_footer"),
    ],
)
def test_a_file_that_is_written_to_while_it_is_planned_is_planned_as_it_is_then(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str, step: str
) -> None:
    real, times = getattr(inputs, step), iter([True])
    is_text = name == "a.jsonl"

    def meanwhile(*args: Any) -> Any:
        if next(times, False):
            _ = site.lines(name, 2, 3) if is_text else site.parquet(name, 1, 2, 3)
        return real(*args)

    _ = site.lines(name, 1) if is_text else site.parquet(name, 1)
    monkeypatch.setattr(inputs, step, meanwhile)
    site.run()
    site.check(1, 2, 3)
    assert site.extend() == 0
    if is_text:
        site.lines(name, 4)
        assert site.extend() == 1
        site.check(1, 2, 3, 4)


def test_a_file_that_is_written_to_all_the_time_is_refused_before_it_is_planned(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan_lines = inputs.scan_lines

    def meanwhile(*args: Any) -> Any:
        site.lines("a.jsonl", 2)
        return scan_lines(*args)

    site.lines("a.jsonl", 1)
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "scan_lines", meanwhile)
        with pytest.raises(InputBeingWritten, match=r"a\.jsonl is being written to"):
            site.submit()
    site.run()
    site.check(1, 2, 2, 2)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("name", "empty", "line"),
    [
        ("in.csv", "prompt,id\n", "p{0},{0}\n"),
        ("in.tsv", "prompt\tid\n", "p{0}\t{0}\n"),
        ("in.jsonl", "", '{{"prompt": "p{0}", "id": {0}}}\n'),
    ],
)
def test_a_file_of_lines_that_had_no_row_is_computed_once_it_has_some(
    redis: Redis, make_context: MakeContext, tmp_path: Path, name: str, empty: str, line: str, rows: int
) -> None:
    """With the columns that the rows show, as if they had been there from the beginning."""
    template = {"template": "p{file}", "filename_column": "file"} if name == "in.jsonl" else {}
    site = Site(redis, make_context, tmp_path, **template)
    (site.input / name).write_text(empty)
    site.run()
    (part,) = site.output.glob("part-*")
    assert (pq.read_metadata(part).num_rows, site.manifest["rows"]) == (0, 0)
    assert site.extend() == 0
    with (site.input / name).open("a") as file:
        file.writelines(line.format(number) for number in range(rows))
    with pytest.raises(errors.InputChanged, match="--extend"):
        site.submit()
    assert site.extend() == rows
    assert [row["id"] for row in site.rows()] == list(range(rows))
    assert [gained["rows"] for gained in site.manifest["extensions"]] == [rows]
    assert {pq.read_schema(each).field("id").type for each in site.output.glob("part-*")} == {pa.int64()}
    (found,) = list_runs(redis)
    assert (found.state, found.rows_done, found.rows) == ("finished", rows, rows)
    assert site.submit()["already_finished"]
    with (site.input / name).open("a") as file:
        file.write(line.format(rows))
    assert site.extend() == 1
    assert [row["id"] for row in site.rows()] == list(range(rows + 1))


def test_no_kill_of_who_plans_the_first_rows_of_a_run_loses_one(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    step = 0
    while True:
        site = Site(redis, make_context, tmp_path / str(step))
        (site.input / "in.csv").write_text("prompt,id\n")
        site.run()
        with (site.input / "in.csv").open("a") as file:
            file.write("p1,1\np2,2\np3,3\n")
        context, fuse = make_context(), Fuse(step)
        spec = RunSpec.from_arguments(str(site.input), str(site.output), "prompt", None, None, {"seed": 1}, 2)
        storage = FusedStorage(context.data_roots, fuse)
        fused = replace(context, connection=FusedRedis(redis, fuse))
        try:
            plan_run(fused, storage, spec, Submission("bulk", extend=True))
            break
        except Killed:
            release_lock(redis, spec)
        site.extend()
        site.check(1, 2, 3)
        redis.flushall()
        step += 7
    assert step > 40


def test_rows_keep_their_numbers_and_seeds_where_a_file_before_them_has_grown(site: Site) -> None:
    def fails(request: Any) -> FakeCompletion:
        return refuse(f"no {request.sampling['seed']}")

    site.lines("a.jsonl", 1, 2, 3)
    site.lines("b.jsonl", 4, 5)
    site.submit()
    site.work(lambda request: fails(request) if request.prompt == "p5" else shout(request))
    site.lines("a.jsonl", 6)
    site.submit(extend=True)
    site.work(fails)
    before, after = FolderReader(str(site.output)).errors(10)[1]
    assert (before.row, before.file_row, Path(before.file).name) == (4, 1, "b.jsonl")
    assert (after.row, after.file_row, Path(after.file).name) == (5, 3, "a.jsonl")
    asked: set[str] = set()

    def noted(request: Any) -> FakeCompletion:
        asked.add(f"no {request.sampling['seed']}")
        return shout(request)

    tokenmill.run(str(site.output), connection=site.redis).retry()
    site.work(noted)
    assert asked == {before.reason, after.reason}
    site.check(1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    "arguments",
    [{"single_file": "jsonl"}, {"labels": ["a", "b"], "sampling": None}],
    ids=["one file", "labels"],
)
def test_runs_of_other_shapes_gain_rows_too(
    redis: Redis, make_context: MakeContext, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    site = Site(redis, make_context, tmp_path, **arguments)
    site.parquet("a.parquet", 1, 2, 3)
    site.submit()
    site.work(lambda request: refuse("no"))
    site.parquet("b.parquet", 4)
    site.submit(extend=True)
    site.work(lambda request: refuse("no"))
    assert [(row["id"], row["error"]) for row in site.rows()] == [(each, "no") for each in (1, 2, 3, 4)]
    assert (site.manifest["rows"], site.manifest["errors"]) == (4, 4)
    if "single_file" in arguments:
        lines = (site.output / "output.jsonl").read_text().splitlines()
        assert [json.loads(line)["id"] for line in lines] == [1, 2, 3, 4]


def test_a_batch_that_gains_lines_writes_its_files_anew(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    named = {"sampling": None, "input_format": "openai-batch", "prompt_column": None}
    site = Site(redis, make_context, tmp_path, **named)

    def write(name: str, *ids: str) -> None:
        asked = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}
        lines = [{"custom_id": each, **asked} for each in ids]
        with (site.input / name).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def names(name: str) -> list[str]:
        return [json.loads(line)["custom_id"] for line in (site.output / name).read_text().splitlines()]

    write("b.jsonl", "one", "two")
    site.run()
    write("b.jsonl", "three", "one")
    write("a.jsonl", "two", "four")
    assert site.extend() == 4
    assert names("output.jsonl") == ["one", "two", "three", "four"]
    assert names("errors.jsonl") == ["one", "two"]
    write("b.jsonl", "five")
    with pytest.raises(CannotExtend, match="behind the last one"):
        site.submit(extend=True)


def test_what_does_not_show_that_its_rows_stayed_is_refused_by_name(site: Site) -> None:
    site.parquet("a.parquet", 1, 2, 3)
    site.run()
    site.parquet("a.parquet", 1, 2, 3, 4)
    with pytest.raises(CannotExtend, match="put the new rows into a file of their own"):
        site.submit(extend=True)
    site.parquet("a.parquet", 1, 2)
    with pytest.raises(errors.InputChanged):
        site.submit(extend=True)
    site.parquet("a.parquet", 1, 2, 3)
    other = site.parquet("b.parquet", 4)
    with pytest.raises(errors.OutputHoldsAnotherRun, match="different sampling"):
        site.submit(extend=True, sampling={"seed": 2})
    with pytest.raises(errors.InvalidJob, match="limit is 9"):
        site.submit(extend=True, limit=9)
    other.unlink()
    assert site.submit()["already_finished"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace("p1", "p0") + '{"prompt": "p9", "id": 9}\n', "do not show"),
        (lambda text: text + '{"prompt": "p9", "id": "nine"}\n', "'id'"),
        (lambda text: text + '{"prompt": "p9", "more": 1}\n', "'more'"),
    ],
    ids=["edited", "another kind", "another column"],
)
def test_lines_that_are_not_those_of_before_or_change_columns_are_refused(
    site: Site, change: Callable[[str], str], told: str
) -> None:
    path = site.lines("a.jsonl", 1, 2, 3)
    site.run()
    path.write_text(change(path.read_text()))
    with pytest.raises(CannotExtend, match=told):
        site.submit(extend=True)
    assert (site.output / "_SUCCESS").is_file()


def test_columns_in_another_order_are_refused_as_that(site: Site) -> None:
    path = site.input / "a.csv"
    path.write_text("prompt,id\np1,1\n")
    site.run()
    path.write_text("id,prompt\n1,p1\n2,p2\n")
    with pytest.raises(CannotExtend, match="with it the columns come in another order"):
        site.submit(extend=True)


def test_compressed_lines_that_grew_are_refused(site: Site) -> None:
    path = site.input / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "p1", "id": 1}\n'))
    site.run()
    with path.open("ab") as file:
        file.write(gzip.compress(b'{"prompt": "p2", "id": 2}\n'))
    with pytest.raises(CannotExtend, match="a file of their own"):
        site.submit(extend=True)


def test_a_last_line_that_had_no_end_may_not_go_on(site: Site) -> None:
    path = site.input / "a.csv"
    path.write_text("prompt,id\np1,1\np2,2")
    site.run()
    path.write_text("prompt,id\np1,1\np2,22\np3,3\n")
    with pytest.raises(CannotExtend):
        site.submit(extend=True)
    path.write_text("prompt,id\np1,1\np2,2\np3,3\n")
    site.extend()
    site.check(1, 2, 3)


def test_folders_of_a_new_value_are_added_and_those_of_another_key_refused(site: Site) -> None:
    site.parquet("day=1/a.parquet", 1)
    site.run()
    site.parquet("day=2/a.parquet", 2)
    site.extend()
    site.check(1, 2)
    assert [row["day"] for row in site.rows()] == [1, 2]
    site.parquet("day=x/a.parquet", 3)
    with pytest.raises(CannotExtend, match="day"):
        site.submit(extend=True)
    shutil.rmtree(site.input / "day=x")
    site.parquet("hour=3/a.parquet", 3)
    with pytest.raises(errors.SchemaMismatch, match="hour"):
        site.submit(extend=True)


def test_a_longer_list_of_files_is_the_same_run(site: Site, invoke: Invoke, tmp_path: Path) -> None:
    first, output = site.parquet("a.parquet", 1, 2), str(site.output)
    options = ("--rows-per-shard", "2", "--seed", "1")
    run = invoke("submit", str(first), output, *options).stdout.strip()
    site.work()
    second = site.parquet("b.parquet", 3)
    told = invoke("submit", str(first), str(second), output, *options, "--extend")
    assert told.stdout.strip() == run, told.output
    submit_run(site.redis, "bulk", input=[str(first)], output=output, **site.arguments)
    site.work()  # it is extended, as was asked first
    site.check(1, 2, 3)
    longer = [str(first), str(second)]
    with pytest.raises(errors.InvalidJob, match="as a file of its own"):
        tokenmill.submit(pa.table({"prompt": ["p4"]}), output, connection=site.redis, extend=True)
    assert "--dry-run looks at all" in invoke("submit", *longer, output, "--dry-run", "--extend").stderr
    with pytest.raises(errors.OutputHoldsAnotherRun, match="--extend"):
        site.submit(input=longer)
    assert site.submit(input=[str(first)])["already_finished"]
    site.redis.flushall()
    site.output.rename(tmp_path / "away")  # as on a machine that does not see it
    other = submit_run(site.redis, "bulk", input=longer, output=output, **site.arguments, extend=True)
    (tmp_path / "away").rename(site.output)
    assert other != run
    context = replace(site.make_context(), job_id=f"{other}-plan")
    with pytest.raises(CannotExtend, match="submit it first as it was"):
        score_parquet(context, longer, output, extend=True, **site.arguments)


def test_who_ends_the_last_shard_of_before_does_not_end_a_run_that_has_gained_some(site: Site) -> None:
    site.parquet("a.parquet", 1)
    site.submit()
    (job,) = queued_jobs(site.redis)
    frozen = opened_task(site.make_context(), job.func_name, job.args, job.kwargs)
    feed(frozen)
    before = frozen._folder.plan  # type: ignore[attr-defined]
    site.parquet("b.parquet", 2)
    site.submit(extend=True)
    assert not frozen.result()["run_finished"]
    frozen.close()
    frozen._folder.plan = before  # type: ignore[attr-defined]
    assert not frozen._folder._finish()  # type: ignore[attr-defined]
    assert frozen._folder.plan != before  # type: ignore[attr-defined]
    job.delete()
    site.work()
    site.check(1, 2)


def test_who_writes_the_end_while_the_run_is_extended_puts_none_in_place(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.parquet("a.parquet", 1)
    site.submit()
    (job,) = queued_jobs(site.redis)
    frozen = opened_task(site.make_context(), job.func_name, job.args, job.kwargs)
    feed(frozen)
    folder = frozen._folder  # type: ignore[attr-defined]
    looked = folder._has_all_parts

    def look_and_freeze() -> bool:
        found: bool = looked()
        if found:
            monkeypatch.undo()
            site.parquet("b.parquet", 2)
            site.submit(extend=True)
        return found

    monkeypatch.setattr(folder, "_has_all_parts", look_and_freeze)
    assert not frozen.result()["run_finished"]
    frozen.close()
    assert not (site.output / "_SUCCESS").exists()
    job.delete()
    site.work()
    site.check(1, 2)


def test_no_kill_point_loses_anything_of_a_run_that_is_extended(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    context = make_context()
    storage, step = Storage(context.data_roots), 0
    while True:
        site = Site(redis, make_context, tmp_path / str(step))
        site.lines("a.jsonl", 1, 2, 3)
        spec = RunSpec.from_arguments(str(site.input), str(site.output), **site.arguments)
        plan_and_run(context, storage, spec)
        site.lines("a.jsonl", 4)
        site.lines("b.jsonl", 5)
        fuse = Fuse(step)
        fused = replace(context, connection=FusedRedis(redis, fuse))
        try:
            plan_and_run(fused, FusedStorage(context.data_roots, fuse), spec, extend=True)
            break
        except Killed:
            release_lock(redis, spec)
        plan_and_run(context, storage, spec, extend=True)
        site.check(1, 2, 3, 4, 5)
        redis.flushall()
        step += 11
    assert step > 60


def plan_and_run(context: JobContext, storage: Storage, spec: RunSpec, extend: bool = False) -> None:
    planned = plan_run(context, storage, spec, Submission("bulk", extend=extend))
    for shard in range(planned["shards"]):
        finish(open_work(context, spec, shard, storage))
    assert plan_run(context, storage, spec, Submission("bulk"))["run_finished"]
