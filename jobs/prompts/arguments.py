"""Which prompts and sampling values a job may carry, checked before the engine sees them.

What clients of OpenAI's API send whether they need it or not is taken where it changes nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.common.display import MAX_SHOWN_CHARS, brief, is_unicode
from jobs.errors import InvalidJob, InvalidValue, check_limit
from jobs.prompts.response_options import with_structured_outputs

#: A prompt beyond any context length only costs tokenizer time and Redis memory.
MAX_PROMPT_BYTES = 1 << 20
#: A job holds all its answers until the last one is there; what is larger is a Parquet run.
MAX_PROMPTS = 10_000
MAX_CHOICES = 10_000

#: Sampling values that are never text: text here means that `=` was written where `:=` was meant.
NOT_TEXT = frozenset(
    {
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
    }
    | {"n", "stop_token_ids", "ignore_eos", "logprobs", "presence_penalty", "frequency_penalty"}
    | {"prompt_logprobs", "top_logprobs", "echo", "thinking_token_budget", "separate_reasoning"}
    | {
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "truncate_prompt_tokens",
    }
    | {"split_special_tokens"}
    | {
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "structured_outputs",
    }
)

#: Those of a run that may stand beside its other arguments, as on the command line.
SAMPLING_NAMES = NOT_TEXT | {"stop"}

Prompt = str | list[int]


@dataclass(frozen=True)
class Unusable:
    """Stands for one of a list of prompts that cannot be asked; the others go on."""

    reason: str


def text_problem(text: object, what: str = "prompt") -> str | None:
    """Say why a value can be no prompt's text; None if it can. what: the value's name."""
    if not isinstance(text, str):
        return f"{what} is {type(text).__name__}, expected a string"
    if not is_unicode(text):
        return f"{what} is not valid Unicode: it holds half of a surrogate pair"
    if (num_bytes := len(text.encode())) > MAX_PROMPT_BYTES:
        return (
            f"{what} has {num_bytes} bytes, more than the limit of {MAX_PROMPT_BYTES}: shorten it"
        )
    return None


def checked_text(text: Any, what: str) -> str:
    """Return a text. Raises InvalidJob for a value that can be no prompt's text."""
    problem = text_problem(text, what)
    if problem:
        raise InvalidJob(problem)
    return str(text)


def parse_prompts(prompt: object) -> list[Prompt | Unusable]:
    """Return one entry for each prompt: a string, token ids, a list of strings or a list of token ids.

    Of a list, what can be no prompt is Unusable. Raises InvalidJob where nothing is left, and beyond MAX_PROMPTS.
    """
    if not isinstance(prompt, list) or _are_token_ids(prompt):
        return [one_prompt(prompt, "prompt")]
    if not prompt:
        raise InvalidJob("prompt is an empty list, expected at least one prompt")
    check_limit(
        len(prompt), MAX_PROMPTS, "the job holds {} prompts", "split it, or score a Parquet file"
    )
    prompts: list[Prompt | Unusable] = []
    for number, item in enumerate(prompt):
        try:
            prompts.append(one_prompt(item, f"prompt {number}"))
        except InvalidJob as error:
            prompts.append(Unusable(str(error)))
    unusable = [item for item in prompts if isinstance(item, Unusable)]
    if len(unusable) == len(prompts):
        raise InvalidJob(unusable[0].reason)
    return prompts


def one_prompt(prompt: object, what: str) -> Prompt:
    """Return a prompt that is a string or token ids. Raises InvalidJob."""
    if isinstance(prompt, list) and _are_token_ids(prompt):
        check_limit(len(prompt), MAX_PROMPT_BYTES, f"{what} has {{}} token ids", "shorten it")
        return list(prompt)
    if not isinstance(prompt, str):
        raise InvalidJob(
            f"{what} is {type(prompt).__name__}, expected a string or a non-empty list of token ids"
        )
    return checked_text(prompt, what)


def parse_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `sampling` without what changes nothing; names and ranges are the engine's to check. Raises
    InvalidJob for a number that arrived as text, and for what is known to be not built."""
    for name, value in sampling.items():
        if name in NOT_TEXT and isinstance(value, str):
            raise InvalidValue(
                f"{name} arrived as the text {{}}, expected JSON: "
                f"with rq enqueue write {name}:={{}}, in Python and JSON pass it without quotes",
                brief(value),
                value[:MAX_SHOWN_CHARS],
            )
    return without_neutral(
        {name: v for name, v in sampling.items() if v is not None or name not in SAMPLING_NAMES}
    )


def check_choices(num_prompts: int, sampling: Mapping[str, Any]) -> None:
    """Raise InvalidJob when the job would hold more than MAX_CHOICES answers, `n` for each prompt."""
    n = sampling.get("n", 1)
    if isinstance(n, int):
        what = f"the job's {num_prompts} prompts ask for {{}} answers"
        check_limit(num_prompts * n, MAX_CHOICES, what, "split it, or score a Parquet file")


def _are_token_ids(items: list[Any]) -> bool:
    return set(map(type, items)) == {
        int
    }  # bool is not among them; a loop would take longer than the rest


#: Names that are not built, with the values at which they would change nothing; null always is one.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("add_generation_prompt", "detokenize", "parallel_tool_calls"), (True,)),
    **dict.fromkeys(
        ("continue_final_message", "return_token_ids", "store", "stream", "use_beam_search"),
        (False,),
    ),
    **dict.fromkeys(("audio", "guided_decoding", "prediction", "reasoning_effort"), ()),
    **dict.fromkeys(("stream_options", "web_search_options"), ()),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "verbosity": ("medium",),
}

#: Names that tell a service's operator something, and the model nothing.
SAID_OF_IT = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "user"})


def without_neutral(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names they have here, without neutral ones. Raises InvalidJob for what is not built."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if name not in NEUTRAL and name not in SAID_OF_IT:
            kept[name] = value
        elif name in NEUTRAL and value is not None and not _is_neutral(name, value, values):
            neutral = (
                " or ".join(map(json.dumps, (None, *NEUTRAL[name])))
                .replace("{", "{{")
                .replace("}", "}}")
            )
            raise InvalidValue(
                f"{name} is {{}}, not built yet: leave it out, or send {neutral}", brief(value)
            )
    newer = kept.pop("max_completion_tokens", None)
    if newer is not None:
        if kept.get("max_tokens") not in (None, newer):
            raise InvalidJob(
                "max_tokens and max_completion_tokens are one value, and differ: send one of them"
            )
        kept["max_tokens"] = newer
    return with_structured_outputs(kept)


def _is_neutral(name: str, value: Any, values: Mapping[str, Any]) -> bool:
    if name == "best_of" and type(value) is int and value == values.get("n"):
        return True
    return any(
        value == each and isinstance(value, bool) is isinstance(each, bool)
        for each in NEUTRAL[name]
    )
