"""An item that was interrupted goes on by replay, at every cut, whatever is asked."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.context import JobContext
from jobs.context.checks import TOOL, Checks, RepairOptions
from jobs.errors import InvalidJob
from jobs.items.item import Check, Item, side_by_side
from jobs.items.records import PlainCompletion, Progress, Reply
from jobs.items.under_way import ItemUnderWay
from jobs.parquet.asks.chain import Chain
from jobs.parquet.asks.generate import Generate
from jobs.parquet.asks.scores import Scores
from jobs.parquet.prompts.prompt_source import Row
from jobs.prompts.generated import generated
from jobs.prompts.prompt_jobs import complete_task
from jobs.prompts.scoring.labels import Labels
from jobs.prompts.ways.agreed import Agreement
from jobs.prompts.ways.tool_use import ToolUse
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request

DRAWN = {"temperature": 1.0, "seed": 3}


class Likelihood:
    logprob = -1.0
    num_tokens = 1
    is_greedy = False


def answered(request: Request) -> list[PlainCompletion]:
    """Answer as the request says alone: "ok" where it has been asked twice, else its length."""
    if request.kind == "score":
        return [PlainCompletion(num_prompt_tokens=3, loglikelihoods=[Likelihood(), Likelihood()])]
    text = str(request.prompt or request.messages)
    is_second = "not valid" in text or request.continued
    token_ids = [*request.continued, *range(len(text) % 5 + 1)]
    if request.chat_options.get("tools") and len(request.messages or ()) < 5:
        calls = [{"name": "add", "arguments": "{}"}]
        return [PlainCompletion(token_ids=token_ids, tool_calls=calls, num_prompt_tokens=9)]
    completion = PlainCompletion(
        token_ids=token_ids,
        text="ok" if is_second else f"{len(text)} {request.sampling.get('seed')}",
        finish_reason="stop" if is_second else "length",
        num_prompt_tokens=len(text),
    )
    return [
        PlainCompletion.of(completion, index=index) for index in range(request.sampling.get("n", 1))
    ]


def run(item: Item[Any]) -> tuple[Any, list[Any], list[Reply]]:
    """Drive an item; return its answer, its steps, and what it was given for each."""
    steps: list[Any] = []
    replies: list[Reply] = []
    reply: Any = None
    while True:
        try:
            step = item.send(reply)
        except StopIteration as end:
            return end.value, steps, replies
        if isinstance(step, Check):
            steps.append(step)
            reply = None if step.text == "ok" else "it is not ok"
            if TOOL in (step.options.check or {}):
                reply = json.dumps({"result": "5"})
        else:
            steps.append(list(step))
            reply = [answered(request) for request in step]
        replies.append(reply)


def tried(**options: Any) -> Callable[[], Item[Any]]:
    repairs = RepairOptions(check={"regex": "ok"}, **options)
    return lambda: generated(Request("a prompt", None, DRAWN), repairs, {"prompt": "a prompt"})


def of_run(**options: Any) -> Callable[[], Item[Any]]:
    spec = RunSpec.from_arguments("in", "out", **{"sampling": DRAWN, **options})
    ask: Any
    if spec.steps:
        ask = Chain(spec, 0)
    elif spec.labels is not None:
        ask = Scores(Labels.of(spec.labels))
    else:
        ask = Generate(spec, 0, *spec.chat, spec.is_chat)
    return lambda: ask.begin(Row("a prompt", values=json.dumps({"prompt": "a prompt", "id": 7})), 5)


def of_line() -> Item[Any]:
    task: Any = complete_task(["one", "two", "three"], check={"regex": "ok"}, seed=4)
    return side_by_side([task.item(prompt) for prompt in task.prompts])


KINDS: dict[str, Callable[[], Item[Any]]] = {
    "once": lambda: generated(Request("a", None, {**DRAWN, "n": 3}), RepairOptions()),
    "checked": tried(),
    "checked and cut": tried(continue_on_length=True, max_attempts=4),
    "row": of_run(),
    "checked row": of_run(check={"regex": "ok"}),
    "chain": of_run(
        prompts=[
            {"name": "first", "template": "{prompt}"},
            {"name": "second", "template": "{first} {id}"},
        ]
    ),
    "labels": of_run(labels=["a", "b"], sampling={}),
    "line": of_line,
    "agreement": lambda: Agreement(0.9).item(Request("a prompt", None, DRAWN)),
    "agreement on a part": of_run(agree=0.9, max_samples=10, agree_on="json"),
    "tools": lambda: ToolUse(["tools.add"]).item(
        Request(None, [{"role": "user", "content": "?"}], DRAWN, {"tools": ["add"]})
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_replay_of_every_prefix_leads_to_the_same_step_and_answer(name: str) -> None:
    make = KINDS[name]
    answer, steps, replies = run(make())
    assert steps
    for cut in range(len(replies) + 1):
        if cut < len(steps) and isinstance(steps[cut], Check):
            continue  # a check is made where its answer arrives, and no journal ends before one
        progress = Progress(replies[:cut])
        if progress.can_be_written:
            progress = Progress.from_json(json.loads(json.dumps(progress.to_json())))
        under_way = ItemUnderWay(make(), Checks())
        under_way.begin(list(progress.replies))
        if cut < len(steps):
            assert under_way.take_requests() == steps[cut]
        else:
            assert under_way.is_done
            assert under_way.answer == answer


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_items_side_by_side_get_their_own_replies(counts: list[int]) -> None:
    def steps(name: int, num_steps: int) -> Item[list[str]]:
        texts = []
        for number in range(num_steps):
            requests = [
                Request(f"{name} {number} {place}", None, {}) for place in range(number + 1)
            ]
            replies = yield requests
            texts += [samples[0].text for samples in replies]
        return texts

    item = side_by_side([steps(name, count) for name, count in enumerate(counts)])
    reply: Any = None
    rounds = 0
    while True:
        try:
            step = item.send(reply)
        except StopIteration as end:
            answers = end.value
            break
        assert isinstance(step, list)
        rounds += 1
        reply = [[PlainCompletion(text=str(request.prompt))] for request in step]
    assert rounds == max(counts)
    assert answers == [
        [f"{name} {number} {place}" for number in range(count) for place in range(number + 1)]
        for name, count in enumerate(counts)
    ]


def test_a_check_that_can_check_nothing_fails_the_item_at_its_own_place(
    checking: JobContext,
) -> None:
    def item() -> Item[str]:
        yield [Request("a", None, {})]
        try:
            yield Check(RepairOptions({"regex": "("}), "a")
        except InvalidJob as error:
            return str(error)
        return "no error"

    under_way = ItemUnderWay(item(), checking.checks)
    under_way.begin([])
    under_way.take_requests()
    under_way.receive(1, 0, [PlainCompletion(text="a")])
    assert "no pattern" in str(under_way.answer)
