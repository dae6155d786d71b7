"""A run has one length of its model and one time for its chats; another run takes no answer that these have decided."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.common.keys import MODEL_FIELD
from jobs.context import JobContext
from jobs.errors import RunOfAnotherModel
from jobs.runs.plans.plan import Plan
from jobs.tasks import Request
from tests.jobs.answering import MODEL, FakeCompletion, shout
from tests.jobs.local_runs import Runs

GREEDY = {"temperature": 0.0}
Serve = Callable[..., None]


@pytest.fixture
def serve(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Lets the runs' worker serve its model otherwise."""
    make = runs.context

    def serve(**changes: Any) -> None:
        def context() -> JobContext:
            return replace(make(), model=replace(MODEL, **changes))

        monkeypatch.setattr(runs, "context", context)

    return serve


class Cut:
    """Answers as `shout`; prompts that begin with "long" end at the length. prompts: that were asked."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __call__(self, request: Request) -> FakeCompletion:
        self.requests.append(request)
        completion = shout(request)
        return (
            replace(completion, finish_reason="length")
            if "long" in self.prompts[-1]
            else completion
        )

    @property
    def prompts(self) -> list[str]:
        return [str(each.messages or each.prompt) for each in self.requests]


def again(runs: Runs, **arguments: Any) -> list[str]:
    """Run anew, with what the first run has answered; return what was asked."""
    asked = Cut()
    output = runs.output.parent / f"new-{len(list(runs.output.parent.iterdir()))}"
    runs.plan(output=output, **{"sampling": GREEDY, **arguments, "reuse": str(runs.output)})
    runs.work(asked)
    assert (output / "_SUCCESS").exists()
    return sorted(asked.prompts)


def test_workers_of_another_length_leave_a_run(runs: Runs, serve: Serve) -> None:
    runs.write(["a"])
    serve(max_model_len=512)
    runs.plan()
    (job,) = runs.jobs
    pin = runs._redis.hget(job.key, MODEL_FIELD).decode()  # type: ignore[union-attr]
    assert pin in runs.context().model.names
    for length in (32, 1024):
        serve(max_model_len=length)
        assert pin not in runs.context().model.names
        with pytest.raises(RunOfAnotherModel, match=f"up to 512 tokens.* up to {length} tokens"):
            runs.run(job)
    serve(max_model_len=512)
    runs.work()
    assert runs.rows()[0]["completion"] == "A"


@pytest.mark.parametrize("n", [1, 2])
def test_answers_that_a_smaller_length_has_cut_are_not_taken(
    runs: Runs, serve: Serve, n: int
) -> None:
    sampling = {**GREEDY, "n": n}
    runs.write(["short", "long", "b"])
    serve(max_model_len=32)
    runs.score(answer=Cut(), sampling=sampling)
    assert again(runs, sampling=sampling) == [], "the length is the same"
    serve(max_model_len=512)
    assert again(runs, sampling=sampling) == ["long"]
    assert again(runs, sampling=sampling, output_prefix="x_") == ["long"]
    assert again(runs, sampling=sampling, only_new=True) == ["long"]


def test_no_answer_of_a_larger_length_is_taken(runs: Runs, serve: Serve) -> None:
    runs.write(["short", "long"])
    serve(max_model_len=512)
    runs.score(answer=Cut(), sampling=GREEDY)
    serve(max_model_len=32)
    assert again(runs) == ["long", "short"]
    (new,) = runs.output.parent.glob("new-*")
    (told,) = json.loads((new / "_manifest.json").read_text())["reused"]
    assert "up to 512 tokens, and the model takes 32 now" in told["passed_over"][0]


@pytest.mark.parametrize("way", ["sampling", "a column"])
def test_a_prompt_that_was_cut_is_asked_again(runs: Runs, serve: Serve, way: str) -> None:
    runs.write(["short", "b"], most=[-1, None])
    values: dict[str, Any] = {"sampling": {**GREEDY, "truncate_prompt_tokens": -1}}
    if way == "a column":
        values = {"sampling_columns": {"truncate_prompt_tokens": "most"}}
    serve(max_model_len=32)
    runs.score(answer=Cut(), **{"sampling": GREEDY, **values})
    assert again(runs, **values) == []
    serve(max_model_len=512)
    assert again(runs, **values) == (["short"] if way == "a column" else ["b", "short"])


def test_lines_of_a_batch_file_are_taken_unless_one_of_their_answers_was_cut(
    runs: Runs, serve: Serve, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    prompts: list[Any] = ["short", ["short", "long"], "b"]
    bodies = [{"prompt": prompt, "max_tokens": 9} for prompt in prompts]
    lines = [
        {
            "custom_id": f"{place}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", **body},
        }
        for place, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    values: dict[str, Any] = {"source": path, "input_format": "openai-batch", "sampling": {}}
    serve(max_model_len=32)
    runs.plan(**values)
    runs.work(Cut())
    serve(max_model_len=512)
    assert again(runs, **values) == ["long", "short"]


DAYS = (datetime(2026, 11, 28, 12).timestamp(), datetime(2026, 11, 29, 12).timestamp())


def test_chats_of_a_run_have_the_time_of_its_planning_and_are_taken_while_the_template_writes_the_same(
    runs: Runs, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.write(["a", "b"])
    chat: dict[str, Any] = {"template": [{"role": "user", "content": "{prompt}"}]}
    serve(clock_formats=("%d %b %Y",))
    monkeypatch.setattr("time.time", lambda: DAYS[0])
    runs.plan(sampling=GREEDY, **chat)
    monkeypatch.setattr("time.time", lambda: DAYS[0] + 3600)
    runs.work(asked := Cut())
    assert {each.chat_options["now"] for each in asked.requests} == {DAYS[0]}
    assert again(runs, **chat) == [], "of the same day"
    monkeypatch.setattr("time.time", lambda: DAYS[1])
    assert len(again(runs, **chat)) == 2
    plan = Plan.from_text((runs.output / "_plan.json").read_text())
    assert plan.model.clock == "28 Nov 2026"


def test_nothing_is_taken_where_a_template_writes_what_cannot_be_named(
    runs: Runs, serve: Serve
) -> None:
    runs.write(["a", "b"])
    serve(clock_formats=None)
    runs.score(answer=Cut(), sampling=GREEDY)
    assert again(runs) == ["a", "b"]


def test_a_template_without_a_clock_is_told_no_time(runs: Runs, serve: Serve) -> None:
    runs.write(["a"])
    chat: dict[str, Any] = {"template": [{"role": "user", "content": "{prompt}"}]}
    runs.score(answer=(asked := Cut()), **chat)
    assert "now" not in asked.requests[0].chat_options
    assert pq.read_table(runs.output).num_rows == 1
