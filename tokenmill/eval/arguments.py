"""Turns the arguments of lm-evaluation-harness into the engine's configuration and sampling values."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from engine import ConfigError, EngineConfig, InvalidSampling, SamplingParams
from engine.run.device import resolve_device

#: Arguments of the harness's `hf` class and of its generation, with the values that change nothing. No other values are
#: accepted.
NEUTRAL_ARGUMENTS: dict[str, tuple[object, ...]] = {
    "backend": ("default", "causal"),
    "trust_remote_code": (None, False),
    "revision": (None, "main"),
    "parallelize": (None, False),
}
NEUTRAL_GENERATION: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1.0,),
    "use_cache": (True,),
}
#: The device that the harness passes if it was started without `--device`.
HARNESS_DEVICE = "cuda:0"

_ENGINE_ARGUMENTS = frozenset(config_field.name for config_field in fields(EngineConfig))


def engine_config(
    pretrained: object, model: object, max_length: object, arguments: Mapping[str, Any]
) -> EngineConfig:
    """Return the engine's configuration for `--model_args`. Raises ConfigError for an unknown name or a wrong value.

    pretrained, model: two names for the same argument. max_length: what the `hf` class calls max_model_len.
    arguments: all other arguments. As with `hf`, the device HARNESS_DEVICE means the CPU if there is no GPU.
    """
    if (pretrained is None) == (model is None):
        raise ConfigError("give the model's folder or hub id once: pretrained=..., or model=...")
    values: dict[str, Any] = {"model": str(pretrained if model is None else model)}
    if max_length is not None:
        if arguments.get("max_model_len", max_length) != max_length:
            raise ConfigError(
                f"max_length={max_length} and max_model_len={arguments['max_model_len']} say the same thing; "
                "give one of them"
            )
        values["max_model_len"] = max_length
    for name, value in arguments.items():
        if name in NEUTRAL_ARGUMENTS:
            if value not in NEUTRAL_ARGUMENTS[name]:
                raise ConfigError(f"{name}={value!r} of the hf class is not built; leave it out")
        elif name not in _ENGINE_ARGUMENTS:
            names = ", ".join(sorted(_ENGINE_ARGUMENTS))
            raise ConfigError(
                f"{name!r} is no argument of this model; the arguments of the engine are {names}"
            )
        else:
            values[name] = value
    if values.get("device") == HARNESS_DEVICE and resolve_device("auto").type == "cpu":
        values["device"] = "auto"
    return EngineConfig(**values)


def sampling_params(
    values: Mapping[str, Any], *, max_tokens: int, stop: list[str], end_token_id: int | None
) -> SamplingParams:
    """Return the sampling parameters for the generation_kwargs of a task. Raises InvalidSampling for a wrong value.

    values: the kwargs, as lm_eval.models.utils.normalize_gen_kwargs returns them, without stop texts and length.
    Decoding is greedy unless `do_sample` is set and there is a temperature. end_token_id: a token that ends an answer.
    """
    parameters: dict[str, Any] = {"temperature": 0.0, **values}
    if not parameters.pop("do_sample"):
        parameters["temperature"] = 0.0
    for name, neutral_values in NEUTRAL_GENERATION.items():
        if name not in parameters:
            continue
        value = parameters.pop(name)
        if value not in neutral_values:
            raise InvalidSampling(f"{name}={value!r} is not built; leave it out")
    parameters["max_tokens"] = max_tokens
    parameters["stop"] = stop
    parameters["stop_token_ids"] = [] if end_token_id is None else [end_token_id]
    return SamplingParams.from_mapping(parameters)
