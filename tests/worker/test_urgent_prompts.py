"""An urgent prompt through the worker's packer and the engine's loop into a full batch, counted in steps."""

from collections.abc import Iterator
from itertools import count
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import Completion, Engine, EngineConfig
from engine.run.forward.runner import PendingTokens, PoolSize
from engine.sampling.sampling_batch import SamplingBatch
from engine.schedule.step_batch import StepBatch
from jobs.tasks import Request
from tests.e2e.conftest import MODEL
from worker.engine_thread.engine_loop import EngineLoop
from worker.engine_thread.orders import Add, Stepped

HIGH, BULK = 0, 1
SLOTS, BLOCK_SIZE, MAX_MODEL_LEN = 16, 16, 256


class Drawn(PendingTokens):
    def __init__(self, tokens: NDArray[np.int64]) -> None:
        self._tokens = tokens

    def wait(self) -> NDArray[np.int64]:
        return self._tokens


class DrawingRunner:
    """A model of which only the size of its pool matters."""

    has_graphs = False

    def __init__(self, num_blocks: int) -> None:
        self.pool_size = PoolSize(num_blocks, 0, MAX_MODEL_LEN)
        self._rng = np.random.default_rng(1)

    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        return Drawn(self._rng.integers(10, 500, len(step.sample_rows)))

    def close(self) -> None:
        pass


class Batch:
    """An engine stepped by the worker's loop, one step at a time; notes who ran in each step."""

    def __init__(self, num_blocks: int, overlap: bool = False) -> None:
        config = EngineConfig(
            str(MODEL),
            device="cpu",
            max_num_seqs=SLOTS,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=512,
            async_scheduling=overlap,
        )
        self.engine = Engine(config, start_runner=lambda *_: DrawingRunner(num_blocks))
        self.orders: SimpleQueue[Any] = SimpleQueue()
        self.loop = EngineLoop(cast(Any, self.engine), self.orders, self._take)
        self.done: dict[str, Completion] = {}
        self.ran: list[set[str]] = []
        self._rng = np.random.default_rng(0)
        self._numbers = count()
        self._watch()

    def _watch(self) -> None:
        scheduler = self.engine._scheduler
        schedule = scheduler.schedule

        def watched() -> Any:
            batch = schedule()
            self.ran.append({seq.request_id for seq in batch.seqs})
            return batch

        scheduler.schedule = watched  # type: ignore[method-assign]

    def _take(self, report: Any) -> None:
        assert isinstance(report, Stepped), report
        self.done.update((completion.request_id, completion) for completion in report.completions)

    def claim(self, lane: int, prompt_tokens: int, max_tokens: int) -> str:
        """Send a prompt as the I/O thread does when it has claimed it."""
        request_id = f"{'hb'[lane]}{next(self._numbers)}"
        prompt = [int(token) for token in self._rng.integers(10, 500, prompt_tokens)]
        sampling = {"max_tokens": max_tokens, "ignore_eos": True}
        self.orders.put(Add(request_id, Request(prompt, None, sampling), lane))
        return request_id

    def step(self) -> None:
        assert self.loop.turn()


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def fill(batch: Batch, lengths: Iterator[int]) -> None:
    """Keep a reserve of bulk prompts waiting, as the packer does."""
    while batch.engine.stats().num_waiting + batch.orders.qsize() < SLOTS:
        batch.claim(BULK, 40, next(lengths))


@pytest.mark.parametrize(("blocks_per_slot", "what"), [(16, "slots"), (6, "blocks")])
def test_an_urgent_prompt_is_in_the_step_after_its_claim_and_in_every_one_until_it_is_done(
    blocks_per_slot: int, what: str, overlap: bool
) -> None:
    """Bulk work holds all slots, or all blocks that the prompt would need: some of it must make room."""
    batch = Batch(num_blocks=SLOTS * blocks_per_slot, overlap=overlap)
    lengths = (50 + n * 37 % 101 for n in count())
    tokens = 12
    for urgent_tokens in (1, 2, 17, 40, 100, 200):

        def is_full(needed: int = urgent_tokens // BLOCK_SIZE + 1) -> bool:
            stats = batch.engine.stats()
            return stats.num_running == SLOTS if what == "slots" else stats.free_blocks < needed

        for _ in range(30):
            fill(batch, lengths)
            batch.step()
        while not is_full():
            fill(batch, lengths)
            batch.step()
        first, preempted = len(batch.ran), batch.engine.stats().num_preemptions
        urgent = batch.claim(HIGH, urgent_tokens, tokens)
        while urgent not in batch.done:
            batch.step()
            fill(batch, lengths)
        assert all(urgent in ran for ran in batch.ran[first : first + tokens])
        assert batch.engine.stats().num_preemptions > preempted
