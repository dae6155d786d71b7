"""What clients of OpenAI's API send whether they need it or not: taken where it changes nothing."""

import json
from collections.abc import Mapping
from typing import Any

from jobs.common.display import MAX_NAME_CHARS, brief
from jobs.errors import InvalidValue
from jobs.prompts.response_options import with_structured_outputs

#: Values of names that are not built at which they change nothing; null is one of each.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_decoding": (),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

#: What says something of a request to a service's operator, and nothing to a model.
SAID_OF_IT = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "user"})


def without_neutral(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names they have here, without neutral ones. Raises InvalidJob for what is not built."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if name not in NEUTRAL and name not in SAID_OF_IT:
            kept[name] = value
        elif name in NEUTRAL and value is not None and not _is_neutral(name, value, values):
            neutral = " or ".join(map(json.dumps, (None, *NEUTRAL[name]))).replace("{", "{{").replace("}", "}}")
            raise InvalidValue(f"{name} is {{}}, not built yet: leave it out, or send {neutral}", brief(value))
    return with_structured_outputs(_with_one_max_tokens(kept))


def _is_neutral(name: str, value: Any, values: Mapping[str, Any]) -> bool:
    if name == "best_of" and type(value) is int and value == values.get("n"):
        return True
    return any(_kind(value) is _kind(neutral) and value == neutral for neutral in NEUTRAL[name])


def _kind(value: object) -> type:
    """Numbers are of one kind in JSON; truth values are none."""
    return float if type(value) is int else type(value)


def _with_one_max_tokens(values: dict[str, Any]) -> dict[str, Any]:
    newer = values.pop("max_completion_tokens", None)
    if newer is None:
        return values
    older = values.get("max_tokens")
    if older is not None and older != newer:
        raise InvalidValue(
            "max_tokens is {} and max_completion_tokens is {}, and they are one value: send one of them",
            brief(older)[:MAX_NAME_CHARS],
            brief(newer)[:MAX_NAME_CHARS],
        )
    return {**values, "max_tokens": newer}
