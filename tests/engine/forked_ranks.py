"""Ranks forked from a process that has imported torch, which costs a new interpreter three seconds."""

import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from engine.run.forward import model_runner
from engine.tensor_parallel.collectives import ProcessGroupParallel
from engine.tensor_parallel.lifeline import hold
from engine.tensor_parallel.messages import Channel
from engine.tensor_parallel.rank import main
from engine.tensor_parallel.rank_group import RankProcess
from tests.engine.graphs import simulate_graphs, simulate_mixed_graphs
from tests.forking import ForkedProcess

#: The environment variable that names the file in which rank 0 of a LoggingRank or a RecordingRank logs.
LOG = "TOKENMILL_TEST_RANK_LOG"


class ForkedRank(RankProcess):
    """One rank, for tests of what ranks compute; those of how they start take RankProcess itself."""

    @staticmethod
    def alter(rank: int) -> None:
        """Change the rank's process before it serves."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank = rank
        driver_end, rank_end = socket.socketpair()
        with rank_end:
            self._process = ForkedProcess(  # type: ignore[assignment]
                _serve, rank_end, dict(os.environ), rank, type(self).alter
            )
        self.channel = Channel(driver_end, timeout_s)


class HangingRank(ForkedRank):
    """A rank whose sums with the others never come back, as where two GPUs do not reach each other."""

    @staticmethod
    def alter(rank: int) -> None:
        ProcessGroupParallel.minimum = lambda self, value: signal.pause()  # type: ignore[assignment, method-assign]


class LoggingRank(ForkedRank):
    """A rank; rank 0 logs into the file that LOG names."""

    @staticmethod
    def alter(rank: int) -> None:
        if rank == 0:
            log_to_file()


class RecordingRank(ForkedRank):
    """A rank that records its steps, as on a GPU."""

    @staticmethod
    def alter(rank: int) -> None:
        record_steps(rank)


class RankWithoutDecodeGraphs(ForkedRank):
    """A rank that records its steps, but for decode steps on rank 1, where the third of them fails."""

    @staticmethod
    def alter(rank: int) -> None:
        record_steps(rank)
        if rank == 1:
            fail_third_capture("choose_capture")


class RankWithoutMixedGraphs(ForkedRank):
    """A rank that records its steps, but for steps with prompts on rank 1, where the third of them fails."""

    @staticmethod
    def alter(rank: int) -> None:
        record_steps(rank)
        if rank == 1:
            fail_third_capture("choose_piece_capture")


def record_steps(rank: int) -> None:
    """Have this process record steps from now on, and rank 0 log into the file that LOG names."""
    patch = pytest.MonkeyPatch()
    simulate_graphs(patch)
    simulate_mixed_graphs(patch)
    if rank == 0:
        log_to_file()


def log_to_file() -> None:
    """Have this process log into the file that LOG names."""
    logging.getLogger().addHandler(logging.FileHandler(os.environ[LOG]))


def fail_third_capture(name: str) -> None:
    """Have the third capture fail once its step has run, as a GPU's fails when it records. name: of model_runner."""
    capture = getattr(model_runner, name)()
    num_calls = 0

    def refuse_third(run: Callable[..., None]) -> Any:
        nonlocal num_calls
        num_calls += 1
        replay = capture(run)
        if num_calls == 3:
            raise RuntimeError("operation not permitted when stream is capturing")
        return replay

    setattr(model_runner, name, lambda *args, **options: refuse_third)


def _serve(
    rank_end: socket.socket, environment: dict[str, str], rank: int, alter: Callable[[int], None]
) -> None:
    """What RankProcess has a new interpreter do."""
    os.environ.clear()
    os.environ.update(environment)
    alter(rank)
    descriptor = rank_end.detach()
    hold(descriptor, driver_pid=os.getppid(), thread_id=0)
    main(descriptor)
