"""What the engine counts of its steps and of each request's time."""

import time
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, SamplingParams
from tests.engine.test_logprobs import NAME, config


@pytest.mark.parametrize("overlap", [False, True])
def test_generated_tokens_steps_and_times_are_those_of_the_completions(
    folders: dict[str, Path], overlap: bool
) -> None:
    """Also where the pool is too small, and sequences are preempted and end in the middle of a step."""
    began = time.monotonic()
    values = {
        "kv_cache_bytes": 48 << 10,
        "max_num_seqs": 4,
        "max_model_len": 48,
        "async_scheduling": overlap,
    }
    with Engine(config(folders[NAME], attention_backend="torch", **values)) as engine:
        prompts = [[11 + i, 12, 13] for i in range(6)]
        params = [
            SamplingParams(max_tokens=18 + 4 * i, temperature=0, ignore_eos=i > 2) for i in range(6)
        ]
        completions = engine.generate(prompts, params)
        stats = engine.stats()
    assert stats.generation_tokens == sum(len(each.token_ids) for each in completions)
    assert stats.num_preemptions > 0
    assert sum(stats.batch_sizes) == stats.num_steps
    assert sum(stats.batch_sizes[3:]) == 0, "no step had more than four sequences"
    assert stats.num_steps <= stats.num_scheduled <= 4 * stats.num_steps
    assert set(stats.step_seconds) == {
        "schedule",
        "prepare",
        "launch",
        "wait",
        "update",
        "detokenize",
    }
    assert all(seconds > 0 for seconds in stats.step_seconds.values())
    assert sum(stats.step_seconds.values()) < time.monotonic() - began
    for each in completions:
        assert each.metrics is not None
        assert each.metrics.first_token_time is not None
        assert (
            began
            < each.metrics.arrival_time
            < each.metrics.first_token_time
            <= each.metrics.finished_time
        )


def test_a_long_prompt_and_two_samples_tell_how_far_they_are(folders: dict[str, Path]) -> None:
    config = EngineConfig(
        str(folders["gqa2_tied_hub"]),
        dtype="float32",
        kv_cache_bytes=1 << 20,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        async_scheduling=False,
    )
    with Engine(config) as engine:
        engine.add("long", list(range(3, 43)), SamplingParams(n=2, max_tokens=4, ignore_eos=True))
        assert engine.progress() == {}, "none of it runs"
        told = []
        while engine.has_unfinished:
            engine.step()
            told.append(engine.progress().get("long"))
    prompts = [(each.prompt_tokens, each.prompt_tokens_left) for each in told if each is not None]
    assert prompts[:3] == [(16, 24), (32, 8), (40, 0)]
    generated = [each.generation_tokens for each in told if each is not None]
    assert generated[:3] == [0, 0, 2]
    assert max(generated) > 4, "of both samples, which have four each"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_chunk_that_leaves_one_token_of_a_prompt_hides_no_first_token(
    folders: dict[str, Path], overlap: bool
) -> None:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "async_scheduling": overlap}
    with Engine(config(folders[NAME], attention_backend="torch", **values)) as engine:
        (found,) = engine.generate(
            [list(range(3, 36))], SamplingParams(max_tokens=3, ignore_eos=True)
        )
        stats = engine.stats()
    assert found.metrics is not None
    assert found.metrics.first_token_time is not None
    assert (stats.prefill_tokens, stats.decode_tokens) == (33, 2)
