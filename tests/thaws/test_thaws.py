"""Whoever is at a run may freeze before any of its calls and thaw after others have gone on: the run ends."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

import jobs
from tests.thaws.cases import ACTORS, Actor, Case, all_cases, calls_of, play, sample

pytestmark = pytest.mark.long

CASES_OF_EACH = 3
SEED = 9


@pytest.fixture
def new_folder(tmp_path: Path) -> Callable[[], Path]:
    numbers = itertools.count()
    return lambda: tmp_path / str(next(numbers))


@pytest.fixture(scope="module")
def calls(redis: Redis, tmp_path_factory: pytest.TempPathFactory) -> dict[Actor, list[str]]:
    """What each actor calls."""
    folder = tmp_path_factory.mktemp("calls")
    return {actor: calls_of(actor, redis, folder / str(number)) for number, actor in enumerate(ACTORS)}


def places_of(calls: list[str], function: str, kind: str) -> list[int]:
    """Return where among an actor's calls those of a kind are that it makes in a function."""
    places = [at for at, call in enumerate(calls) if function in call.split() and call.endswith(kind)]
    assert places, f"nothing is called in {function}: {calls}"
    return places


@pytest.mark.parametrize("actor", ACTORS, ids=str)
def test_a_run_ends_wherever_one_freezes_and_whatever_others_do_meanwhile(
    redis: Redis, new_folder: Callable[[], Path], calls: dict[Actor, list[str]], actor: Actor
) -> None:
    """A sample of all cases."""
    for case in sample(list(all_cases(actor, calls[actor])), CASES_OF_EACH, SEED):
        play(case, redis, new_folder())


@pytest.mark.parametrize("dies", [False, True], ids=["goes on", "is killed a call later"])
@pytest.mark.parametrize(
    ("function", "kind"),
    [("withdraw_finished", "redis"), ("_withdraw_success", "os.replace"), ("submit", "redis")],
)
def test_a_planner_that_thaws_before_it_takes_an_end_back_leaves_the_one_that_came_meanwhile(
    redis: Redis,
    new_folder: Callable[[], Path],
    calls: dict[Actor, list[str]],
    function: str,
    kind: str,
    dies: bool,
) -> None:
    name = "submitter" if function == "submit" else "planner"
    actor = next(each for each in ACTORS if each.name == f"{name} of a run whose part was deleted")
    for at in places_of(calls[actor], function, kind):
        play(Case(actor, "taken over and finished", at, dies), redis, new_folder())


@pytest.mark.parametrize("dies", [False, True], ids=["goes on", "is killed a call later"])
@pytest.mark.parametrize(("function", "kind"), [("replace_part", "os.replace"), ("_record", "redis")])
def test_a_retry_that_thaws_when_its_shard_was_taken_over_and_done_gives_no_answer_up_for_an_error(
    redis: Redis,
    new_folder: Callable[[], Path],
    calls: dict[Actor, list[str]],
    function: str,
    kind: str,
    dies: bool,
) -> None:
    actor = next(each for each in ACTORS if each.name == "retried shard")
    for at in places_of(calls[actor], function, kind):
        play(Case(actor, "taken over and its job done", at, dies), redis, new_folder())


def test_a_planner_of_a_retry_that_thaws_when_others_have_finished_it_drops_no_record_of_a_part(
    redis: Redis, new_folder: Callable[[], Path], calls: dict[Actor, list[str]]
) -> None:
    actor = next(each for each in ACTORS if each.name == "planner of a retry")
    places = places_of(calls[actor], "records", "redis")
    for at in (at for at in places if "recount" not in calls[actor][at].split()):
        play(Case(actor, "taken over and finished", at, False), redis, new_folder())


def test_a_shard_that_thaws_when_its_errors_have_answers_leaves_the_record_of_these(
    redis: Redis, new_folder: Callable[[], Path], calls: dict[Actor, list[str]]
) -> None:
    actor = next(each for each in ACTORS if each.name == "first shard, with errors")
    for at in places_of(calls[actor], "record_part", "redis"):
        play(Case(actor, "taken over, finished and retried", at, False), redis, new_folder())


@pytest.mark.parametrize(
    ("name", "function", "event"),
    [
        ("planner that extends a run", "replace_plan", "taken over and finished"),
        ("last shard", "_write_end", "extended"),
    ],
)
def test_who_thaws_into_a_run_that_was_extended_ends_it_with_all_rows(
    redis: Redis,
    new_folder: Callable[[], Path],
    calls: dict[Actor, list[str]],
    name: str,
    function: str,
    event: str,
) -> None:
    actor = next(each for each in ACTORS if each.name == name)
    for at in places_of(calls[actor], function, "os.replace"):
        play(Case(actor, event, at, False), redis, new_folder())


def test_every_call_that_changes_a_runs_files_is_one_before_which_somebody_freezes(
    calls: dict[Actor, list[str]],
) -> None:
    changing = {"link", "replace", "rename", "unlink", "symlink", "mkdir", "rmdir", "fsync", "open"}
    in_code = {
        f"{path.name} os.{node.func.attr}"
        for path in (Path(jobs.__file__).parent / "parquet").glob("*.py")
        if path.name != "given_table.py"  # which writes a table for its producer, before there is a run
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "os" and node.func.attr in changing
    }
    seen = {f"{call.split(':')[0]} {call.split()[-1]}" for each in calls.values() for call in each}
    assert not in_code - seen
