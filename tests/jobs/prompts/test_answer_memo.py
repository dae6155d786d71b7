"""Greedy prompts that are the same are computed once for all the shards of a run on one worker."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.context.answers import ENTRY_BYTES, Answer, AnswerMemo
from jobs.items.runner import ItemRunner
from jobs.tasks import Request
from tests.examples import examples
from tests.jobs.answering import MODEL, FakeCompletion, refuse, shard_of, shout
from tests.jobs.local_runs import Runs

GREEDY = {"temperature": 0}


@pytest.fixture
def memo() -> AnswerMemo:
    return AnswerMemo()


def open_shard(
    memo: AnswerMemo, prompts: str, sampling: Mapping[str, object] = GREEDY
) -> ItemRunner[Answer]:
    return shard_of(prompts, sampling, memo=memo)


def pull(requests: Iterator[Request]) -> str:
    return "".join(str(request.prompt) for request in requests)


def work(shard: ItemRunner[Answer]) -> str:
    """Deliver all that a shard asks for; return the prompts it sent."""
    requests = list(shard.requests())
    for index, request in enumerate(requests):
        shard.deliver(index, [shout(request)])
    shard.close()
    return pull(iter(requests))


def completions(shard: ItemRunner[Answer]) -> str:
    return "".join(str(answer.completion) for answer in shard.answers())


def test_a_shard_takes_the_answers_of_earlier_ones_of_its_run(memo: AnswerMemo) -> None:
    first, second = open_shard(memo, "abab"), None
    assert (work(first), first.counts.generated_tokens) == ("ab", 2)
    second = open_shard(memo, "bcab")
    assert (second.num_requests, second.counts.done) == (1, 3), "known when it is opened"
    assert work(second) == "c"
    assert completions(second) == "BCAB"
    assert second.counts.generated_tokens == 1, "what was computed, not what was answered"
    assert [answer.completion_tokens for answer in second.answers()] == [1] * 4


@pytest.mark.parametrize(
    "other", [{"sampling": {**GREEDY, "top_k": 1}}, {"sampling": {"temperature": 1}}]
)
def test_nothing_is_shared_where_other_values_are_asked_or_tokens_are_drawn(
    memo: AnswerMemo, other: dict[str, object]
) -> None:
    work(open_shard(memo, "ab"))
    assert work(open_shard(memo, "ab", **other)) == "ab"  # type: ignore[arg-type]


def test_a_prompt_that_failed_is_asked_again(memo: AnswerMemo) -> None:
    first = open_shard(memo, "a")
    list(first.requests())
    first.deliver(0, [refuse("too long")])
    assert work(open_shard(memo, "a")) == "a"


def test_a_prompt_that_another_shard_is_at_comes_last_and_may_have_its_answer_then(
    memo: AnswerMemo,
) -> None:
    first, second = open_shard(memo, "ab"), open_shard(memo, "abc")
    firsts = list(first.requests())
    seconds = second.requests()
    assert next(seconds).prompt == "c"
    first.deliver(0, [shout(firsts[0])])
    assert next(seconds).prompt == "b", "still not answered: no shard waits for another"
    assert next(seconds, None) is None, "of the other prompt the answer has come"
    first.deliver(1, [shout(firsts[1])])
    second.deliver(0, [FakeCompletion("C")])
    second.deliver(1, [FakeCompletion("B")])
    assert completions(second) == "ABC"


def test_the_memo_keeps_what_was_used_last_within_its_bytes() -> None:
    def answer(text: str) -> Answer:
        return Answer(text, "stop", 1, 1, 0, None)

    memo = AnswerMemo(4 * ENTRY_BYTES)
    for key in (b"a", b"b", b"c"):
        memo.put(key, answer(key.decode()))
    assert memo.get(b"a") is not None
    memo.put(b"d", answer("d"))
    assert [memo.get(key) is not None for key in (b"a", b"b", b"c", b"d")] == [
        True,
        False,
        True,
        True,
    ]
    memo.put(b"e", answer("x" * 4 * ENTRY_BYTES))
    assert memo.num_bytes == 0, "an answer that does not fit is not kept"


@settings(max_examples=examples(40))
@given(
    st.lists(st.text("abcd", max_size=8), min_size=1, max_size=6), st.randoms(use_true_random=False)
)
def test_shards_that_are_open_together_end_with_every_rows_answer(
    shards: list[str], shuffle: object
) -> None:
    memo = AnswerMemo(8 * ENTRY_BYTES)
    opened = [open_shard(memo, prompts) for prompts in shards]
    streams = [shard.requests() for shard in opened]
    sent: list[list[Request]] = [[] for _ in shards]
    undelivered: list[tuple[int, int]] = []
    live = set(range(len(shards)))
    while live or undelivered:
        number = shuffle.choice(sorted(live) or [None])  # type: ignore[attr-defined]
        if number is not None and shuffle.random() < 0.6:  # type: ignore[attr-defined]
            request = next(streams[number], None)
            if request is None:
                live.discard(number)
            else:
                undelivered.append((number, len(sent[number])))
                sent[number].append(request)
        elif undelivered:
            number, index = undelivered.pop(shuffle.randrange(len(undelivered)))  # type: ignore[attr-defined]
            opened[number].deliver(index, [shout(sent[number][index])])
    assert [completions(shard) for shard in opened] == [prompts.upper() for prompts in shards]


@pytest.mark.parametrize(("formats", "asked_again"), [((), []), (("%f",), ["a", "b"])])
def test_runs_share_answers_unless_the_chat_template_writes_their_times(
    runs: Runs, memo: AnswerMemo, formats: tuple[str, ...], asked_again: list[str]
) -> None:
    make_context = runs.context
    model = replace(MODEL, clock_formats=formats)
    runs.context = lambda: replace(make_context(), model=model, answers=memo)
    asked: list[str] = []

    def answer(request: Request) -> FakeCompletion:
        asked.append(str(request.prompt))
        return shout(request)

    runs.write(["a", "b"])
    runs.score(answer=answer, sampling=GREEDY)
    assert sorted(asked) == ["a", "b"]
    asked.clear()
    runs.score(output=runs.output.with_name("other"), answer=answer, sampling=GREEDY)
    assert sorted(asked) == asked_again
