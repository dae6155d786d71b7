"""Several prompts of each row: in which order they are asked, and whose each answer is."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.context.answer_memo import ENTRY_BYTES, AnswerMemo
from jobs.parquet.chain import Chain, ChainSource
from jobs.parquet.row_values import RowProblem
from jobs.parquet.shard_requests import ShardRequests
from jobs.runs.plans.spec import RunSpec
from tests.jobs.answering import FakeCompletion, refuse
from tests.jobs.chains import GREEDY, TWO, brackets


@settings(max_examples=25)
@given(
    rows=st.lists(st.one_of(st.text("ab", max_size=3), st.none()), max_size=20),
    temperature=st.sampled_from([0, 0.7]),
    draw=st.randoms(use_true_random=False),
)
def test_answers_are_those_of_their_rows_whatever_order_they_arrive_in(
    rows: list[str | None], temperature: float, draw: Any
) -> None:
    prompts = [{"name": "x", "template": "{text}1"}, {"name": "y", "template": "{x}{text}2"}]
    prompts.append({"name": "z", "template": "{y}{x}"})
    spec = RunSpec.from_arguments("in", "out", prompts=prompts, sampling={"temperature": temperature})
    source = ChainSource(spec.steps, {})

    def text(row: str | None) -> str | RowProblem:
        try:
            return source.render({"text": row})
        except RowProblem as problem:
            return problem

    gone: list[str] = []
    shard = ShardRequests(
        [text(row) for row in rows],
        {},
        lambda row: row,
        False,
        let_go=gone.append,
        chain=Chain(spec.steps, {}),
    )
    pending, stream, num_asked = [], shard.requests(), 0
    while True:
        for _ in range(draw.randint(0, 3)):
            request = next(stream, None)
            if request is None and shard.has_more:
                stream = shard.requests()
                request = next(stream)
            if request is not None:
                pending.append((num_asked, request))
                num_asked += 1
        if pending:
            index, request = pending.pop(draw.randrange(len(pending)))
            shard.deliver(index, [FakeCompletion(f"<{request.prompt}>", token_ids=[1])])
        elif shard.rows_done == len(rows):
            break
    valid = [row for row in rows if row is not None]
    assert num_asked == 3 * len(set(valid) if temperature == 0 else valid) == shard.generated_tokens
    assert len(gone) == num_asked // 3
    for row, answer in zip(rows, shard.answers(), strict=True):
        x = f"<{row or ''}1>"
        y = f"<{x}{row or ''}2>"
        found = [answer.column(name) for name in "xyz"]
        assert found == ([x, y, f"<{y}{x}>"] if row is not None else [None] * 3), answer
        assert (answer.error is None) == (row is not None)


def test_a_rows_next_prompt_comes_before_other_rows() -> None:
    spec = RunSpec.from_arguments("in", "out", prompts=TWO, sampling=GREEDY)
    source = ChainSource(spec.steps, {})
    texts = [source.render({"text": text, "id": 0}) for text in "cab"]
    shard = ShardRequests(texts, {}, int, False, chain=Chain(spec.steps, {}))
    stream = shard.requests()
    first, second = next(stream), next(stream)
    assert shard.num_requests == 3
    shard.deliver(1, [brackets(second)])
    shard.deliver(0, [brackets(first)])
    assert shard.num_requests == 5
    assert [str(request.prompt)[:11] for request in stream] == ["b In short:", "a In short:", "c In short:"]
    assert not shard.has_more


def test_a_shard_takes_whole_rows_of_another_one_of_its_run() -> None:
    spec = RunSpec.from_arguments("in", "out", prompts=TWO, sampling=GREEDY)
    source, memo = ChainSource(spec.steps, {}), AnswerMemo()
    text = source.render({"text": "a", "id": 1})
    chain = Chain(spec.steps, {})
    first, second = (ShardRequests([text], {}, int, False, "run", memo, chain=chain) for _ in "ab")
    (one,) = first.requests()
    waiting = second.requests()
    first.deliver(0, [brackets(one)])
    (two,) = first.requests()
    first.deliver(1, [brackets(two)])
    assert next(waiting, None) is None
    assert second.answers() == first.answers()
    assert memo.num_bytes > ENTRY_BYTES + sum(len(brackets(each).text) for each in (one, two))
    third = ShardRequests([source.render({"text": "b", "id": 1})], {}, int, False, "run", memo, chain=chain)
    assert len(list(third.requests())) == 1
    before = memo.num_bytes
    third.deliver(0, [refuse("no")])
    assert third.answers()[0].error == "prompt 'short': no"
    assert memo.num_bytes == before, "another shard tries it again"
