"""A sequence that makes a step raise fails by itself; a fault that is no sequence's fails the engine soon."""

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import Completion, Engine, EngineConfig, RankFailed, SamplingParams, StepFailed
from engine.attention.base import KernelBackend
from engine.run.forward.runner import PendingTokens
from engine.sampling.sampling_batch import SamplingBatch
from engine.sampling.sampling_rows import SamplingRows
from engine.schedule.sequence import Sequence
from engine.schedule.step_batch import StepBatch
from tests.engine.accounting import check_accounting
from tests.engine.test_overlap import STOPPING, LateRunner, drain, expected, start
from tests.examples import examples

POISON = 666  # the seed of the sequence that makes a step raise
WORD = 9  # a token that nothing but poison holds
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, ignore_eos=True)
PREFIX = [7, 8] * 20


class Poisoned(ValueError):
    """What a poisoned sequence raises."""


def prompts() -> list[tuple[str, list[int], SamplingParams]]:
    """Thirteen requests, most with a common beginning; the seventh is poisoned."""
    rng = random.Random(1)
    made = []
    for i in range(13):
        tokens = PREFIX[: 40 * (i % 3 > 0)] + [rng.randrange(3, 500) for _ in range(1 + i)]
        params = replace(PARAMS, seed=i, max_tokens=3 + i, stop=("zzz",) if i % 4 == 2 else ())
        made.append((str(i), tokens, params))
    made[6] = ("6", [*PREFIX, 11, 12, 13], replace(PARAMS, seed=POISON, n=2, stop=("zzz",)))
    return made


@pytest.fixture(params=[False, True], ids=["in turns", "overlap"])
def built(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    config = EngineConfig(
        str(folder), dtype="float32", attention_backend="torch", kv_cache_bytes=1 << 20, max_num_seqs=8,
        max_num_batched_tokens=60, async_scheduling=request.param,
    )  # fmt: skip
    with Engine(config) as made:
        yield made
        assert made.stats().free_blocks == made.stats().num_blocks
        assert not made.has_unfinished
        check_accounting(made._scheduler)


def run(built: Engine) -> dict[tuple[str, int], Completion]:
    for request_id, tokens, params in prompts():
        built.add(request_id, tokens, params)
    done = []
    for _ in range(400):
        done += built.step()
    return {(completion.request_id, completion.index): completion for completion in done}


def in_sample(monkeypatch: pytest.MonkeyPatch, *, step: int = 4) -> None:
    """At the sequence's fourth token, as the sampler sees it."""
    sample = KernelBackend.sample

    def poisoned(
        backend: KernelBackend, logits: Tensor, rows: SamplingRows, chosen: Tensor
    ) -> Tensor:
        if (rows.position[rows.seed == POISON] == len(PREFIX) + 3 + step).any():
            raise Poisoned("a part of the prompt")
        return sample(backend, logits, rows, chosen)

    monkeypatch.setattr(KernelBackend, "sample", poisoned)


def in_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a token's text is looked at."""
    append = Sequence._append

    def poisoned(seq: Sequence, token_id: int) -> Any:
        if seq.seed == POISON and len(seq.token_ids) == len(PREFIX) + 6:
            raise Poisoned("a part of the prompt")
        return append(seq, token_id)

    monkeypatch.setattr(Sequence, "_append", poisoned)


def in_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NaN, which a model in half precision gives for some prompts."""
    sample = KernelBackend.sample

    def poisoned(
        backend: KernelBackend, logits: Tensor, rows: SamplingRows, chosen: Tensor
    ) -> Tensor:
        logits[rows.seed == POISON] = torch.nan
        return sample(backend, logits, rows, chosen)

    monkeypatch.setattr(KernelBackend, "sample", poisoned)


@pytest.mark.parametrize("poison", [in_sample, in_stop_strings, in_logits])
def test_a_sequence_that_makes_a_step_raise_fails_alone(
    built: Engine,
    poison: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its request, with both samples, ends with a named error; all others get what they get without it."""
    clean = run(built)
    with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG):
        poison(patch)
        done = run(built)
    errors = {
        key: completion for key, completion in done.items() if completion.finish_reason == "error"
    }
    assert [key[0] for key in errors] == ["6"]
    error = next(iter(errors.values())).error or ""
    assert "cannot go on with this request" in error
    assert ("NoToken: no token could be chosen" if poison is in_logits else "Poisoned") in error
    others = {key for key in clean if key[0] != "6"}
    assert {key for key in done if key[0] != "6"} == others
    for key in others:
        assert (done[key].token_ids, done[key].text) == (clean[key].token_ids, clean[key].text)
    assert "request 6, sample" in caplog.text
    assert "failed alone" in caplog.text
    assert "a part of the prompt" not in caplog.text
    monkeypatch.undo()
    assert run(built) == run(built), "the engine is as good as new"


class FaultyRunner(LateRunner):
    """Raises `fault` in each launch for which `is_hit` says so; counts the launches."""

    fault: BaseException = Poisoned("broken")
    is_hit: Callable[[StepBatch, SamplingBatch], bool] = staticmethod(lambda step, sampling: False)
    num_launches = 0
    num_faults = 0

    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        self.num_launches += 1
        if self.is_hit(step, sampling):
            self.num_faults += 1
            raise self.fault
        return super().launch(step, sampling)


def fill(built: Engine, num_requests: int) -> None:
    for i in range(num_requests):
        built.add(str(i), [1 + i % 2] * (1 + i % 7), STOPPING)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_good_steps", [0, 3])
def test_a_fault_of_the_device_fails_the_engine_after_few_tries(
    folder: Path, overlap: bool, num_good_steps: int
) -> None:
    """No request is blamed, nothing is lost: once the fault is gone, all end as if it had not been."""
    runner = FaultyRunner(num_blocks=200)
    with start(
        folder, runner, overlap=overlap, max_num_seqs=32, max_num_batched_tokens=200
    ) as built:
        fill(built, 32)
        for _ in range(num_good_steps):
            assert built.step() == []
        runner.is_hit, runner.num_launches = lambda step, sampling: True, 0
        with pytest.raises(StepFailed, match="one of the engine's own failed too") as failure:  # noqa: PT012
            built.step()
            built.step()
        assert isinstance(failure.value.__cause__, Poisoned)
        assert runner.num_launches <= log2(32) + 3
        assert built.stats().free_blocks == built.stats().num_blocks
        runner.is_hit = lambda step, sampling: False
        done = {completion.request_id: completion for completion in drain(built)}
        assert len(done) == 32
        for i in range(32):
            assert done[str(i)].token_ids == expected(runner, [1 + i % 2] * (1 + i % 7), STOPPING)


@pytest.mark.parametrize(
    "fault", [MemoryError(), torch.OutOfMemoryError("full"), RankFailed(1, "gone")]
)
@pytest.mark.parametrize("overlap", [False, True])
def test_what_no_sequence_can_cause_is_not_looked_for(
    folder: Path, fault: Exception, overlap: bool
) -> None:
    runner = FaultyRunner(num_blocks=200)
    with start(
        folder, runner, overlap=overlap, max_num_seqs=32, max_num_batched_tokens=200
    ) as built:
        fill(built, 32)
        runner.fault, runner.is_hit = fault, lambda step, sampling: True
        with pytest.raises(RankFailed if isinstance(fault, RankFailed) else StepFailed):
            built.step()
        assert runner.num_launches == 1


def test_a_panic_of_the_tokenizer_is_an_error_like_any_other(
    built: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rust's panics come as BaseException, which nobody up to the worker's main thread would catch."""
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    class Panicking:
        def encode(self, *args: Any, **options: Any) -> list[int]:
            raise panic("index out of bounds")

        def decode(self, token_ids: list[int], **options: Any) -> str:
            if len(token_ids) > 1:
                raise panic("index out of bounds")
            return "a"

    monkeypatch.setattr(built._tokenizer, "_tokenizer", Panicking())
    text, ids = built.generate(["text", PREFIX], PARAMS)
    assert "the tokenizer broke down" in (text.error or "")
    assert "the tokenizer broke down" in (ids.error or "")


class PoisonedRunner(FaultyRunner):
    """Raises wherever a poisoned sequence is: at WORD in its prompt, or at one of its samples."""

    def __init__(self, at_sample: dict[int, int], *, at_wait: bool) -> None:
        super().__init__(num_blocks=13)
        self._at_sample, self._at_wait = at_sample, at_wait
        self.fault = Poisoned("poison")

    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        hit = WORD in step.token_ids or any(
            position == self._at_sample.get(seed)
            for seed, position in zip(
                sampling.values["seed"].tolist(), sampling.position.tolist(), strict=True
            )
        )
        if hit and self._at_wait:
            return Raising(self.fault)
        self.is_hit = lambda step, sampling: hit
        return super().launch(step, sampling)


class Raising(PendingTokens):
    """Tokens of a step that fails on its device."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def wait(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        raise self._error


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), overlap=st.booleans(), at_wait=st.booleans())
def test_random_histories_with_poisoned_sequences(
    folder: Path, seed: int, overlap: bool, at_wait: bool
) -> None:
    """In a pool that is too small, with shared prefixes, lanes, aborts: every other gets its own tokens."""
    rng = random.Random(seed)
    at_sample: dict[int, int] = {}
    runner = PoisonedRunner(at_sample, at_wait=at_wait)
    wanted: dict[str, tuple[list[int], SamplingParams]] = {}
    poisoned: set[str] = set()
    prefix = [rng.randrange(1, 3) for _ in range(9)]
    done: list[Completion] = []
    with start(folder, runner, overlap=overlap) as built:
        for i in range(rng.randrange(3, 14)):
            prompt = prefix[: rng.choice([0, 9, 9])] + [
                rng.randrange(1, 3) for _ in range(rng.randrange(1, 9))
            ]
            params = replace(
                STOPPING, max_tokens=rng.randrange(1, 24), n=rng.choice([1, 1, 2]), seed=1 + i
            )
            # seeds from 1: the control has 0
            kind = rng.choice(["good", "good", "good", "word", "sample"])
            if kind == "word":
                prompt[rng.randrange(len(prompt))] = WORD
                poisoned.add(str(i))
            elif kind == "sample":
                at_sample[1 + i] = len(prompt) + rng.randrange(4)
                num_samples = at_sample[1 + i] - len(prompt)
                if len(expected(runner, prompt, params)) > num_samples:
                    poisoned.add(str(i))
            wanted[str(i)] = prompt, params
            built.add(str(i), prompt, params, lane=rng.choice([0, 0, 1]))
            for _ in range(rng.randrange(4)):
                done += built.step()
            if rng.random() < 0.1:
                gone = str(rng.randrange(i + 1))
                built.abort(gone)
                own = [completion for completion in done if completion.request_id == gone]
                if gone in wanted and len(own) < (1 if gone in poisoned else wanted[gone][1].n):
                    del wanted[gone]
        done += drain(built)
        check_accounting(built._scheduler)
        assert built.stats().free_blocks == built.stats().num_blocks
    for key, (prompt, params) in wanted.items():
        own = [completion for completion in done if completion.request_id == key]
        if key in poisoned:
            assert [completion.finish_reason for completion in own] == ["error"]
        else:
            assert {tuple(c.token_ids) for c in own} == {tuple(expected(runner, prompt, params))}
            assert len(own) == params.n
    overran = at_sample.keys() - {
        1 + int(key) for key in poisoned
    }  # raised behind their last token, or not
    bound = (2 * log2(8) + 3) * (len(poisoned) + len(overran))
    assert runner.num_faults <= bound
