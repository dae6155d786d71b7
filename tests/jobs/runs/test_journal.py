"""What an execution of a shard has computed is not computed again by the one after it, whatever is asked of rows."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest

from jobs.context.checks import Checks
from jobs.runs.plans.names import JOURNAL, keys_name
from jobs.tasks import Completion, Request
from tests.jobs.answering import MODEL, FakeCompletion, keep, opened_task, shout
from tests.jobs.conftest import MakeContext
from tests.jobs.local_runs import Runs

DRAWN = {"temperature": 1.0, "max_tokens": 9, "seed": 5}
CHAIN = [{"name": "first", "template": "{prompt}"}, {"name": "second", "template": "{first} {id}"}]
ASKS: dict[str, dict[str, Any]] = {
    "samples": {"sampling": {**DRAWN, "n": 2}, "prompt_column": "prompt"},
    "greedy": {"sampling": {"temperature": 0}, "prompt_column": "prompt"},
    "chain": {"prompts": CHAIN, "sampling": DRAWN},
    "attempts": {"check": {"regex": "never"}, "sampling": DRAWN, "prompt_column": "prompt"},
    "log probabilities": {"sampling": {**DRAWN, "logprobs": 1}, "prompts": CHAIN},
    "cut": {"continue_on_length": True, "sampling": {"temperature": 0, "max_tokens": 6}},
    "labels": {"labels": ["a", "b"], "calibrate": True, "template": "{prompt}"},
    "agreement": {"agree": 0.9, "max_samples": 6, "sampling": DRAWN, "prompt_column": "prompt"},
    "embeddings": {"task": "embed", "prompt_column": "prompt"},
}
SCORED = SimpleNamespace(logprob=-1.0, decoded_token="x", rank=1, partial_bytes=None)
PROMPTS: list[str | None] = ["a", "bb", "a", None, "ccc", "dddd"]


def answer(request: Request) -> FakeCompletion:
    """Answer as the seed says; of what goes on elsewhere, those tokens are not new."""
    if request.kind == "score":
        return FakeCompletion(num_prompt_tokens=7, loglikelihoods=[SCORED, SCORED])
    if request.kind == "embed":
        return FakeCompletion(num_prompt_tokens=3, embedding=[1.5] * 4)
    found = replace(shout(request), text=f"{request.prompt}{request.sampling.get('seed')}")
    found = replace(found, logprobs=[{7: SCORED}] if "logprobs" in request.sampling else None)
    if request.sampling.get("max_tokens") == 6 and not request.continued:
        found = replace(found, finish_reason="length")
    num_resumed = len(request.resumed.get(0, ()))
    assert num_resumed <= 4
    num_continued = len(request.continued) + num_resumed
    return replace(found, token_ids=[*request.continued, *range(6)], num_continued=num_continued)


class Shard:
    """One execution of the run's shard."""

    def __init__(self, runs: Runs, context: Any) -> None:
        job = runs.jobs[-1]
        self.task: Any = opened_task(context, job.func_name, job.args, job.kwargs)
        self.asked: list[Request] = []
        self._waiting: list[int] = []

    def pull(self) -> None:
        for request in self.task.requests():
            self._waiting.append(len(self.asked))
            self.asked.append(request)

    def deliver(self, most: int) -> None:
        """Answer so many requests."""
        self.pull()
        for _ in range(most):
            if not self._waiting:
                return
            index = self._waiting.pop(0)
            n = self.asked[index].sampling.get("n", 1)
            samples: list[Completion] = [
                replace(answer(self.asked[index]), index=each) for each in range(n)
            ]
            if self.task.inspects:
                self.task.inspect(index, samples)
            self.task.deliver(index, samples)
            self.pull()

    def keep(self, tokens: int = 0) -> bool:
        """Write an entry, with so many tokens of each request that waits; return whether anything was new."""
        waiting = [(index, self.asked[index].continued) for index in self._waiting if tokens]
        return keep(
            self.task, {index: {0: [*continued, *range(tokens)]} for index, continued in waiting}
        )

    def end(self) -> None:
        self.deliver(1000)
        self.task.result()
        self.task.close()


@pytest.fixture
def make_context(make_context: MakeContext, checks: Checks) -> MakeContext:
    return lambda: replace(make_context(), checks=checks, model=replace(MODEL, embedding_size=4))


Open = Callable[[], Shard]


@pytest.fixture
def shard(runs: Runs) -> Open:
    return lambda: Shard(runs, runs.context())


def plan(runs: Runs, name: str) -> None:
    runs.write(PROMPTS)
    runs.plan(**ASKS[name])


@pytest.mark.parametrize("name", ASKS)
@pytest.mark.parametrize("most", [0, 1, 2, 3, 5])
def test_rows_go_on_wherever_they_were(runs: Runs, shard: Open, name: str, most: int) -> None:
    plan(runs, name)
    whole = shard()
    whole.keep()
    whole.end()
    expected, before, keys = runs.rows(), runs.manifest, (runs.output / keys_name(0)).read_bytes()
    for job in runs.jobs:
        job.delete()
    shutil.rmtree(runs.output)
    plan(runs, name)
    num_journalled = 0
    for tokens in (4, 0):
        killed = shard()
        killed.deliver(most)
        killed.keep(tokens)
        num_journalled += len(killed.task.required_runner.answered)
        killed.task.close()
    other = runs.output.with_name("other")
    runs.plan(output=other, reuse=[str(runs.output)], **ASKS[name])
    shard().end()
    runs.jobs[-1].delete()
    assert pq.read_table(other).to_pylist() == expected
    assert json.loads((other / "_manifest.json").read_text())["rows_reused"] == num_journalled
    last = shard()
    last.end()
    assert runs.rows() == expected
    assert (runs.output / keys_name(0)).read_bytes() == keys
    found = runs.manifest
    assert found["generated_tokens"] + found["tokens_resumed"] == before["generated_tokens"]
    assert found["rows_resumed"] or not most
    assert len(last.asked) <= len(whole.asked)
    assert not (runs.output / JOURNAL).exists()


def test_an_entry_has_only_what_is_new_and_nothing_is_none(runs: Runs, shard: Open) -> None:
    plan(runs, "samples")
    first = shard()
    first.pull()
    assert not first.keep()
    first.deliver(2)
    assert first.keep()
    assert not first.keep()
    first.deliver(1)
    assert first.keep(2)
    assert first.keep(3)
    names = sorted(path.name.split(".") for path in (runs.output / JOURNAL).iterdir())
    assert [name[2:] for name in names] == [["answers", "0"], ["answers", "1"], ["now", "3"]]
    assert {name[0] for name in names} == {"_00000"}, "polars reads files of other names"


def test_a_failed_entry_is_in_the_next_one(
    runs: Runs, shard: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(runs, "samples")
    first = shard()
    first.deliver(2)
    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", Mock(side_effect=OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            first.keep()
    assert first.keep()
    shard().end()
    assert runs.manifest["rows_resumed"] == 2


def test_whoever_thaws_after_the_end_makes_no_folder(runs: Runs, shard: Open) -> None:
    plan(runs, "samples")
    frozen, other = shard(), shard()
    frozen.deliver(2)
    other.end()
    assert frozen.keep(3)
    frozen.end()
    assert not (runs.output / JOURNAL).exists()
    (runs.output / JOURNAL).mkdir()  # as in a store
    (runs.output / JOURNAL / "_00000.execution.answers.2").write_bytes(b"")
    runs.score(
        output=runs.output.with_name("new"),
        answer=pytest.fail,
        reuse=[str(runs.output)],
        **ASKS["samples"],
    )


def test_of_two_executions_that_write_each_has_its_own_and_the_next_takes_what_is_furthest(
    runs: Runs, shard: Open
) -> None:
    plan(runs, "chain")
    first = shard()
    first.deliver(2)
    first.keep(2)
    second = shard()
    second.deliver(5)
    second.keep(4)
    first.deliver(1)  # thawed
    first.keep(1)
    last = shard()
    last.pull()
    assert {len(each.resumed.get(0, ())) for each in last.asked} <= {0, 4}
    assert len(last.asked) == len(second.asked) - 5
    last.end()
    assert [row["id"] for row in runs.rows()] == [*range(len(PROMPTS))]


def test_a_damaged_journal_is_passed_over(runs: Runs, shard: Open) -> None:
    plan(runs, "samples")
    first = shard()
    first.deliver(2)
    first.keep()
    (path,) = (runs.output / JOURNAL).iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    last = shard()
    last.end()
    assert (runs.manifest["rows_resumed"], runs.manifest["tokens_resumed"]) == (0, 0)
    assert len(last.asked) == len(first.asked)
