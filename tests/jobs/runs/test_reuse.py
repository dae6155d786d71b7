"""A new run takes what earlier ones have answered, wherever its rows lie now, and computes the rest."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs import client
from jobs.context.checks import Checks
from jobs.errors import (
    CannotReuse,
    ColumnConflict,
    InvalidJob,
    OutputHoldsAnotherRun,
    PathOutsideRoots,
)
from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.read_back import FolderReader
from jobs.parquet.planning import planner
from jobs.parquet.reuse import old_runs
from jobs.parquet.reuse.old_runs import OldRuns
from jobs.parquet.tables import row_groups
from jobs.prompts.generated import DEFAULT_MAX_TOKENS
from jobs.runs.plans.names import PLAN
from jobs.runs.plans.plan import Plan
from jobs.runs.statistics.run_statistics import CUT
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, refuse, run_task, shout
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs, flip_a_bit

GREEDY = {"temperature": 0.0}
BAD = "bad"

#: Arrow's pool of one test. What was allocated from it may be freed after that: a pool that is gone crashes then.
POOL = pa.proxy_memory_pool(pa.default_memory_pool())


class Asked:
    """Answers as `shout`, but for BAD, and counts what was asked."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, request: Request) -> FakeCompletion:
        self.prompts.append(str(request.prompt))
        return refuse("no") if request.prompt == BAD else shout(request)


@pytest.fixture
def old(runs: Runs) -> Path:
    """A run of seven rows: one has no prompt, one fails."""
    runs.write(["a", "b", None, BAD, "c", "d", "e"])
    runs.score(answer=Asked(), rows_per_shard=3, sampling=GREEDY)
    return runs.output


def plan_of(folder: Path) -> Plan:
    return Plan.from_text((folder / PLAN).read_text())


def state_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in [*files]}


def new_run(runs: Runs, **arguments: Any) -> tuple[list[dict[str, Any]], list[str], dict[str, Any]]:
    """Run into `new`; return its rows, what was asked, and its manifest."""
    asked, output = Asked(), runs.output.parent / "new"
    options = {"rows_per_shard": 4, "sampling": GREEDY, "reuse": str(runs.output), **arguments}
    table = runs.score(output=output, answer=asked, **options)
    assert not (output / "_reused").exists()
    return table.to_pylist(), asked.prompts, json.loads((output / "_manifest.json").read_text())


def test_rows_that_were_answered_are_taken_wherever_they_lie_now(runs: Runs, old: Path) -> None:
    before = state_of(old)
    names = ["x", "e", None, "b", "mended", "a", "e", "d", "y", BAD]
    pq.write_table(pa.table({"id": range(10), "prompt": names}), runs.source)
    rows, asked, manifest = new_run(runs)
    assert sorted(asked) == sorted(["x", "mended", "y", BAD]), (
        "neither failed rows nor those without prompt are taken"
    )
    assert [row["id"] for row in rows] == list(range(10))
    expected = [None if each in (None, BAD) else each.upper() for each in names]
    assert [row["completion"] for row in rows] == expected
    assert rows[2]["error"] == "prompt is null"
    assert (manifest["rows_reused"], manifest["generated_tokens"]) == (5, len("xmendedy"))
    assert [(each["output"], each["rows"]) for each in manifest["reused"]] == [(str(old), 5)]
    assert state_of(old) == before
    plain = runs.score(
        output=old.with_name("plain"), answer=Asked(), rows_per_shard=4, sampling=GREEDY
    )
    assert rows == plain.to_pylist(), "as without reuse"


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl", "in.arrow"])
def test_rows_may_come_in_another_format_or_by_another_way(
    runs: Runs, old: Path, name: str
) -> None:
    path = runs.source.with_name(name)
    texts = ["b", "z", "a"]
    if name == "in.csv":
        path.write_text("text\n" + "".join(f"{text}\n" for text in texts))
    elif name == "in.jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        with pa.ipc.new_file(path, pa.schema([("text", pa.string())])) as writer:
            writer.write_table(pa.table({"text": texts}))
    rows, asked, _ = new_run(runs, source=path, template="{text}")
    assert (asked, [row["completion"] for row in rows]) == (["z"], ["B", "Z", "A"])


@pytest.mark.parametrize(
    ("dialect", "content"),
    [
        ({"delimiter": ";"}, b"text;id\nb;1\n\xc3\xa4;2\n"),
        ({"encoding": "cp1252"}, b"text,id\nb,1\n\xe4,2\n"),
        ({"delimiter": ";", "decimal": ","}, b"text;id\nb;1,5\n\xc3\xa4;2,5\n"),
    ],
    ids=["delimiter", "encoding", "decimal"],
)
def test_rows_of_a_file_in_another_dialect_are_taken(
    runs: Runs, dialect: dict[str, str], content: bytes
) -> None:
    path = runs.source.with_name("in.csv")
    path.write_bytes(content)
    runs.score(path, sampling=GREEDY, template="{text}", **dialect)
    pq.write_table(pa.table({"text": ["ä", "new", "b"]}), runs.source)
    _, asked, manifest = new_run(runs, template="{text}")
    assert (asked, manifest["rows_reused"]) == (["new"], 2)


def test_a_template_that_changes_some_rows_asks_these(runs: Runs) -> None:
    runs.write([f"p{row}" for row in range(6)])
    runs.score(template="{prompt}", sampling=GREEDY)
    changed = "{{ prompt }}{% if id % 2 %}!{% endif %}"
    _, asked, _ = new_run(runs, template=changed, template_format="jinja")
    assert sorted(asked) == ["p1!", "p3!", "p5!"]


@pytest.mark.parametrize("other", [{"max_tokens": 3}, {"seed": 3}, {"n": 2}])
def test_what_is_asked_otherwise_is_computed(runs: Runs, old: Path, other: dict[str, Any]) -> None:
    asked = Asked()
    runs.plan(output=runs.output.parent / "new", reuse=[str(old)], sampling={**GREEDY, **other})
    runs.work(asked)
    assert len(asked.prompts) == 6


def test_another_model_computes_all_unless_it_is_told_to_take_any(
    runs: Runs, old: Path, monkeypatch: pytest.MonkeyPatch, redis: Redis
) -> None:
    make = runs.context
    other = replace(make().model, fingerprint="another")
    monkeypatch.setattr(runs, "context", lambda: replace(make(), model=other))
    asked = Asked()
    mixed, third = (runs.output.parent / name for name in ("mixed", "third"))
    runs.score(output=runs.output.parent / "own", answer=asked, sampling=GREEDY, reuse=[str(old)])
    assert len(asked.prompts) == 6
    runs.score(
        output=mixed,
        answer=(asked := Asked()),
        sampling=GREEDY,
        reuse=[str(old)],
        reuse_from_any_model=True,
    )
    assert asked.prompts == [BAD]
    client.run(mixed, connection=redis).retry(runs.output.parent / "retried")
    runs.work()
    runs.work(asked := Asked())
    assert asked.prompts == [BAD]
    runs.score(output=third, answer=(asked := Asked()), sampling=GREEDY, reuse=[str(mixed)])
    assert len(asked.prompts) == 6, "what another model has answered stays another's"
    monkeypatch.setattr(runs, "context", make)
    _, asked_of_first, _ = new_run(runs, reuse=[str(mixed)])
    assert asked_of_first == [BAD], "and is the first one's still"


def test_rows_that_ask_the_same_with_seeds_of_their_own_keep_their_own_answers(runs: Runs) -> None:
    def seeded(request: Request) -> FakeCompletion:
        return FakeCompletion(f"{request.prompt} {request.sampling['seed']}")

    runs.write(["same"] * 3)
    first = (
        runs.score(answer=seeded, sampling={"temperature": 1.0}).column("completion").to_pylist()
    )
    runs.write(["same", "other", "same", "same", "same"])
    rows, asked, _ = new_run(runs, sampling={"temperature": 1.0})
    assert asked == ["other"]
    assert [row["completion"] for row in rows if row["prompt"] == "same"] == [*first, first[0]]


def test_parts_of_an_unfinished_run_are_taken_and_damaged_ones_are_named(runs: Runs) -> None:
    runs.write([f"p{row}" for row in range(12)])
    runs.plan(rows_per_shard=3, sampling=GREEDY)
    for job in runs.jobs[:3]:
        runs.run(job)
    (runs.output / "part-00001.parquet").write_bytes(b"damaged")
    (runs.output / "_keys" / "_part-00002.bin").write_bytes(b"damaged too")
    for job in runs.jobs:
        job.delete()
    _, asked, manifest = new_run(runs)
    assert sorted(asked) == sorted(f"p{row}" for row in range(3, 12))
    (reused,) = manifest["reused"]
    assert reused["rows"] == 3
    assert "part-00001.parquet" in reused["passed_over"][1]
    assert "part-00002.bin" in reused["passed_over"][0]


def test_a_bit_that_flipped_in_an_answer_costs_its_part(runs: Runs, old: Path) -> None:
    before = pq.read_table(old).column("completion").to_pylist()
    flip_a_bit(old / "part-00000.parquet", "completion")
    assert pq.read_table(old).column("completion").to_pylist() != before, (
        "Parquet alone does not notice"
    )
    rows, asked, manifest = new_run(runs)
    assert sorted(asked) == ["a", "b", BAD]
    assert [row["completion"] for row in rows] == before
    assert "part-00000.parquet" in manifest["reused"][0]["passed_over"][0]


def test_an_output_within_a_runs_folder_is_refused(runs: Runs, old: Path) -> None:
    with pytest.raises(OutputHoldsAnotherRun, match="lies in its folder"):
        runs.plan(output=old / "inner" / "new", sampling=GREEDY)
    assert not (old / "inner").exists()


def test_a_part_that_is_gone_from_a_finished_run_is_named(runs: Runs, old: Path) -> None:
    (old / "part-00001.parquet").unlink()
    assert new_run(runs)[2]["reused"][0]["passed_over"] == [
        f"{old / 'part-00001.parquet'}: it is gone"
    ]


def test_what_planning_took_and_is_damaged_since_is_asked_again(runs: Runs, old: Path) -> None:
    expected = pq.read_table(old)
    new = old.with_name("new")
    runs.plan(output=new, sampling=GREEDY, rows_per_shard=3, reuse=[str(old)])
    path, *_ = sorted((new / "_reused").iterdir())
    path.write_bytes(path.read_bytes()[:-9])
    runs.work(asked := Asked())
    assert sorted(asked.prompts) == ["a", "b", BAD]
    assert pq.read_table(new).equals(expected)


def test_keys_of_another_run_or_part_are_damaged_ones_and_few_models_are_looked_for(
    runs: Runs, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, storage = runs.output.parent / "others", Storage((str(old.parent),))
    assert len(OldRuns(storage, [str(old)], plan_of(old)).model_hashes) == 1
    runs.score(output=others, answer=Asked(), rows_per_shard=3, sampling=GREEDY)
    first, second, _ = sorted((old / "_keys").iterdir())
    second.write_bytes(first.read_bytes())
    first.write_bytes((others / "_keys" / first.name).read_bytes())
    monkeypatch.setattr(old_runs, "MAX_MODELS_OF_OLD_RUNS", 0)
    found = OldRuns(storage, [str(old)], plan_of(old))
    assert [text.partition(": ")[0] for text in found.reused[0].passed_over] == [
        str(first),
        str(second),
    ]
    assert len(found.model_hashes) == 0


def test_a_resume_may_repeat_or_omit_what_was_reused(runs: Runs, old: Path) -> None:
    runs.write(["a", "b", "x", "y"])
    new = runs.output.parent / "new"
    first = runs.plan(output=new, sampling=GREEDY, rows_per_shard=1, reuse=[str(old)])
    for job in runs.jobs:
        job.delete()
    shutil.rmtree(old)
    for arguments in ({"reuse": [str(old)]}, {}):
        again = runs.plan(output=new, sampling=GREEDY, rows_per_shard=1, **arguments)
        assert (again["run"], again["shards_missing"]) == (first["run"], 4)
    runs.work(asked := Asked())
    assert sorted(asked.prompts) == ["x", "y"]


@pytest.mark.parametrize(
    ("break_it", "error", "reason"),
    [
        (lambda old: shutil.rmtree(old / "_keys"), CannotReuse, "no _keys/"),
        (lambda old: (old / "_plan.json").unlink(), CannotReuse, "no such file"),
        (lambda old: Path("/etc"), PathOutsideRoots, "/etc"),
    ],
)
def test_what_cannot_be_reused_is_refused_by_name(
    runs: Runs, old: Path, break_it: Callable[[Path], Any], error: type[Exception], reason: str
) -> None:
    found = break_it(old)
    named = str(found if isinstance(found, Path) else old)
    with pytest.raises(error, match=reason):
        runs.plan(output=runs.output.parent / "new", sampling=GREEDY, reuse=[named])
    assert not (runs.output.parent / "new" / "_plan.json").exists()


def test_a_column_says_where_a_row_came_from_by_a_name_of_its_own(runs: Runs, old: Path) -> None:
    with pytest.raises(ColumnConflict, match="error"):
        runs.plan(output=runs.output.parent / "other", reuse=[str(old)], reused_column="error")
    runs.write(["e", "x", "a"])
    rows, _, _ = new_run(runs, reused_column="from", output_prefix="my_")
    assert [row["from"] for row in rows] == [f"{old}#6", None, f"{old}#0"]
    assert FolderReader(str(runs.output.parent / "new")).answer_columns[2:] == ["my_error", "from"]


def test_nights_that_take_only_new_rows_read_as_one_dataset(runs: Runs) -> None:
    folder = runs.output.parent / "log"
    folder.mkdir()
    nights = []
    for night, texts in enumerate((["a", BAD], ["b", "c"], [])):
        lines = (folder / "grows.jsonl").read_text() if night else ""
        (folder / "grows.jsonl").write_text(
            lines + "".join(f'{{"prompt": "{text}"}}\n' for text in texts)
        )
        (folder / f"{night}.jsonl").write_text(f'{{"prompt": "file {night}"}}\n')
        output = runs.output.parent / "answered" / f"night={night}"
        earlier = [str(each) for each in nights]
        options = {"sampling": GREEDY, "rows_per_shard": 2, "only_new": night > 0, "reuse": earlier}
        runs.score(folder, output=output, answer=(asked := Asked()), max_errors="100%", **options)
        fresh = [*texts, f"file {night}"] if night < 2 else ["file 2"]
        assert sorted(asked.prompts) == sorted([*fresh, *([BAD] if night else [])])
        nights.append(output)
    table = pq.read_table(runs.output.parent / "answered", partitioning="hive")
    good = [row for row in table.to_pylist() if row["error"] is None]
    assert sorted(row["prompt"] for row in good) == sorted([*"abc", "file 0", "file 1", "file 2"])


def test_only_new_rows_keep_their_places_in_files_and_need_a_run_to_compare_with(
    runs: Runs, old: Path
) -> None:
    runs.write(["a", "x", "b", None, "y", BAD])
    rows, asked, manifest = new_run(runs, only_new=True, rows_per_shard=2, max_errors="100%")
    assert sorted(asked) == [BAD, "x", "y"]
    assert [row["id"] for row in rows] == [1, 3, 4, 5]
    assert (manifest["rows"], manifest["rows_reused"]) == (4, 0)
    reader = FolderReader(str(runs.output.parent / "new"))
    assert [(row.row, row.file_row) for row in reader.errors(10)[1]] == [(1, 3), (3, 5)]
    with pytest.raises(InvalidJob, match="only_new"):
        runs.plan(output=runs.output.parent / "other", only_new=True)
    options = {
        "sampling": GREEDY,
        "only_new": True,
        "reuse": [str(old), str(runs.output.parent / "new")],
    }
    runs.write(["a", "x"])
    empty = runs.score(output=runs.output.parent / "empty", answer=pytest.fail, **options)
    assert empty.num_rows == 0


@pytest.mark.parametrize("only_new", [True, False])
def test_a_planner_that_comes_second_leaves_nothing(
    runs: Runs, old: Path, monkeypatch: pytest.MonkeyPatch, only_new: bool
) -> None:
    runs.write(["a", "x", "b"])
    new, own, create = runs.output.parent / "new", set[str](), planner.create_plan

    def create_late(storage: Storage, plan: Plan, execution_id: str) -> bool:
        monkeypatch.setattr(planner, "create_plan", create)
        own.update(state_of(new))
        runs.plan(output=new, **options)
        return create(storage, plan, execution_id)

    options = {"sampling": GREEDY, "reuse": [str(old)], "only_new": only_new}
    monkeypatch.setattr(planner, "create_plan", create_late)
    runs.plan(output=new, **options)
    assert own
    assert not own & state_of(new).keys()


def test_a_plan_of_which_the_store_has_lost_its_reply_keeps_its_rows(
    runs: Runs, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = planner.create_plan
    monkeypatch.setattr(planner, "create_plan", lambda *args: create(*args) and False)
    runs.write(["a", "x", "b"])
    assert new_run(runs, only_new=True)[1] == ["x"]


def test_new_rows_lie_together(runs: Runs, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.parquet.tables.table_reading.BATCH_ROWS", (1,))
    runs.write(["a", "x", "b", "y"])
    runs.plan(output=old.with_name("new"), only_new=True, reuse=[str(old)], sampling=GREEDY)
    (path,) = (old.with_name("new") / "_input").iterdir()
    assert pq.read_metadata(path).num_row_groups == 1


def test_large_rows_are_put_in_order_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_groups, "BATCH_BYTES", 4000)
    places = np.array([5, 2, 7, 0, 3, 6, 1, 4])
    with row_groups.RowBuckets(8) as buckets:
        for place in places:
            buckets.add(np.array([place]), pa.record_batch({"text": [str(place) * 1000]}))
        tables = list(buckets.sorted())
    assert [text[0] for table in tables for text in table["text"].to_pylist()] == list("01234567")
    assert max(table.num_rows for table in tables) < 4, (
        "Arrow puts no more than 2 GiB of texts in order"
    )


def test_no_answer_is_copied_for_rows_that_others_have(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.write([*map(str, range(64)), "x" * 1_000_000, "last"])
    runs.score(rows_per_shard=100, sampling=GREEDY)
    monkeypatch.setattr(
        "jobs.parquet.tables.table_reading.BATCH_ROWS", (64,)
    )  # which the long answer begins
    before = pa.default_memory_pool()
    pa.set_memory_pool(POOL)
    try:
        assert new_run(runs)[1] == []
    finally:
        pa.set_memory_pool(before)
    assert POOL.max_memory() < 32 << 20


def test_the_command_and_python_retry_into_a_new_folder(
    runs: Runs, old: Path, invoke: Invoke, redis: Redis
) -> None:
    new, third = (runs.output.parent / name for name in ("new", "third"))
    told = invoke("errors", old, "--retry", new)
    assert told.exit_code == 0, told.output
    runs.work()
    runs.work(asked := Asked())
    assert asked.prompts == [BAD]
    plans = [json.loads((folder / "_plan.json").read_text()) for folder in (old, new)]
    assert plans[0]["seed"] == plans[1]["seed"]
    assert plans[0]["arguments"] == {**plans[1]["arguments"], "output": str(old)}
    again = client.run(new, connection=redis).retry(third)
    runs.work()
    runs.work(asked := Asked())
    assert (asked.prompts, again.status().rows_reused) == ([BAD], 5)
    assert "reused   5 rows of earlier runs" in invoke("status", third).stdout
    assert "--wait is for --retry" in invoke("errors", old, "--wait").output


def test_rows_of_another_model_are_left_out_of_a_verification(
    runs: Runs, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = runs.context
    monkeypatch.setattr(
        runs, "context", lambda: replace(make(), model=replace(make().model, fingerprint="another"))
    )
    runs.write(["a", "b", "x"])
    new = runs.output.parent / "new"
    run = runs.plan(output=new, sampling=GREEDY, reuse=[str(old)], reuse_from_any_model=True)["run"]
    runs.work()
    before = state_of(new)
    arguments = {"run": run, "plan": str(new / "_plan.json"), "sample": "100%"}
    found = run_task(runs.context(), "jobs.verify_rows", **arguments)
    assert (found["rows_checked"], found["rows_equal"], found["rows_of_other_models"]) == (1, 1, 2)
    assert state_of(new) == before


def test_a_part_that_was_written_anew_is_not_taken_by_the_places_it_had(
    runs: Runs, old: Path
) -> None:
    part, second = old / "part-00000.parquet", old.with_name("second")
    shutil.copytree(old, second)
    pq.write_table(pq.read_table(part).slice(1), part)
    runs.write(["a", "b", "c"])
    options = {"sampling": GREEDY, "reuse": [str(old), str(second)]}
    runs.score(
        output=old.with_name("third"), answer=pytest.fail, **options
    )  # what one cannot give the other does
    rows, asked, manifest = new_run(runs)
    assert sorted(asked) == ["a", "b"]
    assert [row["completion"] for row in rows] == ["A", "B", "C"]
    assert "part-00000.parquet" in manifest["reused"][0]["passed_over"][0]


def test_the_seed_is_that_of_the_first_earlier_run_also_where_that_was_given_one(
    runs: Runs,
) -> None:
    runs.write(["a", "b", "c"])
    runs.score(sampling={"temperature": 1.0, "seed": 7})
    _, asked, manifest = new_run(runs, sampling={"temperature": 1.0})
    assert asked == []
    assert (manifest["seed"], manifest["rows_reused"], manifest["reused"][0]["differs"]) == (
        7,
        3,
        [],
    )
    third = runs.output.parent / "third"  # what it has of the second run it has of the first
    runs.score(output=third, sampling={"temperature": 1.0}, reuse=str(runs.output.parent / "new"))
    assert json.loads((third / "_manifest.json").read_text())["rows_reused"] == 3
    other = runs.plan(
        output=runs.output.parent / "other",
        sampling={"temperature": 1.0, "seed": 8},
        reuse=str(third),
    )
    assert other["reused"][0]["differs"] == ["seed 7 there, 8 here"]


@pytest.mark.parametrize(
    ("arguments", "differs"),
    [
        ({"sampling": {"temperature": 0.5}}, ["temperature 0 there, 0.5 here"]),
        ({"sampling": {**GREEDY, "top_k": 3}}, ["top_k not given there, 3 here"]),
        ({"template": "so {prompt}"}, ["template not given there, 'so {prompt}' here"]),
    ],
    ids=["sampling", "more", "template"],
)
def test_a_run_that_takes_few_answers_says_what_it_asks_differently(
    runs: Runs, old: Path, invoke: Invoke, arguments: dict[str, Any], differs: list[str]
) -> None:
    planned = runs.plan(
        output=runs.output.parent / "new", reuse=str(old), **{"sampling": GREEDY, **arguments}
    )
    (told,) = planned["reused"]
    assert (told["rows"], [each for each in told["differs"] if "prompt_column" not in each]) == (
        0,
        differs,
    )
    shown = invoke("status", planned["run"]).output
    assert f"but      few answers were taken from {old}: " in shown
    assert differs[0] in shown
    runs.work()
    manifest = json.loads((runs.output.parent / "new" / "_manifest.json").read_text())
    assert manifest["reused"][0]["differs"] == told["differs"]


def test_a_run_of_other_rows_says_that_it_asks_the_same(runs: Runs, old: Path) -> None:
    runs.write(["x", "y", "a"])
    _, _, manifest = new_run(runs)
    assert manifest["reused"][0]["differs"] == [
        "it asked the same, but of other rows, or it has few answers"
    ]


def test_another_model_is_named(runs: Runs, old: Path) -> None:
    context = runs.context
    runs.context = lambda: replace(
        context(), model=replace(context().model, fingerprint="another", name="other")
    )
    planned = runs.plan(output=runs.output.parent / "new", sampling=GREEDY, reuse=str(old))
    (difference,) = planned["reused"][0]["differs"]
    assert difference.startswith("model ")
    assert "other" in difference


def test_a_model_of_another_length_is_named(runs: Runs, old: Path) -> None:
    context = runs.context
    runs.context = lambda: replace(context(), model=replace(context().model, max_model_len=64))
    runs.write(["x", "y", "a"])
    planned = runs.plan(output=runs.output.parent / "new", sampling=GREEDY, reuse=str(old))
    length = json.loads((old / "_plan.json").read_text())["model"].get("max_model_len", 0)
    assert planned["reused"][0]["differs"] == [f"max_model_len {length} there, 64 here"]


@pytest.mark.parametrize("before", [{"max_tokens": 2}, {}])
def test_answers_that_ended_by_themselves_are_taken_where_only_max_tokens_grew(
    runs: Runs, before: dict[str, int]
) -> None:
    def cuts(request: Request) -> FakeCompletion:
        return replace(
            shout(request), finish_reason="length" if request.prompt == "cut" else "stop"
        )

    runs.write(["a", "cut", "b"])
    runs.score(answer=cuts, sampling={**GREEDY, **before})
    rows, asked, manifest = new_run(runs, sampling={**GREEDY, "max_tokens": 1000})
    assert asked == ["cut"]
    assert manifest["rows_reused"] == 2
    assert [row["completion"] for row in rows[:3]] == ["A", "CUT", "B"]
    third = runs.output.parent / "third"
    runs.score(
        output=third, sampling={**GREEDY, "max_tokens": 1000}, reuse=str(runs.output.parent / "new")
    )
    assert json.loads((third / "_manifest.json").read_text())["rows_reused"] == 3, (
        "it is found by its new key"
    )


@pytest.mark.parametrize(
    "options",
    [
        # The second row's first attempt was cut, so that the next one built on it.
        {"check": {"regex": "[A-Z]+"}, "max_attempts": 2},
        {"continue_on_length": True, "max_attempts": 2},
        {"prompts": [{"name": "x", "template": "{prompt}"}, {"name": "y", "template": "{x}!"}]},
        {"sampling": {**GREEDY, "n": 2}},
    ],
)
@pytest.mark.parametrize("only_new", [False, True])
def test_of_answers_in_several_attempts_or_prompts_all_must_have_ended_by_themselves(
    runs: Runs, checks: Checks, options: dict[str, Any], only_new: bool
) -> None:
    make_context = runs.context
    runs.context = lambda: replace(make_context(), checks=checks)
    asked: list[str] = []

    def cuts(request: Request) -> FakeCompletion:
        asked.append(str(request.prompt))
        is_cut = "cut" in str(request.prompt).lower() and not request.continued
        return replace(
            shout(request),
            text="a1" if is_cut else "A",
            finish_reason="length" if is_cut else "stop",
        )

    runs.write(["a", "cut", "b"])
    options = {**options, "sampling": {**GREEDY, **options.get("sampling", {})}}
    shorter = {**options, "sampling": {**options["sampling"], "max_tokens": 2}}
    runs.score(answer=cuts, **shorter)
    asked.clear()
    new = runs.output.parent / "new"
    runs.score(output=new, answer=cuts, reuse=str(runs.output), only_new=only_new, **options)
    assert "cut" in asked
    assert not {"a", "b"} & set(asked)


def test_answers_of_a_larger_max_tokens_are_not_taken(runs: Runs) -> None:
    runs.write(["a", "b"])
    runs.score(sampling={**GREEDY, "max_tokens": 1000})
    _, asked, manifest = new_run(runs, sampling={**GREEDY, "max_tokens": 2})
    assert sorted(asked) == ["a", "b"]
    assert manifest["reused"][0]["differs"] == ["max_tokens 1000 there, 2 here"]


def test_cut_rows_are_asked_again_with_more_tokens(runs: Runs, invoke: Invoke) -> None:
    def cuts(request: Request) -> FakeCompletion:
        return replace(
            shout(request), finish_reason="length" if request.prompt == "cut" else "stop"
        )

    runs.write(["a", "cut", None])
    runs.score(answer=cuts, sampling={**GREEDY, "max_tokens": 2})
    told = json.loads(invoke("errors", runs.output, "--cut", "--json").stdout)
    reasons = {each["reason"]: each["examples"] for each in told["reasons"]}
    assert (told["errors"], told["cut"]) == (1, 1)
    assert reasons == {CUT: [1], "prompt is null": [2]}
    assert [row["row"] for row in told["rows"]] == [1, 2]
    assert f"errors {told['run']} --cut" in invoke("status", runs.output).stdout
    assert len(FolderReader(str(runs.output)).errors(9)[1]) == 1
    new, asked = runs.output.parent / "new", Asked()
    assert invoke("errors", runs.output, "--retry", new, "--cut").exit_code == 2
    shown = invoke("errors", runs.output, "--retry", new, "--cut", "--max-tokens", 9)
    assert shown.exit_code == 0, shown.output
    while runs.jobs:
        runs.work(asked)
    assert asked.prompts == ["cut"]


def test_failed_rows_explain_that_few_answers_are_taken(runs: Runs) -> None:
    runs.write(["a", "b", "c", "d"])
    runs.score(answer=lambda request: shout(request) if request.prompt == "a" else refuse("no"))
    _, asked, manifest = new_run(runs, sampling={})
    assert (len(asked), manifest["rows_reused"], manifest["reused"][0]["differs"]) == (3, 1, [])


def test_cut_rows_explain_that_few_answers_are_taken(runs: Runs) -> None:
    def cuts(request: Request) -> FakeCompletion:
        reason = "stop" if request.prompt == "a" else "length"
        return replace(shout(request), finish_reason=reason)

    runs.write(["a", "cut", "cut 2", "cut 3"])
    runs.score(answer=cuts, sampling={**GREEDY, "max_tokens": 2})
    _, asked, manifest = new_run(runs, sampling={**GREEDY, "max_tokens": 9})
    assert (len(asked), manifest["rows_reused"], manifest["reused"][0]["differs"]) == (3, 1, [])


@pytest.mark.parametrize(
    ("arguments", "max_tokens", "found"),
    [
        ({"sampling_columns": {"max_tokens": "id"}}, 64, "comes from the column 'id'"),
        (
            {"prompts": [{"name": "x", "template": "{prompt}", "sampling": {"max_tokens": 2}}]},
            64,
            "comes from each of the prompts",
        ),
        ({"sampling": {"max_tokens": 9}}, 9, "9 is not more than the 9 that the run had"),
        ({}, 10, f"10 is not more than the {DEFAULT_MAX_TOKENS} that the run had"),
    ],
    ids=["column", "prompts", "equal", "default"],
)
def test_a_limit_that_would_cut_the_same_rows_again_is_refused(
    runs: Runs, invoke: Invoke, arguments: dict[str, Any], max_tokens: int, found: str
) -> None:
    runs.write(["a", "b"])
    runs.plan(**arguments)
    num_jobs = len(runs.jobs)
    new = runs.output.parent / "new"
    shown = invoke("errors", runs.output, "--retry", new, "--cut", "--max-tokens", max_tokens)
    assert shown.exit_code == 1
    assert found in shown.output
    assert len(runs.jobs) == num_jobs
