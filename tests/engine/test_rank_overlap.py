"""Steps of several ranks overlap: each rank has the tokens of the step before on its own device."""

from __future__ import annotations

import socket
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import Completion, Engine, SamplingParams
from engine.run.forward.pending_tokens import PendingTokens
from engine.run.forward.runner import PoolSize
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows
from engine.schedule.batch.step_batch import StepBatch
from engine.tensor_parallel import rank
from engine.tensor_parallel.channel import Channel
from engine.tensor_parallel.messages import Kind, encode, pack_json, pack_step
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


class RecordedRunner:
    """Stands in for a rank's ModelRunner: a step's token is its number; `calls` lists what happens."""

    pool_size = PoolSize(1, 0, 1)
    backend_name, has_graphs = "none", False

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.let_go: SimpleQueue[None] = SimpleQueue()
        self._num_launched = 0

    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        self.calls.append("launch")
        self._num_launched += 1
        return HeldTokens(self, self._num_launched - 1)

    def close(self) -> None:
        self.calls.append("graphs are dropped")


class HeldTokens(PendingTokens):
    """There when the test lets them go."""

    def __init__(self, runner: RecordedRunner, number: int) -> None:
        self._runner, self._number = runner, number

    def wait(self) -> NDArray[np.int64]:
        self._runner.let_go.get()
        self._runner.calls.append("tokens")
        return np.array([self._number])


class Left(Exception):
    """In the place of the process's end."""


def serve(monkeypatch: pytest.MonkeyPatch, driver: Channel, rank_end: socket.socket) -> list[str]:
    """Run a rank's main over a recorded runner, told to compute two steps and to stop."""
    calls: list[str] = []
    runner = RecordedRunner(calls)

    def leave(status: int) -> None:
        calls.append(f"exit {status}")
        raise Left

    monkeypatch.setattr(rank, "_start", lambda order: runner)
    monkeypatch.setattr(rank, "leave_ranks", lambda: calls.append("the group is left"))
    monkeypatch.setattr(rank.os, "_exit", leave)
    one = np.ones(1, np.int64)
    step = StepBatch(one, one, one, one, np.ones((1, 1), np.int32), one, one)
    sampling = SamplingBatch(neutral_rows(1), one.astype(np.uint64))
    driver.send(encode(Kind.START, pack_json({"rank": 0})))
    for _ in range(2):
        driver.send(encode(Kind.STEP, pack_step(step, sampling)))
        runner.let_go.put(None)
    driver.send(encode(Kind.STOP))
    channel = Channel(rank_end)
    monkeypatch.setattr(rank.socket, "socket", lambda fileno: rank_end)
    monkeypatch.setattr(rank, "Channel", lambda end: channel)
    with pytest.raises(Left):
        rank.main(rank_end.fileno())
    channel.close()
    return calls


def test_a_rank_drops_its_graphs_before_it_leaves_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """And answers all that it was asked before: NCCL would wait for whoever still holds its communicators."""
    driver_end, rank_end = socket.socketpair()
    driver = Channel(driver_end)
    calls = serve(monkeypatch, driver, rank_end)
    assert [driver.receive().kind for _ in range(3)] == [Kind.READY, Kind.TOKENS, Kind.TOKENS]
    assert calls.count("launch") == calls.count("tokens") == 2
    assert calls[-3:] == ["graphs are dropped", "the group is left", "exit 0"]
    driver.close()
