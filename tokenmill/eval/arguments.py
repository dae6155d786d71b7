"""Turns what lm-evaluation-harness passes to a model into the engine's configuration and sampling values."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from engine import ConfigError, EngineConfig, InvalidSampling, SamplingParams
from engine.run.device import resolve_device

#: Arguments of the `hf` class, with the only values that are accepted, because they change nothing.
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
#: The device of a harness that was started without `--device`.
HARNESS_DEVICE = "cuda:0"

_FIELDS = frozenset(each.name for each in fields(EngineConfig))


def engine_config(
    pretrained: object, model: object, max_length: object, arguments: Mapping[str, Any]
) -> EngineConfig:
    """Return the configuration that `--model_args` ask for. Raises ConfigError for an unknown name or a wrong value.

    pretrained, model: two names of the same. max_length: the `hf` class' name of max_model_len.
    device: HARNESS_DEVICE, which the harness gives unasked, is "auto" where there is no GPU, as with `hf`.
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
        elif name not in _FIELDS:
            raise ConfigError(
                f"{name!r} is no argument of this model; of an engine there are {', '.join(sorted(_FIELDS))}"
            )
        else:
            values[name] = value
    if values.get("device") == HARNESS_DEVICE and resolve_device("auto").type == "cpu":
        values["device"] = "auto"
    return EngineConfig(**values)


def sampling_params(
    values: Mapping[str, Any], *, max_tokens: int, stop: list[str], end_token_id: int | None
) -> SamplingParams:
    """Return the sampling values of one group of generation_kwargs, except its stop texts and its length.

    values: as lm_eval.models.utils.normalize_gen_kwargs gives them. Greedy unless there is a temperature.
    Raises InvalidSampling for what is no sampling parameter.
    """
    given = {"temperature": 0.0, **values}
    if not given.pop("do_sample"):
        given["temperature"] = 0.0
    for name, neutral in NEUTRAL_GENERATION.items():
        if given.pop(name, neutral[0]) not in neutral:
            raise InvalidSampling(f"{name}={values[name]!r} is not built; leave it out")
    return SamplingParams.from_mapping(
        {
            **given,
            "max_tokens": max_tokens,
            "stop": stop,
            "stop_token_ids": [] if end_token_id is None else [end_token_id],
        }
    )
