"""Jobs and runs that name adapters: each is pinned to its files, and nothing mixes answers of two of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from jobs.common.keys import FORMAT, MODEL_FIELD, WORKER_STATS_TTL_S, worker_key
from jobs.context import JobContext
from jobs.context.adapters import Adapters, LiveAdapters
from jobs.context.answers import AnswerMemo
from jobs.errors import AdapterAwaited, InvalidJob, ModelNotServed, UnknownAdapter
from jobs.runs.plans.plan import Plan
from jobs.tasks import Request
from tests.jobs.answering import MODEL, FakeCompletion, add_worker, feed, opened_task, run_task
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs

GREEDY = {"temperature": 0.0}
SQL, FRENCH = f"sql@{'1' * 32}", f"fr@{'2' * 32}"
CHANGED = f"sql@{'3' * 32}"
Serve = Callable[..., None]


@pytest.fixture
def serving(context: JobContext) -> JobContext:
    return replace(context, adapters=Adapters([SQL, FRENCH]))


@pytest.fixture
def serve(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Lets the runs' worker have these adapters, and no others."""
    make = runs.context
    memo = AnswerMemo()

    def serve(*pinned: str) -> None:
        def context() -> JobContext:
            return replace(make(), adapters=Adapters(pinned), answers=memo)

        monkeypatch.setattr(runs, "context", context)

    serve(SQL, FRENCH)
    return serve


class Named:
    """Answers with the adapter that a request names; asked: prompts with it, of what reached the engine."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []

    def __call__(self, request: Request) -> FakeCompletion:
        name = request.sampling.get("adapter")
        self.asked.append((str(request.prompt or request.messages), name))
        return FakeCompletion(f"by {name}", 0, [1], "stop", 1)


# Jobs of prompts


def test_a_job_names_an_adapter_and_says_which_files_answered(serving: JobContext) -> None:
    named = Named()
    (one,) = [run_task(serving, "jobs.complete", "a", adapter="sql", answer=named)]
    assert one["choices"][0]["text"] == f"by {SQL}"
    assert (one["model"], one["system_fingerprint"]) == ("sql", f"{MODEL.fingerprint}/{'1' * 32}")
    messages = [{"role": "user", "content": "a"}]
    chat = run_task(serving, "jobs.chat", messages, adapter="fr", answer=named)
    assert chat["choices"][0]["message"]["content"] == f"by {FRENCH}"
    plain = run_task(serving, "jobs.complete", "a", answer=named)
    assert (plain["model"], plain["system_fingerprint"]) == ("m", MODEL.fingerprint)


@pytest.mark.parametrize("name", ["sql", SQL])
def test_the_model_of_a_call_may_be_an_adapter(serving: JobContext, name: str) -> None:
    named = Named()
    run_task(serving, "jobs.complete", ["a", "b"], model=name, answer=named)
    assert named.asked == [("b", SQL), ("a", SQL)]
    with pytest.raises(InvalidJob, match="model and adapter each name an adapter"):
        run_task(serving, "jobs.complete", "a", model=name, adapter="fr")
    run_task(serving, "jobs.complete", "a", model="m", adapter="fr", answer=named)
    assert named.asked[-1] == ("a", FRENCH)


def test_an_unknown_adapter_is_refused_with_the_known_ones(serving: JobContext) -> None:
    with pytest.raises(
        UnknownAdapter, match=r"no adapter 'sqll' on this worker; known are fr, sql"
    ):
        run_task(serving, "jobs.complete", "a", adapter="sqll")
    with pytest.raises(UnknownAdapter):
        run_task(serving, "jobs.complete", "a", adapter=CHANGED)
    with pytest.raises(InvalidJob, match="adapter is"):
        run_task(serving, "jobs.complete", "a", adapter=7)
    with pytest.raises(ModelNotServed, match="serves 'm', and adapters fr, sql: name"):
        run_task(serving, "jobs.complete", "a", model="sqll")


def test_a_head_takes_no_adapter_and_the_error_names_what_was_asked_for(
    serving: JobContext,
) -> None:
    with pytest.raises(InvalidJob, match=r"'sql' is an adapter, and .* name 'm', or leave `model`"):
        run_task(serving, "jobs.classify_text", "a", model="sql")


def test_an_adapter_whose_files_cannot_be_used_is_refused_with_the_reason() -> None:
    problems = {"bad": "adapter 'bad' cannot be used: use_dora is set"}
    pinned = [SQL]
    live = LiveAdapters(lambda: (list(pinned), problems))
    with pytest.raises(InvalidJob, match="use_dora is set"):
        live.pin("bad")
    pinned.append(FRENCH)
    live.refresh()
    assert live.pin("fr") == FRENCH


def test_a_journal_of_other_files_is_not_gone_on_with(serving: JobContext) -> None:
    """Its entries are found by what was asked, and that has the files in it."""
    digests = []
    for pinned in (SQL, CHANGED):
        context = replace(serving, adapters=Adapters([pinned]))
        task: Any = opened_task(context, "jobs.complete", ["a"], {"adapter": "sql"})
        digests.append(task._digests[0])
    assert digests[0] != digests[1]


# Runs


def test_a_run_pins_its_adapter_and_other_workers_leave_its_shards(
    runs: Runs, serve: Serve, redis: Redis, invoke: Invoke
) -> None:
    runs.write(["a", "b"])
    run = runs.plan(sampling={**GREEDY, "adapter": "sql"})["run"]
    (job,) = runs.jobs
    pin = redis.hget(job.key, MODEL_FIELD)
    assert pin == f"{MODEL.pin}\n{SQL}".encode()
    serve(CHANGED, FRENCH)
    with pytest.raises(AdapterAwaited, match=rf"run {run} needs .* adapters sql \(11111111\)"):
        runs.run(job)
    add_worker(redis, "w")
    record = {"models": [*MODEL.names, "sql", CHANGED], "format": FORMAT}
    redis.set(worker_key("w"), json.dumps(record), ex=WORKER_STATS_TTL_S)
    redis.hset("rq:worker:w", "queues", "bulk")
    awaited = "no worker on queue 'bulk' has the files of adapters sql (11111111): put these files"
    assert awaited in invoke("status", run).output
    redis.set(
        worker_key("w"),
        json.dumps({**record, "models": [*MODEL.names, SQL]}),
        ex=WORKER_STATS_TTL_S,
    )
    assert "no worker on queue" not in invoke("status", run).output
    serve(SQL)
    named = Named()
    runs.work(named)
    assert sorted(named.asked) == [("a", SQL), ("b", SQL)]


def test_a_job_whose_adapter_is_not_here_any_more_gets_no_answer(
    runs: Runs, serve: Serve, serving: JobContext
) -> None:
    """Neither an error for a row nor for a prompt: the worker gives the job back."""
    changed = FakeCompletion(
        error="the files have changed", finish_reason="error", lacks_adapter=True
    )
    runs.write(["a"])
    runs.plan(sampling={"adapter": "sql"})
    with pytest.raises(AdapterAwaited, match="the files have changed"):
        runs.work(lambda request: changed)
    with pytest.raises(AdapterAwaited, match="the files have changed"):
        run_task(serving, "jobs.complete", ["a", "b"], adapter="sql", answer=lambda _: changed)


def test_each_row_has_the_adapter_of_its_column(runs: Runs, serve: Serve) -> None:
    """Equal prompts too; null stands for the run's, and an unknown one is an error of its row."""
    names = ["sql", "fr", None, "sql", "nobody"]
    runs.write(["same"] * 5, who=names)
    runs.plan(sampling={**GREEDY, "adapter": "fr"}, sampling_columns={"adapter": "who"})
    plan = Plan.from_text((runs.output / "_plan.json").read_text())
    assert plan.model.adapters == (FRENCH, SQL)
    named = Named()
    runs.work(named)
    assert [row["completion"] for row in runs.rows()][:4] == [
        f"by {SQL}", f"by {FRENCH}", f"by {FRENCH}", f"by {SQL}",
    ]  # fmt: skip
    unknown = f"nobody@{'0' * 32}"
    assert sorted(named.asked) == [("same", each) for each in (FRENCH, unknown, SQL)]


def test_equal_rows_of_another_adapter_are_asked_anew(runs: Runs, serve: Serve) -> None:
    """By the worker that remembers answers, and by `reuse`."""
    runs.write(["a"])
    named = Named()
    outputs = []
    asked: list[Any] = [("sql", SQL), ("fr", FRENCH), (None, None), ("sql", CHANGED)]
    for number, (name, expected) in enumerate(asked):
        if expected == CHANGED:
            serve(CHANGED, FRENCH)
        sampling = dict(GREEDY) if name is None else {**GREEDY, "adapter": name}
        reuse = {"reuse": outputs[-1]} if outputs else {}
        outputs.append(str(runs.output.parent / f"out-{number}"))
        runs.plan(output=outputs[-1], sampling=sampling, **reuse)
        runs.work(named)
        assert named.asked[-1] == ("a", expected)
        assert len(named.asked) == number + 1
    again = str(runs.output.parent / "again")
    runs.plan(output=again, sampling={**GREEDY, "adapter": "sql"}, reuse=outputs[-1])
    runs.work(named)
    assert len(named.asked) == 4, "the same adapter, so its answer is taken"


def test_rows_of_an_adapter_that_came_too_late_are_asked_again_by_a_retry(
    runs: Runs, serve: Serve, invoke: Invoke
) -> None:
    """A name that nobody knew when the run was planned is an error of its row."""
    runs.write(["a", "b"], who=["sql", "late"])
    runs.plan(sampling=GREEDY, sampling_columns={"adapter": "who"})

    def refuse_late(request: Request) -> FakeCompletion:
        is_late = request.sampling["adapter"].startswith("late")
        return (
            FakeCompletion(error="not there", finish_reason="error")
            if is_late
            else Named()(request)
        )

    runs.work(refuse_late)
    late = f"late@{'7' * 32}"
    serve(SQL, FRENCH, late)
    retried = str(runs.output.parent / "retried")
    invoke("errors", str(runs.output), "--retry", retried)
    named = Named()
    runs.work()  # plans it
    runs.work(named)
    assert named.asked == [("b", late)]


def test_a_run_that_takes_no_answers_says_which_adapters_have_other_files(
    runs: Runs, serve: Serve
) -> None:
    runs.write(["a"], who=["sql"])
    asked: dict[str, Any] = {"sampling": GREEDY, "sampling_columns": {"adapter": "who"}}
    runs.plan(**asked)
    runs.work(Named())
    serve(CHANGED, FRENCH)
    output = str(runs.output.parent / "new")
    planned = runs.plan(output=output, reuse=str(runs.output), **asked)
    assert planned["reused"][0]["differs"] == ["adapters sql (11111111) there, sql (33333333) here"]


def test_only_rows_whose_adapter_has_other_files_are_asked_again(runs: Runs, serve: Serve) -> None:
    """Also if an argument names the adapter of rows that name none."""
    runs.write(["a", "b", "c", "d"], who=["sql", "fr", None, f"fr@{'2' * 32}"])
    asked: dict[str, Any] = {"sampling": GREEDY, "sampling_columns": {"adapter": "who"}}
    with_default = {**asked, "sampling": {**GREEDY, "adapter": "sql"}}
    for number, (arguments, again) in enumerate([(asked, ["a"]), (with_default, ["a", "c"])]):
        serve(SQL, FRENCH)
        old, new = (str(runs.output.parent / f"{age}-{number}") for age in ("old", "new"))
        runs.plan(output=old, **arguments)
        runs.work(Named())
        serve(CHANGED, FRENCH)
        runs.plan(output=new, reuse=old, **arguments)
        named = Named()
        runs.work(named)
        assert sorted(named.asked) == [(prompt, CHANGED) for prompt in again]


def test_only_lines_whose_adapter_has_other_files_are_asked_again(runs: Runs, serve: Serve) -> None:
    bodies = [{"model": name, "prompt": name, "temperature": 0} for name in ("sql", "fr", "m")]
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": body}
        for n, body in enumerate(bodies)
    ]
    source = runs.source.parent / "lines.jsonl"
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    old, new = (str(runs.output.parent / age) for age in ("old", "new"))
    runs.plan(source, output=old, input_format="openai-batch")
    runs.work(Named())
    serve(CHANGED, FRENCH)
    runs.plan(source, output=new, input_format="openai-batch", reuse=old)
    named = Named()
    runs.work(named)
    assert named.asked == [("sql", CHANGED)]


def test_a_run_with_an_unknown_adapter_fails_by_name(runs: Runs, serve: Serve) -> None:
    runs.write(["a"])
    with pytest.raises(UnknownAdapter, match="no adapter 'nobody'"):
        runs.plan(sampling={"adapter": "nobody"})
    prompts = [
        {"name": "first", "template": "{prompt}", "sampling": {"adapter": "sql"}},
        {"name": "second", "template": "{first}", "sampling": {"adapter": "fr"}},
    ]
    runs.plan(prompts=prompts, sampling=GREEDY)
    named = Named()
    runs.work(named)
    assert named.asked == [("a", SQL), (f"by {SQL}", FRENCH)]


def test_labels_are_scored_with_the_adapter(runs: Runs, serve: Serve) -> None:
    runs.write(["a"])
    runs.plan(labels=["yes", "no"], sampling={"adapter": "sql"})
    (job,) = runs.jobs
    task = opened_task(runs.context(), job.func_name, job.args, job.kwargs)
    asked = feed(task, lambda request: FakeCompletion(error="not here", finish_reason="error"))
    assert [request.sampling["adapter"] for request in asked] == [SQL]
    with pytest.raises(InvalidJob, match="escalate_below asks a second model"):
        runs.plan(
            labels=["yes", "no"], sampling={"adapter": "sql"}, escalate_below=0.5, escalate_to="q"
        )


def test_lines_of_batch_files_name_adapters_as_their_model(
    runs: Runs, serve: Serve, tmp_path: Path
) -> None:
    bodies: list[dict[str, Any]] = [
        {"model": "sql", "prompt": "a"},
        {"model": "m", "prompt": "a"},
        {"prompt": "a", "adapter": "fr"},
        {"model": "nobody", "prompt": "a"},
    ]
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": body}
        for n, body in enumerate(bodies)
    ]
    source = runs.source.parent / "lines.jsonl"
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    runs.plan(source, input_format="openai-batch")
    plan = Plan.from_text((runs.output / "_plan.json").read_text())
    assert plan.model.adapters == (FRENCH, SQL)
    serve(SQL, FRENCH, f"nobody@{'9' * 32}")  # it comes too late for this run
    named = Named()
    runs.work(named)
    assert set(named.asked) == {("a", None), ("a", FRENCH), ("a", SQL)}
    assert len(named.asked) == 3
    errors = (runs.output / "errors.jsonl").read_text()
    assert "'nobody'" in errors


def test_options_of_the_command_line(invoke: Invoke, runs: Runs, redis: Redis) -> None:
    runs.write(["a"], who=["sql"])
    invoke(
        "submit", str(runs.source), str(runs.output), "--adapter", "fr", "--adapter-column", "who",
        "--column", "max_tokens=id",
    )  # fmt: skip
    (job,) = runs.jobs
    assert job.kwargs["sampling"] == {"adapter": "fr"}
    assert job.kwargs["sampling_columns"] == {"adapter": "who", "max_tokens": "id"}


def test_plans_without_adapters_are_written_as_before(runs: Runs) -> None:
    runs.write(["a"])
    runs.plan()
    content = json.loads((runs.output / "_plan.json").read_text())
    assert "adapters" not in content["model"]
