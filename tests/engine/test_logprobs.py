"""Log probabilities of tokens: those of transformers' own logits, whatever else is in the step."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import Completion, Engine, EngineConfig, InvalidSampling, Logprob, SamplingParams
from engine.run.forward import row_logprobs
from engine.run.forward.model_runner import ModelRunner
from engine.sampling.sampling_batch import SamplingBatch
from engine.schedule.step_batch import StepBatch
from tests.engine.checkpoints import SHAPES, VOCAB_SIZE, pool_bytes
from tests.engine.graphs import simulate_graphs

NAME = "gqa2_tied_hub"
(SHAPE,) = (shape for shape in SHAPES if shape.name == NAME)
CLOSE = 1e-4
FREE = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
Asked = tuple[list[int], SamplingParams]


def config(folder: Path, **changes: Any) -> EngineConfig:
    """A pool too small for what is asked, and chunks: sequences are preempted."""
    values = {
        "dtype": "float32",
        "kv_cache_bytes": pool_bytes(SHAPE, 14),
        "max_model_len": 150,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
    } | changes
    return EngineConfig(str(folder), **values)


@pytest.fixture(scope="module")
def small(folders: dict[str, Path]) -> Iterator[Engine]:
    with Engine(config(folders[NAME])) as built:
        yield built


def mixed_requests() -> list[Asked]:
    """Where every row has other settings, and many share a beginning."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 500) for _ in range(37)]
    asked = []
    for i, top in enumerate([None, 0, 1, 5, 20, 3, None, 20, 2, 0, 20, 4]):
        prompt = shared[: rng.choice([0, 16, 37])] + [
            rng.randrange(3, 500) for _ in range(1 + 7 * (i % 5))
        ]
        params = SamplingParams(
            max_tokens=4 + 5 * (i % 3),
            temperature=[0.0, 0.7, 1.3][i % 3],
            top_p=[1.0, 0.8][i % 2],
            top_k=[-1, 40][i % 2],
            seed=i,
            ignore_eos=i % 4 > 0,
            min_tokens=i % 4,
            stop_token_ids=[rng.randrange(3, 500)],
            stop=["a", "e"] if i % 5 == 4 else [],
            n=1 + (i % 6 == 3),
            logprobs=top,
            prompt_logprobs=[None, 0, 2, 20][i % 4],
        )
        asked.append((prompt, params))
    return asked


def with_preemption(engine: Engine, asked: list[Asked]) -> list[Completion]:
    """Every third one comes later, and is more urgent: it takes the place of others, wherever they are."""
    done: list[Completion] = []
    for i in sorted(range(len(asked)), key=lambda i: i % 3 == 2):
        engine.add(str(i), *asked[i], lane=int(i % 3 != 2))
        done += engine.step() + engine.step()
    while engine.has_unfinished:
        done += engine.step()
    return sorted(done, key=lambda each: (int(each.request_id), each.index))


def generate(engine: Engine, asked: list[Asked]) -> list[Completion]:
    return engine.generate([prompt for prompt, _ in asked], [params for _, params in asked])


def check_entry(entry: dict[int, Logprob], token_id: int, row: Tensor, num_top: int) -> None:
    """One token's: itself first, then the likeliest, with values and ranks of the true distribution."""
    (own_id, own), *others = entry.items()
    assert own_id == token_id
    assert (row > own.logprob + CLOSE).sum() < own.rank <= (row > own.logprob - CLOSE).sum()
    values = torch.tensor([each.logprob for each in entry.values()])
    assert (values - row[list(entry)]).abs().max() < CLOSE
    assert all(isinstance(each.decoded_token, str) for each in entry.values())
    likeliest = values.sort(descending=True).values[:num_top]
    assert not num_top or (likeliest - row.topk(num_top).values).abs().max() < CLOSE
    assert len(entry) in (num_top, num_top + 1)
    assert [each.rank for _, each in others] == [
        place for place in range(1, num_top + 1) if place != own.rank or own.rank > num_top
    ]


def check(completions: list[Completion], asked: list[Asked], truth: Any) -> None:
    """Every number of every completion."""
    samples = [(prompt, params) for prompt, params in asked for _ in range(params.n)]
    for completion, (prompt, params) in zip(completions, samples, strict=True):
        assert completion.error is None
        rows = truth(tuple(prompt + completion.token_ids))
        if params.logprobs is None:
            assert completion.logprobs is None
        else:
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.token_ids)
            for at, (entry, token_id) in enumerate(
                zip(completion.logprobs, completion.token_ids, strict=True), start=len(prompt)
            ):
                check_entry(entry, token_id, rows[at - 1], params.logprobs)
        if params.prompt_logprobs is None:
            assert completion.prompt_logprobs is None
        else:
            assert completion.prompt_logprobs is not None
            assert completion.prompt_logprobs[0] is None
            assert len(completion.prompt_logprobs) == len(prompt)
            for at in range(1, len(prompt)):
                check_entry(
                    completion.prompt_logprobs[at], prompt[at], rows[at - 1], params.prompt_logprobs
                )


@pytest.mark.parametrize("overlap", [False, True])
def test_they_are_those_of_the_models_own_distribution(
    folders: dict[str, Path], truth: Any, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mixed batches, with preemption, chunks, cached prefixes and pieces of a few rows; twice, so that all
    prompts are cached the second time."""
    monkeypatch.setattr(row_logprobs, "PIECE_NUMBERS", 7 * VOCAB_SIZE)
    asked = mixed_requests()
    with Engine(config(folders[NAME], async_scheduling=overlap)) as engine:
        for _ in range(2):
            check(with_preemption(engine, asked), asked, truth)
        stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.cached_tokens > 0


def test_decode_steps_with_log_probabilities_are_replayed_from_graphs(
    folders: dict[str, Path], truth: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the work behind the hidden states is launched for them, and the numbers are the same."""
    capture = simulate_graphs(monkeypatch)
    eager_steps: list[StepBatch] = []
    launch = ModelRunner._launch_with_more

    def record(runner: ModelRunner, step: StepBatch, sampling: SamplingBatch) -> Any:
        eager_steps.append(step)
        return launch(runner, step, sampling)

    monkeypatch.setattr(ModelRunner, "_launch_with_more", record)
    asked = mixed_requests()
    with Engine(config(folders[NAME], async_scheduling=True)) as engine:
        num_started = len(capture.replayed)
        eager_steps.clear()
        check(with_preemption(engine, asked), asked, truth)
    assert len(capture.replayed) > num_started
    for step in eager_steps:
        assert len(step.scored_rows) or (step.query_lens > 1).any(), "a step of decodes alone"


def test_tokens_are_the_same_with_and_without(small: Engine) -> None:
    """Asking for log probabilities changes nothing else."""
    asked = mixed_requests()
    plain = [
        (prompt, replace(params, logprobs=None, prompt_logprobs=None)) for prompt, params in asked
    ]
    with_them, without = generate(small, asked), generate(small, plain)
    assert [each.token_ids for each in with_them] == [each.token_ids for each in without]
    assert [each.text for each in with_them] == [each.text for each in without]


def test_the_prefix_cache_spares_nothing_of_a_prompt_that_is_scored(small: Engine) -> None:
    """Nor does it once the prompt is scored: what is computed again after a preemption may come from it."""
    prompt = [9] * 50
    generate(small, [(prompt, FREE)])
    scored, plain = generate(small, [(prompt, FREE), (prompt, replace(FREE, prompt_logprobs=None))])
    assert scored.num_cached_tokens == 0
    assert plain.num_cached_tokens >= 48


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-2, 21, True, "5", 1.0])
def test_other_values_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidSampling, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("number", [-1, 21])
def test_at_most_twenty_likely_tokens_are_given(name: str, number: int) -> None:
    with pytest.raises(InvalidSampling, match=f"{name} must be .*20"):
        SamplingParams.from_mapping({name: number})


def test_a_request_whose_log_probabilities_take_the_engines_memory_is_refused(
    small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted before anything is computed: 8 tokens of a prompt with 4 entries each, and 2 samples of 5 with 3 each."""
    params = SamplingParams(max_tokens=5, n=2, prompt_logprobs=3, logprobs=2)
    monkeypatch.setattr("engine.run.kinds.generate.MAX_LOGPROB_ENTRIES", 62)
    (whole, _) = small.generate([list(range(5, 13))], params)
    assert whole.error is None
    monkeypatch.setattr("engine.run.kinds.generate.MAX_LOGPROB_ENTRIES", 61)
    with pytest.raises(
        InvalidSampling, match="may have 62 log probabilities, more than the limit of 61"
    ):
        small.add("a", list(range(5, 13)), params)
    assert not small.has_unfinished
