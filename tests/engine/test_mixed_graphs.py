"""Steps with prompts are replayed from graphs between attention calls, and nobody can tell from what comes back."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import Engine, EngineConfig, SamplingParams
from engine.attention.adapter_rows import GroupedRows
from engine.attention.base import ForwardBatch
from engine.run.forward.mixed_graphs import MOST_TOKENS, MixedGraphs, step_sizes
from engine.run.forward.model_runner import ModelRunner
from engine.run.forward.warm_up import make_step
from tests.engine.families import BY_NAME, make_family
from tests.engine.family_runs import reference_of, run
from tests.engine.graphs import simulate_graphs, simulate_mixed_graphs, simulate_state_graphs
from tests.engine.test_logprobs import mixed_requests

LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_bytes": 1 << 20,
    "max_model_len": 150,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 200,
    "async_scheduling": True,
}


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "qwen3_moe",
        "qwen3_5",
        pytest.param("gemma2", marks=pytest.mark.long),
        pytest.param("gpt_oss", marks=pytest.mark.long),
    ],
)
def test_every_step_is_replayed_and_the_answers_are_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With log probabilities of prompts and answers, chunks, and steps that are smaller than any size."""
    folder = make_family(tmp_path, BY_NAME[name])
    asked = mixed_requests()
    prompts = [[token % 90 + 3 for token in prompt] for prompt, _ in asked]
    params = [replace(params, stop_token_ids=[], seed=7) for _, params in asked]
    with Engine(EngineConfig(str(folder), **LIMITS)) as plain:
        expected = plain.generate(prompts, params)

    decodes = simulate_state_graphs(monkeypatch)
    mixed = simulate_mixed_graphs(monkeypatch)
    eager: list[int] = []
    states_of = ModelRunner._states_of

    def count(runner: ModelRunner, rows: Tensor, batch: ForwardBatch) -> Tensor:
        if runner._mixed_graphs is not None and not runner._mixed_graphs.fits(batch):
            eager.append(len(batch.token_ids))
        return states_of(runner, rows, batch)

    monkeypatch.setattr(ModelRunner, "_states_of", count)
    with Engine(EngineConfig(str(folder), **LIMITS)) as engine:
        num_layers = engine._open_runner().model.model.layers.__len__()
        assert mixed.num_captured == len(step_sizes(200))
        assert mixed.num_calls == num_layers * mixed.num_captured
        answers = engine.generate(prompts, params)
        num_steps = engine.stats().num_steps
    assert [answer.token_ids for answer in answers] == [each.token_ids for each in expected]
    for answer, wanted in zip(answers, expected, strict=True):
        for ours, theirs in zip(answer.logprobs or [], wanted.logprobs or [], strict=True):
            assert {token: each.logprob for token, each in ours.items()} == pytest.approx(
                {token: each.logprob for token, each in theirs.items()}, abs=1e-4
            )
    assert eager == []
    assert len(set(mixed.replayed)) > 1
    assert len(decodes.replayed) + len(mixed.replayed) >= num_steps


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "qwen3_5"])
def test_the_triton_backend_gives_the_same_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")
    reference = reference_of(tmp_path, BY_NAME[name])
    reference.prompts = [reference.prompts[i] for i in (1, 4)]
    simulate_graphs(monkeypatch)
    mixed = simulate_mixed_graphs(monkeypatch)
    differences, _ = run(reference, "chunks", "triton")
    assert differences == []
    assert mixed.replayed


def test_graphs_that_give_other_states_are_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A start compares them with a step without graphs."""
    simulate_graphs(monkeypatch)
    simulate_mixed_graphs(monkeypatch)
    replay = MixedGraphs.run
    monkeypatch.setattr(MixedGraphs, "run", lambda self, batch: replay(self, batch).flip(1))
    with caplog.at_level(logging.WARNING), Engine(EngineConfig(str(folder), **LIMITS)) as engine:
        assert engine._open_runner()._mixed_graphs is None  # type: ignore[union-attr]
    assert (
        "steps with prompts run without CUDA graphs: they give other hidden states" in caplog.text
    )


def test_graphs_that_cannot_be_recorded_are_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simulate_graphs(monkeypatch)

    def refuse(run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(
        "engine.run.forward.model_runner.choose_piece_capture", lambda *args: refuse
    )
    with Engine(EngineConfig(str(folder), **LIMITS)) as engine:
        (answer,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(answer.token_ids) == 2
    assert "run without CUDA graphs: operation not permitted" in caplog.text


def test_padding_stores_nothing_and_changes_no_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 3 tokens in a graph of 64 gives the hidden states of the step alone, over a pool of NaN."""
    simulate_graphs(monkeypatch)
    simulate_mixed_graphs(monkeypatch)
    with Engine(EngineConfig(str(folder), **LIMITS)) as engine:
        runner: Any = engine._open_runner()
        batch, _ = runner._to_device(make_step([3], [3], 16, 1))
        with torch.inference_mode():
            runner.cache.pool.fill_(torch.nan)
            found = runner._mixed_graphs.run(batch).clone()
            assert int(runner.cache.layers[0].keys.isfinite().all(-1).all(-1).sum()) == 3
            expected = runner.model.hidden_states(batch, runner.cache)
        assert runner._mixed_graphs.fits(batch)
        assert not runner._mixed_graphs.fits(replace(batch, adapters=GroupedRows(())))
    torch.testing.assert_close(found, expected)


def test_sizes_are_dense_and_end_at_the_largest_step() -> None:
    for most in (2, 63, 64, 65, 200, 512, 1000, 8192):
        sizes = step_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == min(most, MOST_TOKENS)
        for smaller, larger in zip([0, *sizes], sizes, strict=False):
            assert larger - smaller <= max(64, larger // 4)
