"""Rows that fail a check six times in ten: each ends valid or with its attempts used, also after a kill."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from engine import Completion, Engine, EngineConfig
from jobs.context.answer import Answer
from jobs.context.checks.options import repair_options
from jobs.context.checks.processes import Checks
from jobs.parquet.shard_requests import ShardRequests
from jobs.parquet.shard_work import row_seed
from jobs.tasks import OpenTask, Request
from tests.engine.failing_check import FAILING, check
from worker.stock_worker import drive

NUM_ROWS, MAX_ATTEMPTS = 40, 4
#: The least share of further attempts' prompts that must be in the cache.
LEAST_CACHED = 0.9
CHECK = f"{check.__module__}.{check.__name__}"
WORDS = ("river", "stone", "amber", "quiet", "lantern", "morning", "copper", "window", "garden", "silver")
SAMPLING = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True}


class Shard(OpenTask):
    """A shard's requests, without its files."""

    def __init__(self, checks: Checks, max_attempts: int) -> None:
        options = repair_options({"function": CHECK}, max_attempts, None, " {reason}: ")
        drawn = random.Random(1)
        texts = [
            f"{number} {' '.join(drawn.choices(WORDS, k=40))}\n{json.dumps({'id': number})}"
            for number in range(NUM_ROWS)
        ]
        self.rows = ShardRequests(
            texts, SAMPLING, lambda row: row_seed(1, row), False, repairs=options, checks=checks
        )

    def requests(self) -> Iterator[Request]:
        return self.rows.requests()

    @property
    def has_more(self) -> bool:
        return self.rows.has_more

    inspects = True

    def inspect(self, index: int, completions: Sequence[Any]) -> None:
        self.rows.inspect(index, completions)

    def deliver(self, index: int, completions: Sequence[Any]) -> None:
        self.rows.deliver(index, completions)

    def result(self) -> list[Answer]:
        return self.rows.answers()


class Mortal:
    """An engine whose worker dies after so many steps."""

    def __init__(self, engine: Engine, steps: int) -> None:
        self._engine, self._left = engine, steps

    def step(self) -> list[Completion]:
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1
        return self._engine.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.fixture(scope="module")
def checks() -> Iterator[Checks]:
    found = Checks({CHECK})
    yield found
    found.close()


def score(folder: Path, checks: Checks, max_attempts: int, dies_after: int | None = None) -> list[Answer]:
    config = EngineConfig(str(folder), dtype="float32", kv_cache_bytes=1 << 24, block_size=16, max_num_seqs=8)
    with Engine(config) as engine:
        if dies_after is not None:
            shard = Shard(checks, max_attempts)
            with pytest.raises(KeyboardInterrupt):
                drive(shard, cast(Any, Mortal(engine, dies_after)))
            assert 0 < shard.rows.rows_done < NUM_ROWS
        shard = Shard(checks, max_attempts)
        drive(shard, engine)
        return shard.result()


def test_every_row_is_valid_or_has_used_its_attempts_and_further_prompts_are_cached(
    folders: dict[str, Path], checks: Checks
) -> None:
    folder = folders["gqa2_tied_hub"]
    whole = score(folder, checks, MAX_ATTEMPTS)
    for number, answer in enumerate(whole):
        reason = check({"id": number}, answer.completion or "")
        assert (answer.error, answer.check_error) == (None, reason)
        assert reason is None or answer.attempts == MAX_ATTEMPTS
    attempts = {answer.attempts for answer in whole}
    assert attempts == set(range(1, MAX_ATTEMPTS + 1)), "rows of all kinds are among them"
    first = score(folder, checks, 1)
    failed = sum(answer.check_error is not None for answer in first)
    assert abs(failed / NUM_ROWS - FAILING / 100) < 0.2
    prompt = sum(one.prompt_tokens - two.prompt_tokens for one, two in zip(whole, first, strict=True))
    cached = sum(one.cached_tokens - two.cached_tokens for one, two in zip(whole, first, strict=True))
    assert cached >= LEAST_CACHED * prompt > 0


def test_a_worker_that_dies_leaves_another_the_same_way(folders: dict[str, Path], checks: Checks) -> None:
    folder = folders["gqa2_tied_hub"]
    whole, resumed = score(folder, checks, MAX_ATTEMPTS), score(folder, checks, MAX_ATTEMPTS, dies_after=60)
    assert [replace(answer, cached_tokens=0) for answer in whole] == [
        replace(answer, cached_tokens=0) for answer in resumed
    ]


def test_the_check_fails_as_many_texts_as_it_says() -> None:
    failing = sum(check({"id": 1}, str(number)) is not None for number in range(2000))
    assert abs(failing / 2000 - FAILING / 100) < 0.04
