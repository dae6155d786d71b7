"""Whoever is at a run may freeze before any of its calls and thaw after others have gone on: the run ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from tests.redis_server import running_redis_server
from tests.thaws.cases import ACTORS, Actor, Case, all_cases, calls_of, play, sample

pytestmark = pytest.mark.long

CASES_OF_EACH = 3
SEED = 9


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    with running_redis_server() as url, Redis.from_url(url) as client:
        yield client


@pytest.fixture
def new_folder(tmp_path: Path) -> Callable[[], Path]:
    numbers = itertools.count()
    return lambda: tmp_path / str(next(numbers))


@pytest.mark.parametrize("actor", ACTORS, ids=str)
def test_a_run_ends_wherever_one_freezes_and_whatever_others_do_meanwhile(
    redis: Redis, new_folder: Callable[[], Path], actor: Actor
) -> None:
    """A sample of all cases."""
    calls = calls_of(actor, redis, new_folder())
    for case in sample(list(all_cases(actor, calls)), CASES_OF_EACH, SEED):
        play(case, redis, new_folder())


@pytest.mark.parametrize("dies", [False, True], ids=["goes on", "is killed a call later"])
@pytest.mark.parametrize(
    ("function", "kind"),
    [("withdraw_finished", "redis"), ("_withdraw_success", "os.replace"), ("submit", "redis")],
)
def test_a_planner_that_thaws_before_it_takes_an_end_back_leaves_the_one_that_came_meanwhile(
    redis: Redis, new_folder: Callable[[], Path], function: str, kind: str, dies: bool
) -> None:
    name = "submitter" if function == "submit" else "planner"
    actor = next(each for each in ACTORS if each.name == f"{name} of a run whose part was deleted")
    calls = calls_of(actor, redis, new_folder())
    places = [at for at, call in enumerate(calls) if function in call.split() and call.endswith(kind)]
    assert places, f"nothing is called in {function}: {calls}"
    for at in places:
        play(Case(actor, "taken over and finished", at, dies), redis, new_folder())
