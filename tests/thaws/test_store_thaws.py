"""The same where the run's files lie in an object store, whose requests are no file operations."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis import Redis

pytest.importorskip("obstore", reason="the extra `cloud` is not installed")

from tests.thaws.cases import ACTORS, Actor, Case, all_cases, calls_of, play, sample
from tests.thaws.store_world import StoreWorld

pytestmark = pytest.mark.long

CASES_OF_EACH = 3
SEED = 9


@pytest.mark.parametrize("actor", ACTORS, ids=str)
def test_a_run_in_a_store_ends_wherever_one_freezes_and_whatever_others_do_meanwhile(
    redis: Redis, tmp_path: Path, actor: Actor
) -> None:
    calls = calls_of(actor, redis, tmp_path / "calls", StoreWorld)
    cases = [case for case in all_cases(actor, calls) if not case.is_beyond_a_store(calls)]
    for number, case in enumerate(sample(cases, CASES_OF_EACH, SEED)):
        play(case, redis, tmp_path / str(number), StoreWorld)


@pytest.mark.parametrize("name", ["first shard", "last shard"])
def test_a_shard_reads_the_plan_again_that_was_replaced_while_it_read(
    redis: Redis, tmp_path: Path, name: str
) -> None:
    actor = next(each for each in ACTORS if each.name == name)
    calls = calls_of(actor, redis, tmp_path / "calls", StoreWorld)
    places = [at for at, call in enumerate(calls) if "load_plan" in call and call.endswith("obstore.get")]
    assert places
    for at in places:
        play(Case(actor, "extended", at, False), redis, tmp_path / str(at), StoreWorld)
