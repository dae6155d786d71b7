"""Ranks forked from a process that has imported torch, which costs a new interpreter three seconds."""

import os
import signal
import socket

from engine.tensor_parallel.collectives import ProcessGroupParallel
from engine.tensor_parallel.lifeline import hold
from engine.tensor_parallel.messages import Channel
from engine.tensor_parallel.rank import main
from engine.tensor_parallel.rank_group import RankProcess
from tests.forking import ForkedProcess


class ForkedRank(RankProcess):
    """One rank, for tests of what ranks compute; those of how they start take RankProcess itself."""

    hangs = False

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank = rank
        driver_end, rank_end = socket.socketpair()
        with rank_end:
            self._process = ForkedProcess(_serve, rank_end, dict(os.environ), self.hangs)  # type: ignore[assignment]
        self.channel = Channel(driver_end, timeout_s)


class HangingRank(ForkedRank):
    """A rank whose sums with the others never come back, as where two GPUs do not reach each other."""

    hangs = True


def _serve(rank_end: socket.socket, environment: dict[str, str], hangs: bool) -> None:
    """What RankProcess has a new interpreter do."""
    if hangs:
        ProcessGroupParallel.minimum = lambda self, value: signal.pause()  # type: ignore[assignment, method-assign]
    os.environ.clear()
    os.environ.update(environment)
    descriptor = rank_end.detach()
    hold(descriptor, driver_pid=os.getppid(), thread_id=0)
    main(descriptor)
