"""Steps of several ranks overlap: each rank has the tokens of the step before on its own device."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from engine import Completion, Engine, SamplingParams
from tests.engine.test_determinism import requests as seeded_requests
from tests.engine.two_ranks import GREEDY, SHAPE_OF, config, ranks_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("forked_ranks")]

NAME = "gqa2_tied_hub"


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Drawn and greedy ones, ends by length, by stop token and by bans, and shared prefixes."""
    prompts = [[5, 6, 7 + i % 3] * (1 + i % 4) for i in range(9)]
    greedy = [replace(GREEDY, max_tokens=1 + 18 * (i % 3), stop_token_ids=(i, 300 + i)) for i in range(9)]
    return [*seeded_requests()[:6], *zip(prompts, greedy, strict=True)]


def steps(built: Engine, num_steps: int = 400) -> list[Completion]:
    """So many steps of an engine, or as many as it needs."""
    done: list[Completion] = []
    for _ in range(num_steps):
        if built.has_unfinished:
            done += built.step()
    return done


def test_overlapping_ranks_give_the_tokens_of_ranks_that_wait(folders: dict[str, Path]) -> None:
    """Also where an urgent request preempts others, one is aborted, and nobody waits for a step."""
    answers = []
    for overlap in (False, True):
        few = config(folders[NAME], SHAPE_OF[NAME], max_num_seqs=4, max_num_batched_tokens=20)
        with Engine(replace(few, async_scheduling=overlap)) as built:
            asked = [(str(i), *request) for i, request in enumerate(requests())]
            for each in asked[:-2]:
                built.add(*each, lane=1)
            done = [*map(asdict, steps(built, 5))]
            assert built._stepper.in_flight == overlap
            built.abort("1")
            done += map(asdict, steps(built, 3))
            for each in asked[-2:]:
                built.add(*each, lane=0)
            done += map(asdict, steps(built, 4))
            if overlap:
                built._stepper._start_over()
            done += map(asdict, steps(built))
            group = ranks_of(built)
            assert group._num_launched - group._num_answered == 0
            assert built.stats().num_preemptions > 0
            answers.append(sorted(done, key=lambda each: (int(each["request_id"]), each["index"])))
    for each in answers[0] + answers[1]:
        del each["num_cached_tokens"], each["metrics"]  # withdrawn steps publish nothing
    assert answers[0] == answers[1]
    assert {each["request_id"] for each in answers[0]} == {each[0] for each in asked} - {"1"}
