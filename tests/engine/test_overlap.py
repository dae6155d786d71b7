"""A step is scheduled while the one before runs, and nobody can tell from what comes back."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import Completion, Engine, EngineConfig, SamplingParams, StepFailed
from engine.run.forward.runner import PendingTokens, PoolSize
from engine.sampling.sampling_batch import SamplingBatch
from engine.schedule.step_batch import StepBatch
from tests.engine.shadow import ShadowDevice

STOP = 0  # what the shadow model answers now and then
FREE = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
STOPPING = replace(FREE, max_tokens=40, stop_token_ids=(STOP,))
BLOCK = 4


class LateTokens(PendingTokens):
    """Tokens of the runner's step `number`, there when the step after it has been launched."""

    def __init__(self, runner: LateRunner, number: int, token_ids: NDArray[np.int64]) -> None:
        self._runner, self._number, self._token_ids = runner, number, token_ids

    def wait(self) -> NDArray[np.int64]:
        self._runner.wait(self._number)
        return self._token_ids


class LateRunner:
    """A shadow of the device behind an engine; writes down what is asked of it."""

    has_graphs = False

    def __init__(self, num_blocks: int = 30, last_step: int | None = None) -> None:
        self.pool_size = PoolSize(num_blocks, 0, 40)
        self.device = ShadowDevice(num_blocks, BLOCK)
        self.calls: list[tuple[str, int]] = []
        self.num_rows = 0
        self._last_step = last_step
        self._num_launched = 0

    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        self.calls.append(("launch", self._num_launched))
        self._num_launched += 1
        self.num_rows += len(step.token_ids)
        return LateTokens(self, self._num_launched - 1, self.device.compute(step))

    def wait(self, number: int) -> None:
        self.calls.append(("wait", number))
        if self._last_step is not None and number < self._last_step:
            assert self._num_launched > number + 1, (
                f"step {number} is waited for before the next launch"
            )

    def close(self) -> None:
        self.calls.append(("close", 0))


def start(folder: Path, runner: LateRunner, *, overlap: bool = True, **changes: Any) -> Engine:
    values = {"block_size": BLOCK, "max_num_seqs": 6, "max_num_batched_tokens": 20} | changes
    config = EngineConfig(str(folder), async_scheduling=overlap, **values)
    engine = Engine(config, start_runner=lambda *args: runner)
    engine._stepper.drafts = None
    return engine


def drain(built: Engine) -> list[Completion]:
    done: list[Completion] = []
    for _ in range(2000):
        if not built.has_unfinished:
            break
        done += built.step()
    assert not built.has_unfinished
    return done


def run_all(built: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
    """As `generate`, but an engine that never finishes fails the test."""
    for i, prompt in enumerate(prompts):
        built.add(str(i), prompt, params)
    return sorted(drain(built), key=lambda completion: int(completion.request_id))


def expected(runner: LateRunner, prompt: list[int], params: SamplingParams) -> list[int]:
    """What the shadow model completes the prompt with."""
    token_ids = list(prompt)
    while len(token_ids) < min(len(prompt) + params.max_tokens, runner.pool_size.max_model_len):
        token_ids.append(runner.device.next_token(token_ids))
        if token_ids[-1] in params.stop_token_ids:
            break
    return token_ids[len(prompt) :]


@pytest.fixture
def stopping_prompts() -> list[list[int]]:
    """Prompts of which most end with a stop token, after different numbers of steps."""
    rng = random.Random(2)
    return [[rng.randrange(1, 3) for _ in range(1 + i % 9)] for i in range(12)]


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_waited_for(
    folder: Path,
) -> None:
    """Six tokens are six steps. The engine that waits first fails this very test."""
    runner = LateRunner(last_step=5)
    with start(folder, runner) as built:
        built.add("a", [1, 2, 1], FREE)
        (completion,) = drain(built)
    assert completion.token_ids == expected(runner, [1, 2, 1], FREE)
    launches = [("launch", n) for n in range(6)]
    waits = [("wait", n) for n in range(6)]
    in_turns = [call for pair in zip(launches[1:], waits, strict=False) for call in pair]
    assert runner.calls == [launches[0], *in_turns, waits[5], ("close", 0)]

    with start(folder, LateRunner(last_step=5), overlap=False) as built:
        built.add("a", [1, 2, 1], FREE)
        with pytest.raises(StepFailed, match="is waited for before the next launch"):
            drain(built)


def test_it_is_off_on_a_cpu_unless_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And on for GPUs, one or several."""

    def overlaps(**values: Any) -> bool:
        config = EngineConfig(str(folder), block_size=BLOCK, max_num_seqs=8, **values)
        with Engine(config, start_runner=lambda *args: LateRunner()) as built:
            built.add("a", [1, 2, 1], FREE)
            built.step()
            return bool(built._stepper._pending)

    assert not overlaps(device="cpu")
    assert overlaps(device="cpu", async_scheduling=True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert overlaps(device="cuda")
    assert not overlaps(device="cuda", async_scheduling=False)
    assert overlaps(device="cuda", tensor_parallel_size=2)


def test_the_token_computed_past_a_stop_is_dropped(
    folder: Path, stopping_prompts: list[list[int]]
) -> None:
    """It is in no completion and no count, and what it wrote harms nobody. An end by length has none."""
    rows, stats = [], []
    for overlap in (False, True):
        runner = LateRunner(num_blocks=60)
        with start(folder, runner, overlap=overlap) as built:
            completions = run_all(built, stopping_prompts, STOPPING)
            stats.append(built.stats())
            rows.append(runner.num_rows)
        answers = [completion.token_ids for completion in completions]
        assert answers == [expected(runner, prompt, STOPPING) for prompt in stopping_prompts]
        num_stopped = sum(completion.finish_reason == "stop" for completion in completions)
        assert num_stopped > 5
        assert stats[-1].decode_tokens == sum(len(answer) - 1 for answer in answers)
        assert stats[-1].free_blocks == stats[-1].num_blocks
        assert stats[-1].prefill_tokens + stats[-1].cached_tokens == sum(map(len, stopping_prompts))
    assert rows[1] - rows[0] >= num_stopped - 1 > 0

    num_rows = []
    for overlap in (False, True):
        runner = LateRunner()
        with start(folder, runner, overlap=overlap) as built:
            run_all(built, [[1, 2], [2, 2, 1]], FREE)
        num_rows.append((runner.num_rows, built.stats()))
    assert num_rows[0] == num_rows[1], "ends by length are known ahead"
