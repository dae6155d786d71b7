"""Models with states beside the KV cache: whatever an engine does with a request, its tokens are transformers'."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.models.mixers
import engine.run.forward.memory
from engine import ConfigError, Engine, SamplingParams, UnsupportedModel, check_up
from engine.checkpoint.model_config import read_model_config
from engine.layers.parallel import TensorParallel
from engine.models.mixers import StateCache, scan_from
from engine.run.forward.model_runner import ModelRunner
from tests.engine.accounting import check_accounting
from tests.engine.architectures import Architectures, small
from tests.engine.reference import Reference, mixed_prompts
from tests.engine.test_isolation import PREFIX, Poisoned, prompts, run

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


NATIVE = "qwen3_5_text"


@pytest.fixture(params=["lfm2", "jamba", "mamba2", NATIVE])
def folder(request: pytest.FixtureRequest, architecture: Architectures) -> Path:
    """Of convolutions; of Mamba-1, whose scan is ours; both with attention; of states alone; and our delta net."""
    found: Path = architecture(request.param).reference.folder
    return found


def start(folder: Path, **changes: Any) -> Engine:
    values = {
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 60,
        "max_model_len": 200,
        **changes,
    }
    backend = "auto" if folder.name.startswith(NATIVE) else "torch"
    return Engine(small(folder, attention_backend=backend, **values))


@pytest.fixture(
    params=[
        pytest.param(False, id="in turns", marks=pytest.mark.long),
        pytest.param(True, id="overlap"),
    ]
)
def built(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    with start(folder, async_scheduling=request.param) as made:
        yield made
        assert made.stats().free_blocks == made.stats().num_blocks
        check_accounting(made._scheduler)


def test_prompts_of_any_length_get_transformers_tokens(folder: Path) -> None:
    """From one token to many blocks, with a common beginning or without, in one batch."""
    reference = Reference(folder, mixed_prompts(seed=3)[:24], num_new_tokens=12, use_cache=False)
    with start(folder, max_num_batched_tokens=100) as built:
        assert reference.unexplained(built.generate(reference.prompts, GREEDY)) == []
        assert reference.unexplained(built.generate(reference.prompts, GREEDY)) == []
        assert built.stats().cached_tokens > 200


def test_a_sequence_that_makes_a_step_raise_fails_alone(
    built: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last mixer, behind those that have changed all states; in its prompt, and at its fourth token."""
    clean = run(built)
    runner = built._open_runner()
    assert isinstance(runner, ModelRunner)
    model: Any = runner.model
    if Path(built.config.model).name.startswith(NATIVE):
        last, name = model.model.layers[-1].self_attn, "mix"
    else:
        last, name = list(model._mixers._cache.mixers)[-1], "forward"
    compute = getattr(last, name)
    poisoned = {len(PREFIX) + 3 + step for step in (-1, 4)}

    def raises(*args: Any, **options: Any) -> Any:
        found = compute(*args, **options)
        if 666 in seeds and poisoned & set(positions):
            raise Poisoned("a part of the prompt")
        return found

    seeds: list[int] = []
    positions: list[int] = []
    launch = runner.launch

    def watched(step: Any, sampling: Any) -> Any:
        seeds[:], positions[:] = sampling.values["seed"].tolist(), step.positions.tolist()
        return launch(step, sampling)

    with monkeypatch.context() as patch:
        patch.setattr(last, name, raises)
        patch.setattr(runner, "launch", watched)
        done = run(built)
    assert {key[0] for key, completion in done.items() if completion.finish_reason == "error"} == {
        "6"
    }
    for key, completion in clean.items():
        assert key[0] == "6" or done[key].token_ids == completion.token_ids
    assert run(built) == run(built), "the engine is as good as new"


def test_who_gives_way_to_urgent_requests_goes_on_with_its_own_tokens(folder: Path) -> None:
    """Its state is computed anew, from a snapshot where one is left."""
    with start(folder, max_num_seqs=2) as built:
        wanted = [
            completion.token_ids
            for completion in built.generate([tokens for _, tokens, _ in prompts()], GREEDY)
        ]
    with start(folder, max_num_seqs=2) as built:
        done: list[Any] = []
        for lane, (request_id, tokens, _) in zip([2, 2, 1, 1, 0, 0] * 3, prompts(), strict=False):
            built.add(request_id, tokens, GREEDY, lane=lane)
            for _ in range(3):
                done += built.step()
        while built.has_unfinished:
            done += built.step()
        assert built.stats().num_preemptions > 1
        assert [
            each.token_ids for each in sorted(done, key=lambda each: int(each.request_id))
        ] == wanted


def test_samples_share_their_prompt(built: Engine) -> None:
    """All n have the tokens that they have alone."""
    params = replace(GREEDY, temperature=1.0, seed=3, n=4)
    prompt = prompts()[5][1]
    before = built.stats().cached_tokens
    together = built.generate([prompt], params)
    assert built.stats().cached_tokens - before >= 3 * (len(prompt) // 16 * 16)
    with start(Path(built.config.model), enable_prefix_caching=False, max_num_seqs=1) as other:
        assert [c.token_ids for c in other.generate([prompt], params)] == [
            c.token_ids for c in together
        ]
    assert len({tuple(completion.token_ids) for completion in together}) == 4


def test_scores_and_log_probabilities_are_transformers(built: Engine) -> None:
    """Of a tree of continuations, of prompts, and of samples."""
    rng = random.Random(5)
    reference = Reference(Path(built.config.model), [[1]], use_cache=False)
    context = [rng.randrange(3, 500) for _ in range(37)]
    tails = [[5, 6, 7], [5, 6, 8, 9], [5], [11, 12]]
    with torch.inference_mode():
        for tail, found in zip(
            tails, built.loglikelihood([(context, tail) for tail in tails]), strict=True
        ):
            logits = (
                reference.model(torch.tensor([context + tail]), use_cache=False)
                .logits[0]
                .log_softmax(-1)
            )
            rows = logits[len(context) - 1 : -1]
            assert found.logprob == pytest.approx(
                float(rows[range(len(tail)), tail].sum()), abs=1e-3
            )
    (plain,) = built.generate([context], GREEDY)
    (told,) = built.generate([context], replace(GREEDY, logprobs=2, prompt_logprobs=1))
    assert told.token_ids == plain.token_ids
    assert len(told.logprobs or ()) == 12


def test_a_cut_completion_goes_on(built: Engine) -> None:
    prompt = prompts()[3][1]
    (whole,) = built.generate([prompt], GREEDY)
    built.add("cut", prompt, replace(GREEDY, max_tokens=7), continued=whole.token_ids[:5])
    done: list[Any] = []
    while built.has_unfinished:
        done += built.step()
    assert done[0].token_ids == whole.token_ids


def test_forced_tokens_change_no_others(built: Engine) -> None:
    """A grammar that forces tokens gives the same text whether they are jumped over or sampled."""
    params = replace(
        GREEDY,
        ignore_eos=False,
        max_tokens=40,
        structured_outputs={"regex": "(yes|no), said the (cat|dog)"},
    )
    texts = [built.generate([[7] * n], params)[0].text for n in (3, 40)]
    told = [built.generate([[7] * n], replace(params, logprobs=0))[0].text for n in (3, 40)]
    assert texts == told
    assert all("said the" in text for text in texts)


def test_memory_is_divided_among_sequences_and_snapshots(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The start says how many of each; too little for one sequence is an error."""
    caplog.set_level("INFO", logger="engine")
    with start(folder, max_num_seqs=5) as built:
        assert "beside the KV pool states of 5 sequences and 5 snapshots" in caplog.text
        runner = built._open_runner()
        assert isinstance(runner, ModelRunner)
        row = runner.cache.states.num_bytes // 10
        num_tokens = runner.pool_size.num_blocks * built.config.block_size
        (foretold,) = (each.text for each in check_up(built.config) if each.subject == "memory")
        assert re.search(
            f" {num_tokens} tokens in all, .*, states of 5 sequences and 5 snapshots of 0.0 MiB",
            foretold,
        )
    with start(folder, max_num_seqs=5, enable_prefix_caching=False):
        assert "5 sequences and 0 snapshots" in caplog.text
    fit_states = engine.run.forward.memory.fit_states
    config = small(folder, max_num_seqs=40)
    kept = config.kv_cache_bytes
    assert fit_states(row, config, kept + 9 * row, 1 << 30) == (7, 2)
    unstated = replace(config, kv_cache_bytes=None)
    assert sum(fit_states(row, unstated, 1 << 40, 19 * row) or ()) == 9, (
        "half of what both take, however much is free"
    )
    with pytest.raises(ConfigError, match=f"the state of one sequence takes {row} bytes"):
        fit_states(row, config, kept + row - 1, 1 << 30)


@pytest.mark.parametrize("folder", ["lfm2"], indirect=True)
def test_ranks_divide_no_states_of_transformers(folder: Path) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"tensor_parallel_size=2: .*set tensor_parallel_size=1"
    ):
        ModelRunner(small(folder), read_model_config(folder), folder, TensorParallel(0, 2))


def test_a_scan_goes_on_where_another_ended() -> None:
    """In two parts as transformers' own in one."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, dt, z, b, c = draw(1, 6, 9), draw(1, 6, 9), draw(1, 6, 9), draw(1, 4, 9), draw(1, 4, 9)
    options = {
        "D": draw(6),
        "delta_bias": draw(6),
        "delta_softplus": True,
        "return_last_state": True,
    }
    a = -draw(6, 4).exp()
    whole, last = mamba_selective_scan(hidden, dt, a, b, c, z=z, **options)
    state, parts = torch.zeros(1, 6, 4), []
    for part in (slice(0, 5), slice(5, 9)):
        cut = [x[..., part] for x in (hidden, dt)], [x[..., part] for x in (b, c)]
        output, state = scan_from(state, *cut[0], a, *cut[1], z=z[..., part], **options)
        parts.append(output)
    assert torch.allclose(torch.cat(parts, -1), whole, atol=1e-6)
    assert torch.allclose(state, last, atol=1e-6)


@pytest.mark.parametrize("folder", ["lfm2", "jamba", "mamba2"], indirect=True)
def test_a_state_that_no_cache_sees_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of which one mixer is not found answers as if it forgot."""
    note = StateCache._note

    def forgetful(self: StateCache) -> None:
        note(self)
        if len(self.mixers) > 1:
            self.mixers.popitem()

    monkeypatch.setattr(engine.models.mixers.StateCache, "_note", forgetful)
    with pytest.raises(UnsupportedModel, match=r"mixes the sequences|forgets what came before"):
        start(folder)
