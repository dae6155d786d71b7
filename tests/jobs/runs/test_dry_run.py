"""What a dry run says of a run, compared with what the run then takes."""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from redis import Redis

from jobs.cli.trial_commands import LIKELY_MULTIPLES, dry_run_lines
from jobs.common.display import duration_text
from jobs.context.served_model import PromptMeter
from jobs.errors import InvalidJob, MissingColumn
from jobs.parquet.planning.survey import MAX_TRIED
from jobs.parquet.prompts.picture_source import picture_reader
from jobs.tasks import Request
from tests.jobs.answering import (
    Answer,
    FakeCompletion,
    refuse,
    run_task,
    score_parquet,
    shout,
    work_off,
)
from tests.jobs.conftest import MakeContext
from tests.picture_files import BLUE, RED, picture

BLOCK = 16


def token_ids(request: Request) -> Sequence[int]:
    messages = request.messages
    text = str(request.prompt) if messages is None else json.dumps(messages)
    if len(text) > 5000:
        raise InvalidJob(f"the prompt has {len(text)} tokens; this engine takes at most 5000")
    return [
        ord(each) for each in text[-request.sampling.get("truncate_prompt_tokens", len(text)) :]
    ]


@pytest.fixture
def context(make_context: MakeContext) -> MakeContext:
    meter = PromptMeter(token_ids, 256, BLOCK)
    return lambda: replace(make_context(), meter=lambda: meter)


def survey(
    context: MakeContext, source: Path, answer: Answer = shout, **arguments: Any
) -> dict[str, Any]:
    found = run_task(context(), "jobs.survey_parquet", str(source), answer=answer, **arguments)
    assert isinstance(found, dict)
    assert json.loads(json.dumps(found)).keys() == found.keys()
    return found


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
    told = survey(context, tmp_path / "in.parquet", written, **arguments)
    assert told["num_tried"] <= MAX_TRIED
    score_parquet(context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), **arguments)
    shared = context()
    work_off(redis, lambda: replace(context(), answers=shared.answers), answer=written)
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert told["prompt_tokens"] == manifest["prompt_tokens"]
    for name in ("completion_tokens", "generated_tokens"):
        assert abs(told[name] - manifest[name]) <= 0.15 * manifest[name]


def test_failing_rows_repeats_and_shared_beginnings_are_counted(
    context: MakeContext, tmp_path: Path
) -> None:
    head = "h" * 40
    prompts = [f"{head}{n:03}" for n in range(5)] + ["z", "z", None, "w" * 6000, "v" * 7000, ""]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    found = survey(context, tmp_path / "in.parquet", sampling={"temperature": 0})
    assert (found["num_rows"], found["rows_read"], found["rows_failing"]) == (11, 11, 4)
    assert (found["reasons"][0]["rows"], found["reasons"][0]["examples"]) == (2, [8, 9])
    assert (found["rows_repeated"], found["requests"]) == (1, 6)
    assert found["prompt_tokens"] == 5 * 43 + 2
    assert found["cached_tokens"] == 4 * 32, "two blocks of 16 of each prompt but the first"
    drawn = survey(context, tmp_path / "in.parquet", rows_per_shard=3)
    assert (drawn["rows_repeated"], drawn["requests"]) == (1, 7), (
        "drawn anew, they are not one request"
    )


def test_rows_that_an_earlier_run_has_answered_cost_nothing(
    redis: Redis, context: MakeContext, tmp_path: Path
) -> None:
    source, old = tmp_path / "in.parquet", tmp_path / "old"
    pq.write_table(pa.table({"prompt": ["aa", "bb", "cc"]}), source)
    score_parquet(context(), str(source), str(old))
    work_off(redis, context)
    pq.write_table(pa.table({"prompt": ["new", "cc", "aa", "newer"]}), source)
    found = survey(context, source, reuse=[str(old)])
    assert (found["num_rows"], found["rows_reused"], found["requests"], found["prompt_tokens"]) == (
        4,
        2,
        2,
        8,
    )
    assert "2 are answered by earlier runs" in dry_run_lines(found, None)[0]


@pytest.mark.parametrize("chars", [1 << 20, 80])
def test_a_share_of_a_large_run_is_scaled(
    context: MakeContext, tmp_path: Path, chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.parquet.planning.survey.MAX_TRIED_CHARS", chars)
    pq.write_table(
        pa.table({"prompt": [f"{number:04}" for number in range(1000)]}), tmp_path / "in.parquet"
    )
    three = lambda request: FakeCompletion("", 0, [1, 2, 3])  # noqa: E731
    found = survey(context, tmp_path / "in.parquet", three, max_rows=100)
    assert (found["num_rows"], found["rows_read"]) == (1000, 100)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (4000, pytest.approx(3000))


def test_the_first_rows_are_asked_as_the_run_asks_them(
    redis: Redis, context: MakeContext, tmp_path: Path
) -> None:
    columns = {"prompt": ["c", "a", None, "b"], "limit": [1, 2, 3, 4]}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    arguments = {"sampling": {"seed": 7, "n": 2}, "sampling_columns": {"max_tokens": "limit"}}
    asked: list[dict[Any, Any]] = [{}, {}]

    def noted(place: int) -> Answer:
        return lambda request: (
            asked[place].update({request.prompt: request.sampling}) or shout(request)
        )

    found = survey(context, tmp_path / "in.parquet", noted(0), first=2, **arguments)
    shown = [
        (each["row"], each["prompt"], each["completions"], each["tokens"])
        for each in found["shown"]
    ]
    assert shown[0] == (0, [{"role": "prompt", "content": "c"}], [("stop", "C"), ("stop", "C!")], 2)
    assert [row for row, *_ in shown] == [0, 1]
    unanswered = survey(context, tmp_path / "in.parquet", first=2, answers=False, **arguments)
    assert [each.keys() for each in unanswered["shown"]] == [{"row", "prompt", "prompt_tokens"}] * 2
    score_parquet(context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), **arguments)
    work_off(redis, context, answer=noted(1))
    assert asked[0] == {name: asked[1][name] for name in ("a", "c")}


def test_labels_are_shown_and_timed(context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "in.parquet")

    def scored(request: Request) -> FakeCompletion:
        found = [SimpleNamespace(logprob=-each) for each in (1.0, 2.0)]
        return FakeCompletion(loglikelihoods=found, num_prompt_tokens=1, finish_reason="stop")

    found = survey(context, tmp_path / "in.parquet", scored, labels=["yes", "no"], first=1)
    assert found["shown"][0]["label"] == "yes"
    assert dict(found["shown"][0]["probabilities"])["yes"] == pytest.approx(1 / (1 + math.exp(-1)))
    low = {"escalate_below": 0.5, "escalate_to": "large"}
    told = survey(context, tmp_path / "in.parquet", scored, labels=["yes", "no"], **low)
    assert (told["num_tried"], told["num_failed"], told["completion_tokens"]) == (2, 0, 0)
    assert told["seconds"] > 0
    assert dry_run_lines(told, None)[-1].startswith("again    2 rows, by the second model")


def test_several_prompts_of_a_row_are_counted_with_the_later_ones(
    redis: Redis, context: MakeContext, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"text": ["a", "bb", "bb", "broken"]}), tmp_path / "in.parquet")
    prompts = [
        {"name": "short", "template": "{text}!"},
        {"name": "long", "template": "{text} and {short}"},
    ]
    arguments = {"prompts": prompts, "sampling": {"temperature": 0}}
    found = survey(context, tmp_path / "in.parquet", **arguments)
    score_parquet(context(), str(tmp_path / "in.parquet"), str(tmp_path / "out"), **arguments)
    work_off(redis, context)
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    for name in ("prompt_tokens", "completion_tokens", "generated_tokens"):
        assert found[name] == pytest.approx(manifest[name]), name
    assert (found["requests"], found["rows_repeated"]) == (3, 1)
    with pytest.raises(InvalidJob, match="a dry run, which counts all of these"):
        survey(context, tmp_path / "in.parquet", first=1, **arguments)


def test_lines_of_a_batch_file_are_counted_each_with_its_own_values(
    context: MakeContext, tmp_path: Path
) -> None:
    def line(name: str, url: str, **body: Any) -> str:
        return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})

    chat = [{"role": "user", "content": "hi"}]
    lines = [
        line("a", "/v1/completions", prompt="abc", max_tokens=2),
        line("b", "/v1/completions", prompt=["ab", "cd"]),
        line("c", "/v1/chat/completions", messages=chat),
        line("d", "/v1/chat/completions", messages=[]),
        line("e", "/v1/embeddings", input="hello"),
        line("f", "/v1/completions", prompt="abc", model="gpt-4o"),
        line("g", "/v1/completions", prompt=[5, 6, 7]),
        "{",
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    asked: list[Request] = []

    def answer(request: Request) -> FakeCompletion:
        asked.append(request)
        num_tokens = 0 if request.kind == "embed" else 2
        return FakeCompletion("", 0, [1] * num_tokens, embedding=[0.5])

    found = survey(context, tmp_path / "in.jsonl", answer, input_format="openai-batch")
    assert (found["num_rows"], found["rows_failing"], found["requests"]) == (8, 3, 5)
    reasons = " ".join(reason["text"] for reason in found["reasons"])
    assert "gpt-4o" in reasons
    assert "non-empty list" in reasons
    prompts = [3, 4, len(json.dumps(chat)), 5, len(str([5, 6, 7]))]
    assert found["prompt_tokens"] == sum(prompts)
    assert found["completion_tokens"] == found["generated_tokens"] == 2 * 5
    timed = asked[len(asked) // 2 :]
    assert [request.kind for request in timed].count("embed") == 1
    (of_ids,) = [request.prompt for request in timed if isinstance(request.prompt, list)]
    assert len(of_ids) > 3, "a beginning of ids stands before them"
    assert {type(each) for each in of_ids} == {int}
    cheap = dry_run_lines({**found, "seconds": 0.9}, 2.0)
    assert cheap[-1] == "cost     0.000350 to 0.00120 at 2 an hour"


def test_embeddings_are_counted_and_timed(context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "bb", "bb"]}), tmp_path / "in.parquet")
    embedding = lambda request: FakeCompletion(  # noqa: E731
        embedding=[0.5], num_prompt_tokens=len(str(request.prompt))
    )
    found = survey(context, tmp_path / "in.parquet", embedding, task="embed")
    assert (found["requests"], found["num_failed"], found["prompt_tokens"]) == (2, 0, 5)
    assert found["seconds"] > 0
    assert [line.split()[0] for line in dry_run_lines(found, 2.0)] == [
        "rows",
        "asked",
        "prompts",
        "time",
        "cost",
    ]


def test_a_dry_run_without_an_answer_tells_no_time_or_cost(
    context: MakeContext, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "in.parquet")
    found = survey(context, tmp_path / "in.parquet", lambda request: refuse("no"))
    lines = dry_run_lines(found, 2.0)
    assert lines[-1].startswith("but      all 2 rows that were tried failed, so the run's time")
    assert lines[-1].endswith("are not known: no"), "the commonest reason"
    assert not any(line.startswith(("time", "cost", "answers")) for line in lines)


def test_pictures_are_counted_as_their_prompts_have_them(
    context: MakeContext, tmp_path: Path
) -> None:
    files = [picture(RED), picture(BLUE), picture(RED)]
    pq.write_table(pa.table({"prompt": ["a", "b", "a"], "image": files}), tmp_path / "in.parquet")
    with_pictures = lambda: replace(context(), picture_reader=picture_reader)  # noqa: E731
    asked: list[Request] = []

    def answer(request: Request) -> FakeCompletion:
        asked.append(request)
        return FakeCompletion("x", 0, [1])

    options = {"image_column": "image", "sampling": {"temperature": 0}}
    found = survey(with_pictures, tmp_path / "in.parquet", answer, **options)
    assert (found["requests"], found["rows_repeated"], found["num_failed"]) == (2, 1, 0)
    assert len(asked) == 4
    pictures = [part for request in asked[2:] for part in request.prompt or () if "image" in part]
    assert {"type": "image", "image": files[0]} in pictures


def test_time_and_cost_are_ranges(context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "in.parquet")
    found = {**survey(context, tmp_path / "in.parquet"), "seconds": 3600}
    low, high = LIKELY_MULTIPLES
    lines = dry_run_lines(found, 10.0)
    assert lines[-2].startswith(
        f"time     {duration_text(3600 * low)} to {duration_text(3600 * high)} on"
    )
    assert lines[-1] == f"cost     {10 * low:,.2f} to {10 * high:,.2f} at 10 an hour"


def test_what_a_planning_refuses_a_survey_refuses(context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x", "y"]}), tmp_path / "in.parquet")
    with pytest.raises(MissingColumn):
        survey(context, tmp_path / "in.parquet")
    with pytest.raises(InvalidJob, match="'colum' is no argument"):
        survey(context, tmp_path / "in.parquet", colum="a")
    with pytest.raises(InvalidJob, match="no engine"):
        survey(lambda: replace(context(), meter=None), tmp_path / "in.parquet", prompt_column="a")


@pytest.mark.parametrize("prompt", [{}, {"template": [{"role": "user", "content": "{prompt}"}]}])
def test_each_dry_run_times_prompts_that_no_other_has_brought_into_the_cache(
    context: MakeContext, tmp_path: Path, prompt: dict[str, Any]
) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    asked: list[str] = []

    def noted(request: Request) -> FakeCompletion:
        asked.append(
            request.prompt if isinstance(request.prompt, str) else request.messages[0]["content"]
        )
        return FakeCompletion("", 0, [1])

    for _ in range(3):
        told = survey(
            context, tmp_path / "in.parquet", noted, sampling={"temperature": 0}, **prompt
        )
    assert (told["num_tried"], told["num_failed"], told["completion_tokens"]) == (20, 0, 20)
    begun = [each.partition("prompt") for each in asked if each not in prompts]
    assert len(begun) == len({beginning for beginning, _, _ in begun}) * 20 == 60
    assert {f"prompt{rest}" for _, _, rest in begun} == set(prompts)
