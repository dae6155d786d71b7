"""What a dry run says of a run, compared with what the run then takes."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.cli.trial_commands import dry_run_lines
from jobs.context.served_model import PromptMeter
from jobs.errors import InvalidJob, MissingColumn
from jobs.runs.watching.dry_run import NUM_TRIED, estimate, trial_of
from jobs.runs.watching.trials import Trial, Tried
from jobs.table import own_function
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, queued_jobs, run_task, score_parquet, shout, work_off
from tests.jobs.conftest import MakeContext

BLOCK = 16


def token_ids(prompt: str | None, messages: Any, options: Any) -> Sequence[int]:
    text = prompt if messages is None else json.dumps(messages)
    if len(text) > 5000:
        raise InvalidJob(f"the prompt has {len(text)} tokens; this engine takes at most 5000")
    return [ord(each) for each in text[-options.get("truncate_prompt_tokens", len(text)) :]]


@pytest.fixture
def context(make_context: MakeContext) -> MakeContext:
    meter = PromptMeter(token_ids, 256, BLOCK, 10_000)
    return lambda: replace(make_context(), meter=lambda: meter)


def survey(context: MakeContext, source: Path, **arguments: Any) -> dict[str, Any]:
    function = own_function("jobs.survey_parquet")
    assert function is not None
    found = function(context(), str(source), **arguments)
    assert json.loads(json.dumps(found)) == found
    return found


def answering(context: MakeContext, answer: Callable[[Request], FakeCompletion]) -> Callable[..., list[Tried]]:
    def run(trials: Sequence[Trial]) -> list[Tried]:
        values = [run_task(context(), each.function, answer=answer, **each.kwargs) for each in trials]
        return [Tried(value, None, 0.0, 1.0) for value in values]

    return run


def skewed_prompts(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Few long texts hold most of the tokens, and have most of the answers'."""
    lengths = [min(4000, int(rng.lognormvariate(3, 1.2)) + 1) for _ in range(1500)]
    return {"prompt": [f"{number} " + "x" * length for number, length in enumerate(lengths)]}, {}


def skewed_repeats(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A handful of texts are most of the rows."""
    texts = [f"{number} " + "y" * rng.randint(1, 500) for number in range(600)]
    rows = [texts[min(599, int(rng.paretovariate(0.7)) - 1)] for _ in range(1500)]
    return {"prompt": rows}, {"sampling": {"temperature": 0}}


def skewed_limits(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """One row in a hundred may write a hundred times as much."""
    limits = [1000 if rng.random() < 0.01 else rng.randint(1, 20) for _ in range(1500)]
    columns = {"prompt": [f"{rng.random()}" for _ in limits], "limit": limits}
    return columns, {"sampling_columns": {"max_tokens": "limit"}, "sampling": {"n": 2}}


def written(request: Request) -> FakeCompletion:
    """As many tokens as the prompt has, or as it may, or fewer."""
    assert request.prompt is not None
    number = random.Random(request.prompt).uniform(0.6, 1)
    tokens = min(len(request.prompt), request.sampling.get("max_tokens", 10**9))
    if "x" not in request.prompt and "y" not in request.prompt:
        tokens = request.sampling.get("max_tokens", 256)
    return FakeCompletion("t", 0, [1] * max(1, int(number * tokens)), "stop", len(request.prompt))


@pytest.mark.parametrize("make", [skewed_prompts, skewed_repeats, skewed_limits])
def test_tokens_are_estimated_within_15_percent_on_skewed_files(
    redis: Redis, context: MakeContext, tmp_path: Path, make: Callable[..., Any]
) -> None:
    columns, arguments = make(random.Random(5))
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    found = survey(context, tmp_path / "in.parquet", **arguments)
    assert len(found["picked"]) <= NUM_TRIED
    told = estimate(found, answering(context, written))
    score_parquet(context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), **arguments)
    shared = context()
    work_off(redis, lambda: replace(context(), answers=shared.answers), answer=written)
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert told.prompt_tokens == manifest["prompt_tokens"]
    for ours, theirs in (
        (told.completion_tokens, manifest["completion_tokens"]),
        (told.generated_tokens, manifest["generated_tokens"]),
    ):
        assert abs(ours - theirs) <= 0.15 * theirs


def test_failing_rows_repeats_and_shared_beginnings_are_counted(context: MakeContext, tmp_path: Path) -> None:
    head = "h" * 40
    prompts = [f"{head}{n:03}" for n in range(5)] + ["z", "z", None, "w" * 6000, "v" * 7000, ""]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    found = survey(context, tmp_path / "in.parquet", sampling={"temperature": 0})
    assert (found["rows"], found["rows_read"], found["rows_failing"]) == (11, 11, 4)
    assert (found["reasons"][0]["rows"], found["reasons"][0]["row"]) in ((2, 8), (2, 9))
    assert (found["rows_repeated"], found["requests"]) == (1, 6)
    assert (found["prompt_tokens"], found["request_tokens"]) == (5 * 43 + 2, 5 * 43 + 1)
    assert found["cached_tokens"] == 4 * 32, "two blocks of 16 of each prompt but the first"
    drawn = survey(context, tmp_path / "in.parquet", rows_per_shard=3)
    assert (drawn["rows_repeated"], drawn["requests"]) == (1, 7), "drawn anew, they are not one request"


def test_rows_that_an_earlier_run_has_answered_cost_nothing(redis: Redis, context: MakeContext, tmp_path: Path) -> None:
    source, old = tmp_path / "in.parquet", tmp_path / "old"
    pq.write_table(pa.table({"prompt": ["aa", "bb", "cc"]}), source)
    score_parquet(context(), str(source), str(old))
    work_off(redis, context)
    pq.write_table(pa.table({"prompt": ["new", "cc", "aa", "newer"]}), source)
    found = survey(context, source, reuse=[str(old)])
    assert (found["rows"], found["rows_reused"], found["requests"], found["prompt_tokens"]) == (4, 2, 2, 8)
    assert "2 are answered by earlier runs" in dry_run_lines(found, estimate(found, answering(context, shout)), None)[0]


def test_a_share_of_a_large_run_is_scaled(context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": [f"{number:04}" for number in range(1000)]}), tmp_path / "in.parquet")
    found = survey(context, tmp_path / "in.parquet", max_rows=100)
    assert (found["rows"], found["rows_read"]) == (1000, 100)
    told = estimate(found, answering(context, lambda request: FakeCompletion("", 0, [1, 2, 3])))
    assert (told.prompt_tokens, told.completion_tokens) == (4000, pytest.approx(3000))


def test_the_first_rows_are_asked_with_the_runs_own_seeds(redis: Redis, context: MakeContext, tmp_path: Path) -> None:
    columns = {"prompt": ["c", "a", None, "b"], "limit": [1, 2, 3, 4]}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    arguments = {"sampling": {"seed": 7}, "sampling_columns": {"max_tokens": "limit"}}
    found = survey(context, tmp_path / "in.parquet", pick=2, first=True, **arguments)
    assert [(each["row"], each["prompt"]) for each in found["picked"]] == [(0, "c"), (1, "a")]
    score_parquet(context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), **arguments)
    asked: dict[Any, Any] = {}
    for job in queued_jobs(redis):
        answer = lambda request: asked.update({request.prompt: request.sampling}) or FakeCompletion()  # noqa: E731
        run_task(context(), job.func_name, *job.args, answer=answer)
    assert [each["sampling"] for each in found["picked"]] == [dict(asked["c"]), dict(asked["a"])]


def test_what_a_planning_refuses_a_survey_refuses(context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x", "y"]}), tmp_path / "in.parquet")
    with pytest.raises(MissingColumn):
        survey(context, tmp_path / "in.parquet")
    with pytest.raises(InvalidJob, match="'colum' is no argument"):
        survey(context, tmp_path / "in.parquet", colum="a")
    with pytest.raises(InvalidJob, match="no engine"):
        survey(lambda: replace(context(), meter=None), tmp_path / "in.parquet", prompt_column="a")


def test_chats_are_surveyed_as_chats(context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x", "y"]}), tmp_path / "in.parquet")
    template = [{"role": "user", "content": "hi {a}"}]
    found = survey(context, tmp_path / "in.parquet", template=template, pick=5, first=True)
    assert [each["prompt"][0]["content"] for each in found["picked"]] == ["hi x", "hi y"]
    told = estimate(found, answering(context, lambda request: FakeCompletion("", 0, [1])))
    assert (told.num_tried, told.num_failed, told.completion_tokens) == (2, 0, 2)


def test_each_dry_run_asks_prompts_that_no_other_has_brought_into_the_cache(
    context: MakeContext, tmp_path: Path
) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    found = survey(context, tmp_path / "in.parquet", sampling={"temperature": 0, "max_tokens": 2})
    answer, asked = answering(context, written), set[str]()

    def noted(trials: Sequence[Trial]) -> list[Tried]:
        asked.update(trial.kwargs["prompt"] for trial in trials)
        return answer(trials)

    for _ in range(3):
        estimate(found, noted)
    begun = [prompt.partition("prompt") for prompt in asked.difference(prompts)]
    assert len({beginning for beginning, _, _ in begun}) == 6, "two tries each"
    assert {f"prompt{rest}" for _, _, rest in begun} == set(prompts)


def test_log_probabilities_are_asked_by_the_names_of_each_job() -> None:
    asked = {"prompt": "a", "is_chat": False, "sampling": {"logprobs": 0, "prompt_logprobs": 2}}
    assert trial_of(asked, None).kwargs == {"prompt": "a", "logprobs": 0, "prompt_logprobs": 2}
    of_chat = trial_of({**asked, "is_chat": True}, None).kwargs
    assert of_chat == {"messages": "a", "logprobs": True, "top_logprobs": 0, "prompt_logprobs": 2}
