"""What lm-evaluation-harness gives, as configuration and sampling values."""

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest

from engine import ConfigError, EngineConfig, InvalidSampling, SamplingParams
from tokenmill.eval.arguments import engine_config, sampling_params


def config(**arguments: Any) -> EngineConfig:
    own = {name: arguments.pop(name, None) for name in ("pretrained", "model", "max_length")}
    return engine_config(**own, arguments=arguments)


def params(**values: Any) -> SamplingParams:
    given = {"do_sample": True, **values}
    return sampling_params(given, max_tokens=7, stop=["\n"], end_token_id=2)


def test_arguments_are_the_engines_and_the_hf_class_names_of_them() -> None:
    asked = config(
        pretrained="m", dtype="float32", max_length=64, enforce_eager=True, trust_remote_code=False
    )
    assert asked == EngineConfig(model="m", dtype="float32", max_model_len=64, enforce_eager=True)
    assert config(model="m", max_model_len=64, max_length=64) == EngineConfig(
        model="m", max_model_len=64
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "once"),
        ({"pretrained": "m", "model": "m"}, "once"),
        ({"model": "m", "max_length": 8, "max_model_len": 9}, "say the same thing"),
        ({"model": "m", "peft": "x"}, "no argument of this model"),
        ({"model": "m", "trust_remote_code": True}, "not built"),
        ({"model": "m", "dtype": "float32", "max_num_seqs": "8"}, "max_num_seqs"),
    ],
    ids=str,
)  # fmt: skip
def test_other_arguments_are_refused_by_name(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**arguments)


def test_it_is_greedy_unless_there_is_a_temperature() -> None:
    assert params().temperature == 0
    assert params(do_sample=False, temperature=0.7).temperature == 0
    drawn = params(temperature=0.7, top_p=0.9, num_beams=1, use_cache=True)
    assert drawn == SamplingParams(
        max_tokens=7, temperature=0.7, top_p=0.9, stop=["\n"], stop_token_ids=[2]
    )


@pytest.mark.parametrize(
    "values", [{"num_beams": 4}, {"penalty_alpha": 0.6}, {"temperature": -1.0}], ids=str
)
def test_what_is_not_served_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidSampling, match=next(iter(values))):
        params(**values)


def test_the_harness_finds_the_class_by_its_entry_point() -> None:
    """The class itself needs the extra [eval]: its module and name are read."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["lm_eval.models"]["tokenmill"].partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert f'@register_model("tokenmill")\nclass {name}(' in Path(spec.origin).read_text()
