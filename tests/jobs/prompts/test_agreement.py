"""Samples are drawn until they agree: in jobs, runs and lines, the same whatever a worker did before."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.context import JobContext
from jobs.context.checks import Checks
from jobs.errors import InvalidJob
from jobs.items.records import PlainCompletion
from jobs.items.under_way import ItemUnderWay
from jobs.prompts.ways.agreed import ROUND, Agreement
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, feed, opened_task, score_parquet
from tests.jobs.local_runs import Runs

DRAWN = {"temperature": 0.7, "seed": 5}


def agreed(texts: list[str], way: Agreement, checks: Checks) -> tuple[Any, int]:
    """Return what samples with these texts come to, and how many were drawn."""
    under_way = ItemUnderWay(way.item(Request("?", None, DRAWN)), checks)
    under_way.begin([])
    num_drawn = 0
    while not under_way.is_done:
        (request,) = under_way.take_requests()
        n = request.sampling["n"]
        samples = [
            PlainCompletion(index=index, text=text, token_ids=[1, 2], num_prompt_tokens=7)
            for index, text in enumerate(texts[num_drawn : num_drawn + n])
        ]
        num_drawn += n
        under_way.receive(under_way.num_steps, 0, samples)
    return under_way.answer, num_drawn


@pytest.mark.parametrize(
    ("texts", "agree", "drawn", "winner", "votes"),
    [
        ("aaaa", 0.7, 4, "a", 1.0),
        ("aaab", 0.7, 4, "a", 0.75),
        ("aab" + "b" * 13, 1, 4, "a", 0.5),
        ("aaaaaaaabbbbbbbb", 0.55, 4, "a", 1.0),
        ("abab" + "aaaa", 0.7, 8, "a", 0.75),
        (
            "abcd" + "efgh" + "ijkl",
            0.9,
            4,
            "a",
            0.25,
        ),  # twelve more of one answer are 13 of 16 at most
        ("abab" + "abab" + "abab" + "abab", 0.51, 16, "a", 0.5),
    ],
)
def test_rounds_end_once_samples_agree_or_cannot(
    checking: JobContext, texts: str, agree: float, drawn: int, winner: str, votes: float
) -> None:
    answer, num_drawn = agreed(list(texts.ljust(16, "x")), Agreement(agree), checking.checks)
    assert (num_drawn, answer.first.text) == (drawn, winner)
    assert answer.extras == {"votes": votes, "samples": drawn}
    assert list(answer.num_generated) == [2 * drawn]
    assert answer.first.num_prompt_tokens == 7 * (drawn // ROUND)


@pytest.mark.parametrize(
    ("agree_on", "texts", "winner"),
    [
        (
            "json",
            ['{"a": 1, "b": 2}', '{"b": 2, "a": 1}', "no", '{"b":2,"a":1}'],
            '{"a": 1, "b": 2}',
        ),
        (
            "/a/0",
            ['{"a": [1], "x": 1}', '{"a": [1], "x": 2}', '{"a": [1]}', '{"a": [2]}'],
            '{"a": [1], "x": 1}',
        ),
        (
            r"answer is (\d+)",
            ["so the answer is 7", "the answer is 7!", "7", "answer is 7"],
            "so the answer is 7",
        ),
        ("json", ["[1, 2.5]", "[1.0, 2.50]", "[1e0,2.5]", "[true, 2.5]"], "[1, 2.5]"),
        ("/-1", ["[7]", '{"-1": 3}', '{"-1": 3.0}', '{"-1": 3, "a": 1}'], '{"-1": 3}'),
        ("/a~1b/~0", ['{"a/b": {"~": 1}}'] * 3 + ['"text"'], '{"a/b": {"~": 1}}'),
        (
            "/a",
            [
                '{"a": {"x": 1, "y": 2}}',
                '{"a": {"y": 2, "x": 1}}',
                '{"a": {}}',
                '{"a":{"x":1,"y":2}}',
            ],
            '{"a": {"x": 1, "y": 2}}',
        ),
        ("(a)?b", ["b", "ab", "xab", "xxab"], "ab"),
        ("[a-z]+", ["1 one", "2 one", "3 one", "two"], "1 one"),
    ],
)
def test_parts_of_texts_are_compared(
    checking: JobContext, agree_on: str, texts: list[str], winner: str
) -> None:
    answer, _ = agreed(
        [*texts, *texts, *texts, *texts], Agreement(0.7, agree_on=agree_on), checking.checks
    )
    assert answer.first.text == winner
    assert answer.extras["votes"] == 0.75


@given(
    texts=st.lists(st.sampled_from("abc"), min_size=32, max_size=32),
    agree=st.floats(0.05, 1),
    most=st.integers(1, 32),
)
def test_an_early_end_is_one_that_more_samples_could_not_change(
    texts: list[str], agree: float, most: int
) -> None:
    answer, drawn = agreed(texts, Agreement(agree, max_samples=most), Checks())
    count = texts[:drawn].count(answer.first.text)
    assert drawn <= most
    assert count == max(texts[:drawn].count(text) for text in "abc")
    assert answer.extras["votes"] == count / drawn
    if drawn < most and count / drawn < agree:
        assert (count + most - drawn) / most < agree


def test_a_round_that_fails_leaves_the_samples_before(checking: JobContext) -> None:
    under_way = ItemUnderWay(Agreement(0.9).item(Request("?", None, DRAWN)), checking.checks)
    under_way.begin([])
    samples = [
        PlainCompletion(index=number, text=text, token_ids=[1], num_prompt_tokens=7)
        for number, text in enumerate("aaab")
    ]
    under_way.receive(1, 0, samples)
    under_way.receive(2, 0, [PlainCompletion(finish_reason="error", error="no room")])
    answer = under_way.answer
    assert answer is not None
    assert (answer.first.text, answer.first.error) == ("a", None)
    assert answer.extras == {"votes": 0.75, "samples": 4}
    assert answer.first.num_prompt_tokens == 7


def noisy(request: Request) -> FakeCompletion:
    """Answer with a digit that follows from the seed."""
    text = str(request.sampling["seed"] % 3)
    return FakeCompletion(text, 0, [1], "stop", len(str(request.prompt)))


def test_a_job_has_votes_and_samples_beside_the_answer(checking: JobContext) -> None:
    task = opened_task(checking, "jobs.complete", ["?"], {"agree": 0.7, "max_samples": 8, **DRAWN})
    asked = feed(task, noisy)
    (choice,) = task.result()["choices"]
    assert (choice["text"], choice["samples"]) == ("2", 4 * len(asked))
    assert 0 < choice["votes"] <= 1
    assert task.result()["usage"]["completion_tokens"] == choice["samples"]


def test_a_run_has_columns_and_goes_on_where_it_was(runs: Runs, tmp_path: Path) -> None:
    options = {"agree": 0.9, "max_samples": 12, "sampling": DRAWN, "prompt_column": "prompt"}
    runs.write([f"prompt {number}" for number in range(6)])
    runs.score(answer=noisy, **options)
    rows = pq.read_table(runs.output).to_pylist()
    assert {"votes", "samples"} <= rows[0].keys()
    assert {row["samples"] for row in rows} <= {4, 8, 12}
    assert runs.manifest["rows"] == 6
    other = tmp_path / "other"
    runs.score(output=other, answer=pytest.fail, reuse=[str(runs.output)], **options)
    assert pq.read_table(other).to_pylist() == rows


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"agree": 0.7, "temperature": 0}, "temperature"),
        ({"agree": 0.7, "n": 2}, "n"),
        ({"agree": 1.5}, "agree is 1.5, expected a number above 0"),
        ({"agree": 0}, "agree is 0, expected a number above 0"),
        ({"agree": float("nan")}, "agree is nan, expected a number above 0"),
        ({"agree": 0.7, "max_samples": 129}, "max_samples is 129"),
        ({"agree": 0.7, "agree_on": ""}, "agree_on"),
        ({"max_samples": 4}, "max_samples is for agree"),
        ({"agree": 0.7, "check": {"regex": "a"}}, "check"),
    ],
)
@pytest.mark.parametrize("asks", ["job", "run"])
def test_what_does_not_go_with_it_is_refused(
    checking: JobContext, runs: Runs, asks: str, options: dict[str, Any], says: str
) -> None:
    def job() -> None:
        opened_task(checking, "jobs.complete", ["?"], options)

    def run() -> None:
        sampling = {name: options[name] for name in ("temperature", "n") if name in options}
        others = {name: value for name, value in options.items() if name not in sampling}
        runs.write(["a"])
        runs.plan(sampling=sampling, prompt_column="prompt", **others)

    calls: dict[str, Callable[[], None]] = {"job": job, "run": run}
    with pytest.raises(InvalidJob, match=says):
        calls[asks]()


def test_a_slow_pattern_finds_nothing(context: JobContext) -> None:
    checks = Checks(limit_s=0.2)
    try:
        answer, drawn = agreed(["a" * 40 + "!"] * 16, Agreement(0.7, agree_on="(a+)+$"), checks)
    finally:
        checks.close()
    assert answer.extras["votes"] == 0
    assert drawn == 8, "8 of 16 are 0.5 at most"


def test_a_sample_that_fails_is_not_counted(checking: JobContext) -> None:
    under_way = ItemUnderWay(Agreement(0.9).item(Request("?", None, DRAWN)), checking.checks)
    under_way.begin([])
    failed = PlainCompletion(finish_reason="error", error="no finite logits")
    alike = [PlainCompletion(index=number, text="a", token_ids=[1]) for number in range(1, 4)]
    under_way.receive(1, 0, [failed, *alike])
    assert under_way.answer is not None
    assert under_way.answer.extras == {"votes": 1.0, "samples": 3}
    assert under_way.answer.first.error is None


def test_a_run_with_a_pattern_that_is_none_is_not_planned(runs: Runs, checking: JobContext) -> None:
    runs.write(["a"])
    with pytest.raises(InvalidJob, match="agree_on is no pattern"):
        score_parquet(
            checking, str(runs.source), str(runs.output), agree=0.7, agree_on="(", sampling=DRAWN
        )


def test_a_pattern_that_is_none_fails_the_job_by_name(checking: JobContext) -> None:
    task = opened_task(checking, "jobs.complete", ["?"], {"agree": 0.7, "agree_on": "(", **DRAWN})
    with pytest.raises(InvalidJob, match="agree_on is no pattern"):
        feed(task, noisy)


def test_a_line_of_a_batch_file_may_ask_for_it(runs: Runs, tmp_path: Path) -> None:
    body = {"prompt": "?", "agree": 0.9, "temperature": 0.5}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    runs.plan(tmp_path / "in.jsonl", input_format="openai-batch")
    runs.work(noisy)
    (answered,) = (runs.output / "output.jsonl").read_text().splitlines()
    (choice,) = json.loads(answered)["response"]["body"]["choices"]
    assert (choice["votes"], choice["samples"]) == (0.25, 4), (
        "each sample is another text, and 13 of 16 cannot agree"
    )
