"""Rows of a finished run are computed again, and what differs from its parts is told."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.cli import folder_commands
from jobs.context.checks import Checks
from jobs.errors import (
    InputChanged,
    InvalidJob,
    JobsError,
    PartDamaged,
    RunOfAnotherModel,
    TrialFailed,
)
from jobs.parquet.shards.verify_work import sampled_rows
from jobs.tasks import Request
from tests.jobs.answering import MODEL, Answer, FakeCompletion, refuse, run_task
from tests.jobs.conftest import Invoke, MakeContext
from tests.jobs.local_runs import Runs

ROWS = 12
TELLS = "tests.jobs.checking.tells_row"


def drawn(request: Request) -> FakeCompletion:
    """Answers follow prompt and seed; one row's fails."""
    if "broken" in str(request.prompt):
        return refuse("it is broken")
    text = f"{request.prompt or request.messages} {request.sampling.get('seed')}"
    return FakeCompletion(text, 0, [1] * (len(text) % 7), "stop", len(text), 3)


def otherwise(request: Request) -> FakeCompletion:
    return replace(drawn(request), text="other")


class Site:
    """A run of an input file, and a look at it."""

    def __init__(self, runs: Runs) -> None:
        self.runs, self.input, self.output = runs, runs.source, runs.output
        texts = [f"text {number % 5}" for number in range(ROWS - 2)]
        columns = {"text": [*texts, None, "broken"], "limit": range(1, ROWS + 1)}
        pq.write_table(pa.table(columns), self.input, row_group_size=5)

    def run(self, answer: Answer = drawn, **arguments: Any) -> str:
        run: str = self.runs.plan(**{"template": "{text}: ", "rows_per_shard": 4, **arguments})[
            "run"
        ]
        self.runs.work(answer)
        assert (self.output / "_SUCCESS").exists()
        return run

    def verify(
        self, run: str, sample: Any = "100%", answer: Any = drawn, **changed: Any
    ) -> dict[str, Any]:
        context = replace(self.runs.context(), **changed)
        plan = str(self.output / "_plan.json")
        found = run_task(context, "jobs.verify_rows", run, plan, sample, answer=answer)
        assert json.loads(json.dumps(found)) == found
        assert context.shard_bytes.held == 0
        return found  # type: ignore[no-any-return]

    def counts(self, *arguments: Any, **changed: Any) -> tuple[int, ...]:
        found = self.verify(*arguments, **changed)
        names = ("checked", "equal", "different", "not_compared")
        return tuple(found[f"rows_{name}"] for name in names)

    def change(self, shard: int, change: Callable[[pa.Table], pa.Table]) -> None:
        """Write a part anew, its statistics included."""
        (path,) = self.output.rglob(f"part-{shard:05d}.parquet")
        kept = {b"tokenmill": pq.read_metadata(path).metadata[b"tokenmill"]}
        pq.write_table(change(pq.read_table(path)).replace_schema_metadata(kept), path)


@pytest.fixture(scope="module")
def checks() -> Iterator[Checks]:
    found = Checks({TELLS}, 10.0)
    yield found
    found.close()


@pytest.fixture
def make_context(make_context: MakeContext, checks: Checks) -> MakeContext:
    return lambda: replace(make_context(), checks=checks)


@pytest.fixture
def site(runs: Runs) -> Site:
    return Site(runs)


def with_value(column: str, row: int, value: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(column)
        values = table.column(place).to_pylist()
        values[row] = value
        return table.set_column(
            place, table.schema.field(place), pa.array(values, table.schema.types[place])
        )

    return change


STEPS = [{"name": "a", "template": "{text}?"}, {"name": "b", "template": "{a} {limit}"}]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"sampling_columns": {"max_tokens": "limit"}, "output_prefix": "x_", "keep": ["limit"]},
        {"template": None, "prompts": STEPS},
        {"check": {"regex": ".*[02468]"}, "max_attempts": 2},
        {"limit": 7},
    ],
)
def test_what_is_computed_again_alike_is_equal(site: Site, arguments: dict[str, Any]) -> None:
    run = site.run(**arguments)
    compared = 7 if "limit" in arguments else ROWS - 2
    failed = 0 if "limit" in arguments else 2
    assert site.counts(run) == (compared, compared, 0, failed)
    assert site.counts(run, 3, otherwise)[2] == site.counts(run, 3)[1] > 0


def test_a_value_that_was_changed_on_disk_is_found(site: Site) -> None:
    run = site.run()
    site.change(1, with_value("completion", 2, "something else"))
    site.change(2, with_value("completion_tokens", 0, 99))
    site.change(0, with_value("cached_tokens", 0, 99))  # which is not compared
    found = site.verify(run)
    assert (found["rows"], found["rows_equal"], found["rows_different"]) == (ROWS, 8, 2)
    text, tokens = found["differences"]
    assert (text["row"], text["column"], text["recorded"]) == (6, "completion", "something else")
    assert text["computed"].startswith("text 1: ")
    assert (tokens["row"], tokens["column"], tokens["recorded"]) == (8, "completion_tokens", 99)


def test_the_same_sample_comes_again() -> None:
    def rows(sample: str, seed: str, total: int) -> list[int]:
        return sorted(sampled_rows(sample, seed, total, 1000))

    assert [len(rows("1%", "run", total)) for total in (0, 1, 100, 101, 250)] == [0, 1, 1, 2, 3]
    assert rows("0.1%", "r:3", 10_000) == rows("10", "r:3", 10_000)
    assert rows("5", "r", 3) == [0, 1, 2]
    assert len({tuple(rows("5", seed, 1000)) for seed in ("a:0", "a:1", "b:0", "a:0")}) == 3


@pytest.mark.parametrize("sample", ["0%", "-1", "x"])
def test_other_samples_are_refused(sample: Any) -> None:
    with pytest.raises(InvalidJob, match="expected a share"):
        sampled_rows(sample, "seed", 10, 1000)


def test_a_run_that_cannot_be_verified_says_why(site: Site) -> None:
    run = site.run()
    with pytest.raises(RunOfAnotherModel):
        site.verify(run, model=replace(MODEL, fingerprint="another"))
    site.change(1, lambda table: table.slice(1))
    with pytest.raises(PartDamaged, match="3 rows, expected 4"):
        site.verify(run)
    (site.output / "part-00001.parquet").unlink()
    with pytest.raises(PartDamaged, match="part-00001"):
        site.verify(run)


def test_an_input_that_changed_is_told(site: Site) -> None:
    run = site.run()
    pq.write_table(pq.read_table(site.input).slice(1), site.input)
    with pytest.raises(InputChanged):
        site.verify(run, 3)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch, site: Site) -> list[dict[str, Any]]:
    """A worker that answers what the command enqueues."""
    seen: list[dict[str, Any]] = []

    def try_job(
        connection: Redis, queue: str, function: str, arguments: Any, model: str | None
    ) -> Any:
        assert (queue, model) == ("bulk", MODEL.fingerprint)
        seen.append(arguments)
        try:
            return run_task(site.runs.context(), function, answer=drawn, **arguments)
        except JobsError as error:
            raise TrialFailed(str(error)) from None

    monkeypatch.setattr(folder_commands, "try_job", try_job)
    return seen


def test_the_command_tells_by_its_exit_code(
    invoke: Invoke, site: Site, answered: list[dict[str, Any]]
) -> None:
    run = site.run()
    for name in (run, site.output):
        result = invoke("verify", name, "--sample", "100%")
        assert result.exit_code == 0, result.output
        assert "10 of 12 rows checked" in result.stdout
    site.change(1, with_value("completion", 2, "some\x1bthing"))
    result = invoke("verify", run, "--sample", ROWS)
    assert result.exit_code == 1
    assert "row 6, column completion" in result.stdout
    assert "\x1b" not in result.stdout
    result = invoke("verify", run, "--sample", 12, "--json", "--seed", 4)
    assert (json.loads(result.stdout)["rows_different"], answered[-1]["seed"]) == (1, 4)
    site.input.unlink()
    result = invoke("verify", run, "--sample", 3)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "in.parquet" in result.stderr


def test_a_run_that_redis_forgot_is_verified_by_its_folder(
    invoke: Invoke, redis: Redis, site: Site, answered: list[dict[str, Any]]
) -> None:
    run = site.run()
    redis.flushdb()
    result = invoke("verify", site.output, "--sample", "100%")
    assert result.exit_code == 0, result.output
    assert f"run {run}: 10 of 12 rows checked" in result.stdout
    assert invoke("verify", run).exit_code == 2  # of an id nothing is known
    (site.output / "_SUCCESS").unlink()
    result = invoke("verify", site.output)
    assert result.exit_code == 2
    assert "cannot be verified: it is not finished, but forgotten" in result.stderr
