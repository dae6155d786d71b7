"""A job of prompts that is taken up goes on where it was: what was answered is not asked again."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis

from jobs.common.keys import journal_key
from jobs.common.rq_jobs import executions_key
from jobs.context import JobContext
from jobs.context.checks import Checks
from jobs.context.job_journal import MAX_BYTES, JobJournal, SentTokens
from jobs.items.records import PlainCompletion, Progress
from jobs.table import task_of
from jobs.tasks import OpenTask, Request
from tests.jobs.answering import FakeCompletion, feed, keep, opened_task, shout

Open = Callable[..., OpenTask]


@pytest.fixture
def opened(checking: JobContext, redis: Redis) -> Open:
    """Opens a job as its next execution does."""

    def task(*args: Any, whose: str = "it", name: str = "jobs.complete", **kwargs: Any) -> OpenTask:
        found = redis.get(journal_key(checking.job_id))
        journal = JobJournal(redis, checking.job_id, whose, found)
        return opened_task(replace(checking, journal=journal), name, args, kwargs)

    return task


def begin(task: OpenTask, answered: int, tokens: int = 3) -> list[Request]:
    """Answer the first requests; write down what is there, and so many tokens of the others."""
    requests = list(task.requests())
    for index, request in enumerate(requests[:answered]):
        samples = [
            replace(shout(request), index=each) for each in range(request.sampling.get("n", 1))
        ]
        if task.inspects:
            task.inspect(index, samples)
        task.deliver(index, samples)
    assert keep(task, {index: {0: [*range(tokens)]} for index in range(answered, len(requests))})
    return requests


@pytest.mark.parametrize("answered", range(4))
@pytest.mark.parametrize("n", [1, 2])
def test_answered_prompts_are_not_asked_and_others_go_on(
    opened: Open, answered: int, n: int
) -> None:
    prompts = ["a", "bb", "ccc"]
    asked = begin(opened(prompts, n=n, temperature=1), answered)
    task = opened(prompts, n=n, temperature=1)
    left = feed(task, lambda request: shout(replace(request)))
    assert [each.prompt for each in left] == [each.prompt for each in asked[answered:]]
    assert all(each.resumed == {0: [0, 1, 2]} for each in left)
    assert [each["text"] for each in task.result()["choices"]][::n] == ["A", "BB", "CCC"]


def test_what_waits_for_the_engine_still_is_kept_too(opened: Open, redis: Redis) -> None:
    begin(opened(["a", "b"]), 0)
    again = opened(["a", "b"])
    next(again.requests())
    assert keep(again, {0: {0: [*range(9)]}})
    assert [each.resumed for each in opened(["a", "b"]).requests()] == [
        {0: [*range(9)]},
        {0: [0, 1, 2]},
    ]


def test_attempts_go_on_and_no_answer_is_checked_twice(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask: dict[str, Any] = {"check": {"regex": "never"}, "max_attempts": 3}
    whole = feed(opened("a", **ask))
    first = opened("a", **ask)
    begin(first, 1)
    (second,) = first.requests()
    assert keep(first, {1: {0: [7, 8]}})
    checked = list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(Checks, "outcome", lambda self, options, row, text: checked.append(text))
        task = opened("a", **ask)
        assert checked == []
    left = feed(task)
    assert left[0] == replace(second, resumed={0: [7, 8]})
    assert [each.prompt for each in left] == [each.prompt for each in whole[1:]]
    assert task.result()["choices"][0]["attempts"] == 3


def test_an_answer_that_was_cut_goes_on_behind_all_that_it_has(opened: Open) -> None:
    first = opened("a", continue_on_length=True)
    list(first.requests())
    first.deliver(0, [FakeCompletion("ab", 0, [5, 6], "length")])
    (second,) = first.requests()
    assert keep(first, {1: {0: [5, 6, 7]}})
    assert list(opened("a", continue_on_length=True).requests()) == [
        replace(second, resumed={0: [7]})
    ]


def test_it_expires_and_has_at_most_its_bound(
    opened: Open, redis: Redis, checking: JobContext
) -> None:
    begin(opened([f"{number}" for number in range(100)]), 0, tokens=4000)
    key = journal_key(checking.job_id)
    assert 100_000 < redis.strlen(key) <= MAX_BYTES
    assert 0 < redis.ttl(key) <= 86_400
    resumed = [
        bool(each.resumed) for each in opened([f"{number}" for number in range(100)]).requests()
    ]
    assert 0 < sum(resumed) < 100


def test_what_is_of_another_job_is_left(opened: Open) -> None:
    asked = begin(opened("a"), 0)
    assert list(opened("a", whose="another's").requests()) == asked


def test_what_no_reader_can_take_apart_is_left(
    opened: Open, redis: Redis, checking: JobContext
) -> None:
    asked = begin(opened("a"), 0)
    redis.set(journal_key(checking.job_id), "it\n" + "[" * 100_000)
    assert list(opened("a").requests()) == [replace(each, resumed={}) for each in asked]


def test_an_execution_that_lost_the_job_writes_nothing(checking: JobContext, redis: Redis) -> None:
    journal = JobJournal(redis, checking.job_id, "it", None, "mine")
    task = opened_task(replace(checking, journal=journal), "jobs.complete", ["a"])
    begin(task, 0)
    assert not redis.exists(journal_key(checking.job_id))
    redis.zadd(executions_key(checking.job_id), {"mine": 1})
    assert keep(task, {0: {0: [1]}})
    assert redis.exists(journal_key(checking.job_id))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("jobs.classify", {"prompt": "a", "labels": ["x", "y"]}),
        ("jobs.embed", {"input": ["a", "b"]}),
    ],
)
def test_one_pass_is_made_again(opened: Open, name: str, arguments: dict[str, Any]) -> None:
    task = opened(name=name, **arguments)
    requests = list(task.requests())
    task.deliver(0, [FakeCompletion(embedding=[1.0], loglikelihoods=())])
    assert not keep(task, {index: {} for index in range(1, len(requests))})


def test_a_completion_that_was_written_reads_the_same() -> None:
    calls = [{"name": "add", "arguments": "{}"}]
    for tool_calls, error in ((calls, None), (None, "none"), (None, None)):
        completion = PlainCompletion(
            token_ids=[1],
            text="a",
            num_prompt_tokens=1,
            reasoning="why",
            tool_calls=tool_calls,
            tool_call_error=error,
        )
        progress = Progress(replies=["a reason", [[completion]], None], received={1: [completion]})
        written = json.loads(json.dumps(progress.to_json()))
        assert Progress.from_json(written) == progress


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"prompt": "the first answer"}, {"prompt": "another answer"}),
        ({"prompt": ["a", "b"]}, {"prompt": ["b", "a"]}),
        ({"prompt": "a"}, {"prompt": "a", "temperature": 0.5}),
    ],
)
def test_a_prompt_that_is_another_now_begins_anew(
    opened: Open, before: dict[str, Any], now: dict[str, Any]
) -> None:
    """The payload may be the same: a template over answers of other jobs makes another prompt of it."""
    begin(opened(**before), 0)
    assert all(each.resumed == {} for each in opened(**now).requests())
    begin(opened(**before), 0)
    assert all(each.resumed for each in opened(**before).requests())


def test_a_chat_begins_anew_once_its_template_writes_another_time(
    checking: JobContext, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = replace(checking, model=replace(checking.model, clock_formats=("%d %b %Y",)))
    chat = [{"role": "user", "content": "a"}]

    def resumed(moment: float, name: str, asked: Any) -> list[Any]:
        found = redis.get(journal_key(checking.job_id))
        task = task_of(name, (asked,))
        assert task is not None
        task = replace(task, clock=lambda: moment)  # type: ignore[type-var]
        opened = task.open(
            replace(context, journal=JobJournal(redis, checking.job_id, "it", found))
        )
        requests = list(opened.requests())
        assert keep(opened, {0: {0: [1, 2, 3]}})
        return [each.resumed for each in requests]

    day = 24 * 3600.0
    assert [resumed(moment, "jobs.chat", chat) for moment in (0.0, 0.0, day)] == [
        [{}],
        [{0: [1, 2, 3]}],
        [{}],
    ]
    redis.delete(journal_key(checking.job_id))
    expected = [[{}], [{0: [1, 2, 3]}], [{0: [1, 2, 3]}]]
    assert [resumed(moment, "jobs.complete", "a") for moment in (0.0, 0.0, day)] == expected, (
        "it writes no prompt"
    )


@pytest.mark.parametrize(
    ("journalled", "sent", "merged"),
    [
        ([], [(0, 0, [5, 6]), (0, 2, [7])], [5, 6, 7]),
        ([5, 6, 7, 8], [(0, 0, [5, 6]), (0, 2, [7])], [5, 6, 7, 8]),
        ([5, 6], [(0, 0, [5]), (0, 1, [6, 7, 8])], [5, 6, 7, 8]),
        ([5, 6, 7], [(0, 2, [7, 8])], [5, 6, 7, 8]),  # the first pieces have made room
        ([5, 6], [(0, 3, [8])], [5, 6]),  # nobody knows what stood before
        ([5, 1, 1, 1], [(0, 0, [5, 6]), (0, 2, [7])], [5, 6, 7]),  # of a worker that was frozen
        ([5], [(0, 0, [5, 6]), (0, 0, [5, 6, 7])], [5, 6, 7]),  # of two workers
    ],
)
def test_a_prompt_goes_on_behind_what_was_sent(
    journalled: list[int], sent: list[tuple[int, int, list[int]]], merged: list[int]
) -> None:
    journal = JobJournal(Redis(), "id", "it", None, sent=[SentTokens(*piece) for piece in sent])
    assert journal.with_sent({0: journalled} if journalled else {}) == {0: merged}


def test_samples_go_on_behind_what_was_sent_of_each(checking: JobContext, redis: Redis) -> None:
    sent = [SentTokens(0, 0, [1]), SentTokens(1, 0, [2, 3]), SentTokens(0, 1, [4])]
    journal = JobJournal(redis, checking.job_id, "it", None, sent=sent)
    context = replace(checking, journal=journal)
    (request,) = opened_task(context, "jobs.complete", ("a",), {"n": 2}).requests()
    assert request.resumed == {0: [1, 4], 1: [2, 3]}

    (checked,) = opened_task(
        context, "jobs.complete", ("a",), {"continue_on_length": True}
    ).requests()
    assert not checked.resumed
