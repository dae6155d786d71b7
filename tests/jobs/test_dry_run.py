"""What a dry run says of a run, compared with what the run then takes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from jobs.context import JobContext
from jobs.context.prompt_meter import PromptMeter
from jobs.errors import InvalidJob, MissingColumn
from jobs.parquet.survey import Asked, pick_requests
from jobs.runs.watching.dry_run import NUM_TRIED, Estimate, estimate
from jobs.runs.watching.trials import Trial, Tried
from jobs.table import own_function
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, queued_jobs, run_task, score_parquet, work_off

MakeContext = Callable[[], JobContext]
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


def answering(
    context: MakeContext, answer: Callable[[Request], FakeCompletion]
) -> Callable[..., list[Tried]]:
    def run(trials: Sequence[Trial]) -> list[Tried]:
        values = [run_task(context(), each.function, answer=answer, **each.kwargs) for each in trials]
        return [Tried(value, None, 0.0, 1.0) for value in values]

    return run


def skewed_prompts(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Few long texts hold most of the tokens, and have most of the answers'."""
    lengths = [min(4000, int(rng.lognormvariate(3, 1.2)) + 1) for _ in range(3000)]
    return {"prompt": [f"{number} " + "x" * length for number, length in enumerate(lengths)]}, {}


def skewed_repeats(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A handful of texts are most of the rows."""
    texts = [f"{number} " + "y" * rng.randint(1, 500) for number in range(600)]
    rows = [texts[min(599, int(rng.paretovariate(0.7)) - 1)] for _ in range(3000)]
    return {"prompt": rows}, {"sampling": {"temperature": 0}}


def skewed_limits(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """One row in a hundred may write a hundred times as much."""
    limits = [1000 if rng.random() < 0.01 else rng.randint(1, 20) for _ in range(3000)]
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
    assert (
        found["reasons"][0]
        == {
            "rows": 2,
            "row": 8,
            "reason": "the prompt has 6000 tokens; this engine takes at most 5000",
        }
        or found["reasons"][0]["row"] == 9
    )
    assert (found["rows_repeated"], found["requests"]) == (1, 6)
    assert (found["prompt_tokens"], found["request_tokens"]) == (5 * 43 + 2, 5 * 43 + 1)
    assert found["cached_tokens"] == 4 * 32, "two blocks of 16 of each prompt but the first"
    drawn = survey(context, tmp_path / "in.parquet")
    assert (drawn["rows_repeated"], drawn["requests"]) == (1, 7), "drawn anew, they are not one request"


def test_repeats_in_other_shards_are_repeats_too(context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"] * 5}), tmp_path / "in.parquet")
    found = survey(context, tmp_path / "in.parquet", sampling={"temperature": 0}, rows_per_shard=3)
    assert (found["rows_repeated"], found["requests"], found["prompt_tokens"]) == (8, 2, 10)
    assert [each["rows"] for each in found["picked"]] == [5, 5]


def test_truncated_prompts_are_counted_as_they_are_read(context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["abcdef", "gh"], "most": [3, None]}), tmp_path / "in.parquet")
    columns = {"truncate_prompt_tokens": "most"}
    found = survey(context, tmp_path / "in.parquet", sampling_columns=columns)
    assert [each["prompt_tokens"] for each in found["picked"]] == [2, 3]
    assert (
        survey(context, tmp_path / "in.parquet", sampling={"truncate_prompt_tokens": 1})["prompt_tokens"] == 2
    )


def test_a_share_of_a_large_run_is_scaled(context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": [f"{number:04}" for number in range(1000)]}), tmp_path / "in.parquet")
    found = survey(context, tmp_path / "in.parquet", max_rows=100)
    assert (found["rows"], found["rows_read"]) == (1000, 100)
    told = estimate(found, answering(context, lambda request: FakeCompletion("", 0, [1, 2, 3])))
    assert (told.prompt_tokens, told.completion_tokens) == (4000, pytest.approx(3000))


def test_the_first_rows_are_asked_with_the_runs_own_seeds(
    redis: Redis, context: MakeContext, tmp_path: Path
) -> None:
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


def test_chats_are_surveyed_as_chats(context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x", "y"]}), tmp_path / "in.parquet")
    template = [{"role": "user", "content": "hi {a}"}]
    found = survey(context, tmp_path / "in.parquet", template=template, pick=5, first=True)
    assert [each["prompt"][0]["content"] for each in found["picked"]] == ["hi x", "hi y"]
    assert all(each["is_chat"] for each in found["picked"])
    told = estimate(found, answering(context, lambda request: FakeCompletion("", 0, [1])))
    assert (told.num_tried, told.num_failed, told.completion_tokens) == (2, 0, 2)


def test_what_a_planning_refuses_a_survey_refuses(context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x", "y"]}), tmp_path / "in.parquet")
    with pytest.raises(MissingColumn):
        survey(context, tmp_path / "in.parquet")
    with pytest.raises(InvalidJob, match="'colum' is no argument"):
        survey(context, tmp_path / "in.parquet", colum="a")
    with pytest.raises(InvalidJob, match="no engine"):
        survey(lambda: replace(context(), meter=None), tmp_path / "in.parquet", prompt_column="a")


def test_a_run_of_no_rows_takes_nothing(context: MakeContext, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "in.parquet")
    found = survey(context, tmp_path / "in.parquet")
    told = estimate(found, answering(context, written))
    assert isinstance(told, Estimate)
    assert (told.prompt_tokens, told.completion_tokens, told.seconds, told.num_tried) == (0, 0, 0, 0)


@pytest.mark.parametrize("make", [skewed_prompts, skewed_repeats, skewed_limits])
@pytest.mark.parametrize("num_blocks", [600, 10_000])
def test_time_is_estimated_within_30_percent_of_a_simulated_run(
    context: MakeContext, tmp_path: Path, make: Callable[..., Any], num_blocks: int
) -> None:
    columns, arguments = make(random.Random(3))
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    found = survey(context, tmp_path / "in.parquet", **arguments) | {"num_blocks": num_blocks}
    worker = SimulatedWorker(num_blocks)
    told = estimate(found, worker.answer)
    asked = {}
    for number, prompt in enumerate(columns["prompt"]):
        greedy = arguments.get("sampling", {}).get("temperature") == 0
        limits = {"max_tokens": columns["limit"][number]} if "limit" in columns else {}
        asked[prompt if greedy else number] = {"prompt": prompt, **arguments.get("sampling", {}), **limits}
    ran = SimulatedWorker(num_blocks, is_cold=False)
    ran.answer([Trial("jobs.complete", each) for each in asked.values()])
    assert abs(told.seconds - ran.clock) <= 0.3 * ran.clock


class SimulatedWorker:
    """Steps a batch by a clock of its own: 1 ms for a token of a prompt, 2 in its first step, 10 for a step
    that decodes and 2 more for each row in it. The cache knows whole prompts."""

    def __init__(self, num_blocks: int, is_cold: bool = True) -> None:
        self.clock, self.seen = 0.0, set[str]()
        self.num_blocks, self.is_cold = num_blocks, is_cold

    def answer(self, trials: Sequence[Trial]) -> list[Tried]:
        waiting = [number for number, each in enumerate(trials) for _ in range(each.kwargs.get("n", 1))]
        running: list[tuple[int, int]] = []  # request, tokens that are left to it
        begins, ends, usages = {}, {}, {}
        while waiting or running:
            began_at, new = self.clock, []
            free = self.num_blocks - sum(self.blocks(trials[number]) for number, _ in running)
            while waiting and len(running) + len(new) < 256:
                need = self.blocks(trials[waiting[0]])
                if need > free and (running or new):
                    break
                free -= need
                new.append(waiting.pop(0))
            self.clock += (0.01 + 0.002 * len(running)) * bool(running)
            for number in new:
                prompt = str(trials[number].kwargs["prompt"])
                computed = 1 if prompt in self.seen else len(prompt)
                self.seen.add(prompt)
                self.clock += computed * (0.002 if self.is_cold else 0.001)
                begins.setdefault(number, began_at)
                usages.setdefault(number, (len(prompt), len(prompt) - computed))
                running.append((number, self.tokens(trials[number])))
            self.is_cold = False
            running = [(number, left - 1) for number, left in running]
            ends.update((number, self.clock) for number, left in running if left <= 0)
            running = [(number, left) for number, left in running if left > 0]
        return [
            Tried(usage_of(*usages[n], self.tokens(each) * each.kwargs.get("n", 1)), None, begins[n], ends[n])
            for n, each in enumerate(trials)
        ]

    def tokens(self, trial: Trial) -> int:
        values = trial.kwargs
        return min(values.get("max_tokens", 10**9), 20 + len(values["prompt"]) % 50) or 1

    def blocks(self, trial: Trial) -> int:
        return 1 + (len(trial.kwargs["prompt"]) + self.tokens(trial)) // BLOCK


def usage_of(prompt: int, cached: int, answer: int) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": answer, "prompt_tokens_details": details}}


sizes = st.lists(
    st.builds(
        Asked,
        st.just(0),
        st.integers(0, 10_000),
        st.sampled_from([0, 1, 500]),
        st.integers(1, 5000),
        st.just(True),
    ),
    max_size=300,
)


@given(sizes, st.integers(1, 80))
def test_picks_stand_for_all_requests_and_none_is_picked_twice(requests: list[Asked], count: int) -> None:
    picks = pick_requests(requests, count)
    assert len({id(each) for each, _ in picks}) == len(picks) <= count
    if len(requests) <= count:
        assert [weight for _, weight in picks] == [1.0] * len(requests)
    else:
        equal = pick_requests([requests[0]] * 1000, count)
        assert sum(weight for _, weight in equal) == pytest.approx(1000)


def test_each_dry_run_asks_prompts_that_no_other_has_brought_into_the_cache(
    context: MakeContext, tmp_path: Path
) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    found = survey(context, tmp_path / "in.parquet", sampling={"temperature": 0, "max_tokens": 2})
    answer, asked = answering(context, written), list[set[str]]()
    for _ in range(3):
        seen: set[str] = set()

        def noted(trials: Any, seen: set[str] = seen) -> Any:
            seen.update(trial.kwargs["prompt"] for trial in trials)
            return answer(trials)

        estimate(found, noted)
        asked.append(seen.difference(prompts))
    heads = [{prompt.partition("prompt")[0] for prompt in each} for each in asked]
    assert len(set.union(*heads)) == 6, "two tries each"
    assert {prompt.partition(" ")[2] for prompt in asked[2]} == set(prompts)
