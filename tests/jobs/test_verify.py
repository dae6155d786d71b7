"""Rows of a finished run are computed again, and what differs from its parts is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.cli import verify_command
from jobs.context import JobContext
from jobs.context.checks.processes import Checks
from jobs.context.shard_bytes import ShardBytes
from jobs.errors import (
    CannotVerify,
    InputChanged,
    InvalidJob,
    JobsError,
    PartDamaged,
    RunOfAnotherModel,
    ShardTooLarge,
    TrialFailed,
)
from jobs.parquet.verify_work import MAX_DIFFERENCES, sampled_rows
from jobs.runs.watching.trials import Trial
from jobs.tasks import Request
from tests.jobs.answering import MODEL, FakeCompletion, refuse, run_task, score_parquet, work_off
from tests.jobs.conftest import Invoke

MakeContext = Callable[[], JobContext]
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

    def __init__(self, redis: Redis, make_context: MakeContext, folder: Path) -> None:
        self.make_context, self._redis, self._folder = make_context, redis, folder
        self.input, self.output = folder / "in.parquet", folder / "out"
        texts = [f"text {number % 5}" for number in range(ROWS - 2)]
        columns = {"text": [*texts, None, "broken"], "limit": range(1, ROWS + 1)}
        pq.write_table(pa.table(columns), self.input, row_group_size=5)

    def run(self, **arguments: Any) -> str:
        arguments = {"template": "{text}: ", "rows_per_shard": 4, **arguments}
        run: str = score_parquet(self.make_context(), str(self.input), str(self.output), **arguments)["run"]
        return run

    def finish(self, **arguments: Any) -> str:
        run = self.run(**arguments)
        work_off(self._redis, self.make_context, answer=drawn)
        assert (self.output / "_SUCCESS").exists()
        return run

    def verify(self, run: str, sample: Any = "100%", answer: Any = drawn, **changed: Any) -> dict[str, Any]:
        context = replace(self.make_context(), **changed)
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
def site(redis: Redis, make_context: MakeContext, tmp_path: Path, checks: Checks) -> Site:
    return Site(redis, lambda: replace(make_context(), checks=checks), tmp_path)


def with_value(column: str, row: int, value: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(column)
        values = table.column(place).to_pylist()
        values[row] = value
        return table.set_column(place, table.schema.field(place), pa.array(values, table.schema.types[place]))

    return change


STEPS = [{"name": "a", "template": "{text}?"}, {"name": "b", "template": "{a} {limit}"}]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"sampling": {"temperature": 0}},
        {"sampling": {"n": 2, "seed": 7}},
        {"template": [{"role": "user", "content": "{text}"}]},
        {"sampling_columns": {"max_tokens": "limit"}, "output_prefix": "x_", "keep": ["limit"]},
        {"template": None, "prompts": STEPS},
        {"single_file": "jsonl"},
        {"check": {"regex": ".*[02468]"}, "max_attempts": 2},
        {"limit": 7},
    ],
)
def test_what_is_computed_again_alike_is_equal(site: Site, arguments: dict[str, Any]) -> None:
    run = site.finish(**arguments)
    compared = 7 if "limit" in arguments else ROWS - 2
    failed = 0 if "limit" in arguments else 2
    if isinstance(arguments.get("template"), list):  # whose messages are no prompt: nothing is broken
        compared, failed = ROWS - 1, 1
    assert site.counts(run) == (compared, compared, 0, failed)
    assert site.counts(run, 3, otherwise)[2] == site.counts(run, 3)[1] > 0


def test_a_value_that_was_changed_on_disk_is_found(site: Site) -> None:
    run = site.finish()
    site.change(1, with_value("completion", 2, "something else"))
    site.change(2, with_value("completion_tokens", 0, 99))
    site.change(0, with_value("cached_tokens", 0, 99))  # which is not compared
    found = site.verify(run)
    assert (found["rows"], found["rows_equal"], found["rows_different"]) == (ROWS, 8, 2)
    text, tokens = found["differences"]
    assert (text["row"], text["column"], text["recorded"]) == (6, "completion", "something else")
    assert text["computed"].startswith("text 1: ")
    assert (tokens["row"], tokens["column"], tokens["recorded"]) == (8, "completion_tokens", 99)


def test_a_row_that_fails_now_differs_with_its_reason(site: Site) -> None:
    run = site.finish()
    found = site.verify(run, answer=lambda request: refuse("no memory"))
    assert (found["rows_equal"], found["rows_different"]) == (0, 10)
    assert len(found["differences"]) == MAX_DIFFERENCES
    errors = [each for each in found["differences"] if each["column"] == "error"]
    assert (errors[0]["recorded"], errors[0]["computed"]) == (None, "no memory")


def test_what_the_run_left_in_the_process_is_not_taken_for_an_answer(
    redis: Redis, context: JobContext, tmp_path: Path
) -> None:
    shared = context.answers
    site = Site(redis, lambda: replace(context, answers=shared), tmp_path)
    run = site.finish(sampling={"temperature": 0})
    assert site.counts(run, "100%", otherwise)[2] == 10


def test_labels_are_compared_and_their_probabilities_are_not(site: Site) -> None:
    class Likelihood:
        num_tokens, is_greedy = 1, False

        def __init__(self, logprob: float) -> None:
            self.logprob = logprob

    def likely(*logprobs: float) -> Callable[[Request], FakeCompletion]:
        return lambda request: FakeCompletion(loglikelihoods=[Likelihood(each) for each in logprobs])

    run = site.run(labels=["yes", "no"])
    work_off(site.make_context().connection, site.make_context, answer=likely(-1, -2))
    assert site.counts(run, 5, likely(-1.01, -2))[2] == 0
    assert site.verify(run, 2, likely(-2, -1))["differences"][0]["computed"] == "no"


def test_the_same_sample_comes_again() -> None:
    def rows(sample: str, seed: str, total: int) -> list[int]:
        return sorted(sampled_rows(sample, seed, total, 1000))

    assert [len(rows("1%", "run", total)) for total in (0, 1, 100, 101, 250)] == [0, 1, 1, 2, 3]
    assert rows("0.1%", "r:3", 10_000) == rows("10", "r:3", 10_000)
    assert rows("5", "r", 3) == [0, 1, 2]
    assert len({tuple(rows("5", seed, 1000)) for seed in ("a:0", "a:1", "b:0", "a:0")}) == 3


@pytest.mark.parametrize("sample", ["0%", "-1", 0, "x", "", None, True, "1 %", "1e3", "²%"])
def test_other_samples_are_refused(site: Site, sample: Any) -> None:
    run = site.finish()
    with pytest.raises(InvalidJob, match="expected a share"):
        site.verify(run, sample)


def test_a_sample_that_would_not_fit_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    run = site.finish(sampling={"n": 2})
    with pytest.raises(ShardTooLarge, match="ask fewer rows"):
        site.verify(run, shard_bytes=ShardBytes(1500))
    monkeypatch.setattr("jobs.parquet.verify_work.MAX_ANSWERS", 11)
    with pytest.raises(InvalidJob, match="6 rows, more than the limit of 5: take fewer"):
        site.verify(run, 6)


def test_a_run_that_cannot_be_verified_says_why(site: Site) -> None:
    run = site.run()
    with pytest.raises(PartDamaged):
        site.verify(run)
    site.finish()
    with pytest.raises(RunOfAnotherModel):
        site.verify(run, model=replace(MODEL, fingerprint="another"))
    site.change(1, lambda table: table.slice(1))
    with pytest.raises(PartDamaged, match="3 rows, expected 4"):
        site.verify(run)
    (site.output / "part-00001.parquet").unlink()
    with pytest.raises(PartDamaged, match="part-00001"):
        site.verify(run)


def test_an_input_that_changed_is_told(site: Site) -> None:
    run = site.finish()
    table = pq.read_table(site.input)
    pq.write_table(table.slice(1), site.input)
    with pytest.raises(InputChanged):
        site.verify(run, 3)
    site.input.unlink()
    with pytest.raises(InputChanged):
        site.verify(run, 3)


def test_a_part_without_one_of_the_columns_is_damaged(site: Site) -> None:
    run = site.finish()
    site.change(0, lambda table: table.drop_columns(["completion"]))
    with pytest.raises(PartDamaged, match="no column 'completion'"):
        site.verify(run)


def test_kinds_of_runs_that_are_not_rows_of_text_are_refused(
    redis: Redis, make_context: MakeContext, site: Site, tmp_path: Path
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    site.input = tmp_path / "in.jsonl"
    run = site.run(template=None, input_format="openai-batch")
    with pytest.raises(CannotVerify, match="openai-batch"):
        site.verify(run)
    site.input, site.output = tmp_path / "in.parquet", tmp_path / "embedded"
    embeds = replace(MODEL, embedding_size=4)
    site.make_context = lambda: replace(make_context(), model=embeds)
    run = site.run(task="embed")
    with pytest.raises(CannotVerify, match="embeddings"):
        site.verify(run)


def test_a_function_that_is_not_allowed_here_is_not_called(site: Site) -> None:
    run = site.finish(check={"function": TELLS}, max_attempts=2)
    assert site.counts(run, "30%")[2] == 0

    def never(request: Request) -> FakeCompletion:
        raise AssertionError("it was asked")

    with pytest.raises(InvalidJob, match="tells_row"):
        site.verify(run, checks=Checks(), answer=never)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch, site: Site) -> list[Trial]:
    """A worker that answers what the command enqueues."""
    seen: list[Trial] = []

    def try_job(connection: Redis, queue: str, trial: Trial, model: str | None) -> Any:
        assert (queue, model) == ("bulk", MODEL.fingerprint)
        seen.append(trial)
        try:
            return run_task(site.make_context(), trial.function, answer=drawn, **trial.kwargs)
        except JobsError as error:
            raise TrialFailed(str(error)) from None

    monkeypatch.setattr(verify_command, "try_job", try_job)
    return seen


def test_the_command_tells_by_its_exit_code(invoke: Invoke, site: Site, answered: list[Trial]) -> None:
    run = site.finish()
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
    assert (result.exit_code, json.loads(result.stdout)["rows_different"]) == (1, 1)
    assert answered[-1].kwargs["seed"] == 4
    site.input.unlink()
    result = invoke("verify", run, "--sample", 3)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "in.parquet" in result.stderr


def test_what_the_command_cannot_verify_ends_with_2(
    invoke: Invoke, redis: Redis, site: Site, answered: list[Trial]
) -> None:
    assert invoke("verify", "0" * 16).exit_code == 2
    run = site.run()
    result = invoke("verify", run)
    assert (result.exit_code, answered) == (2, [])
    assert "not finished, but running" in result.stderr
    assert invoke("verify", run, "--sample", "0").exit_code == 2
    site.finish()
    redis.flushall()
    assert invoke("verify", site.output).exit_code == 2


def test_a_sample_of_failed_rows_alone_verifies_nothing(
    invoke: Invoke, site: Site, answered: list[Trial]
) -> None:
    columns = {"text": pa.array([None], pa.string())}
    pq.write_table(pa.table(columns), site.input)
    result = invoke("verify", site.finish(max_errors="100%"))
    assert result.exit_code == 2
    assert "left out   1" in result.stdout
