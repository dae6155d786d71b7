"""Each family's greedy tokens equal transformers', computed from no cache; and the check can fail.

All families in all modes, and on other backends: `python -m ops.families`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import engine.models.load
from engine import Engine
from engine.checkpoint.model_config import ModelConfig
from engine.models.decoder_config import DecoderConfig, read_decoder_config
from engine.models.registry import DecoderFlags
from tests.engine.families import BY_NAME
from tests.engine.family_runs import NUM_NEW_TOKENS, reference_of, run
from tests.engine.reference import Reference

References = Callable[[str], Reference]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The reference of a family, made when it is first asked for."""
    made: dict[str, Reference] = {}

    def find(name: str) -> Reference:
        if name not in made:
            made[name] = reference_of(tmp_path_factory.mktemp(name), BY_NAME[name])
        return made[name]

    return find


@pytest.mark.parametrize("name", BY_NAME)
def test_greedy_tokens_equal_transformers(name: str, family: References) -> None:
    """With chunks of 24 tokens, the prefix cache, and preemptions, all at once."""
    differences, stats = run(family(name))
    assert differences == []
    assert stats.cached_tokens > 0
    assert stats.num_preemptions > 0
    answers = family(name).answers
    assert sum(len(set(answer)) for answer in answers) > NUM_NEW_TOKENS / 3 * len(answers)


def change_ropes(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda config: replace(config, ropes=tuple(replace(rope, **changes) for rope in config.ropes))


FAULTS: list[tuple[str, str, Callable[[DecoderConfig], DecoderConfig]]] = [
    ("llama3", "scaling left out", change_ropes(kind="default")),
    ("llama3", "another factor", lambda config: scaled(config, factor=2.0)),
    ("qwen2", "yarn's magnitude left out", lambda config: scaled(config, attention_factor=1.0)),
    ("qwen2_linear", "scaling left out", change_ropes(kind="default")),
]


def scaled(config: DecoderConfig, **changes: float) -> DecoderConfig:
    parameters = {**config.ropes[0].parameters, **changes}
    return change_ropes(parameters=parameters)(config)


@pytest.mark.parametrize(("name", "fault", "change"), FAULTS, ids=[f"{n}: {fault}" for n, fault, _ in FAULTS])
def test_a_fault_in_the_configuration_is_seen(
    name: str,
    fault: str,
    change: Callable[[DecoderConfig], DecoderConfig],
    family: References,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(model: ModelConfig, flags: DecoderFlags) -> DecoderConfig:
        return change(read_decoder_config(model, flags))

    monkeypatch.setattr(engine.models.load, "read_decoder_config", read)
    differences, _ = run(family(name))
    assert differences


@pytest.mark.parametrize("name", ["qwen3"])
def test_norms_of_queries_and_keys_left_out_are_seen(name: str, family: References) -> None:
    def skip(built: Engine) -> None:
        for layer in built._open_runner().model.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.forward = lambda x: x

    differences, _ = run(family(name), change=skip)
    assert differences
