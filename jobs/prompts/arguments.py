"""Checks a job's prompts and sampling values, before the engine sees them.

Arguments that OpenAI's clients always send are accepted if they change nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.common.display import MAX_SHOWN_CHARS, brief
from jobs.context.adapters import ADAPTER
from jobs.context.values import some_text, truth
from jobs.errors import InvalidJob, InvalidValue, check_limit, wrong_value_error

#: The most bytes of a prompt. A longer prompt exceeds every model's length, and would only cost the tokenizer's time
#: and Redis' memory.
MAX_PROMPT_BYTES = 1 << 20
#: The most prompts and the most choices of a job. A job holds all its answers until the last one is there. Larger work
#: is a run over files.
MAX_PROMPTS = 10_000
MAX_CHOICES = 10_000

#: Sampling values that are never text. If such a value is text, somebody wrote `=` in place of `:=` for RQ's CLI.
NOT_TEXT = frozenset(
    {
        "allow_whitespace",
        "allowed_token_ids",
        "bad_words",
        "echo",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "min_p",
        "min_tokens",
        "n",
        "parallel_tool_calls",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_penalty",
        "response_format",
        "seed",
        "separate_reasoning",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "split_special_tokens",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_logprobs",
        "top_p",
        "truncate_prompt_tokens",
    }
)

#: The option of chats and templates that says whether control tokens in messages and values are read as plain text.
SPLIT_TOKENS = "split_special_tokens"
#: A variable of chat templates that OpenAI's clients send as an argument of its own.
EFFORT = "reasoning_effort"
#: The option that says whether JSON answers may have blanks and line breaks between their parts.
WHITESPACE = "allow_whitespace"
#: Options that only chats have.
CHAT_ONLY = ("chat_template_kwargs", EFFORT, "tool_choice", "tools")

#: Sampling values that a run takes as arguments of their own, like the command line.
SAMPLING_NAMES = NOT_TEXT | {"stop", ADAPTER}

MAX_MODEL_CHARS = 4096

Prompt = str | list[int]


@dataclass(frozen=True)
class Unusable:
    """Takes the place of a prompt that cannot be asked, in a list whose other prompts are asked.

    reason: why the prompt cannot be asked.
    """

    reason: str


def parse_model(model: object) -> str | None:
    """Return the model that an argument names; None if the argument is None. Raises InvalidJob if it is no name."""
    if model is None:
        return None
    return some_text("model", model, MAX_MODEL_CHARS)


def text_problem(text: object, name: str = "prompt") -> str | None:
    """Return why a value cannot be a prompt's text; None if it can be one. name: the value's name in the error."""
    if not isinstance(text, str):
        return f"{name} is {type(text).__name__}, expected a string"
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        return f"{name} is not valid Unicode: it holds half of a surrogate pair"
    if num_bytes > MAX_PROMPT_BYTES:
        return (
            f"{name} has {num_bytes} bytes, more than the limit of {MAX_PROMPT_BYTES}: shorten it"
        )
    return None


def checked_text(text: Any, name: str) -> str:
    """Return a text as it is. Raises InvalidJob for a value that cannot be a prompt's text."""
    problem = text_problem(text, name)
    if problem:
        raise InvalidJob(problem)
    return str(text)


def parse_prompts(prompt: object) -> list[Prompt | Unusable]:
    """Return the prompts of an argument: a string, a list of token ids, or a list of such prompts.

    An entry of a list that cannot be a prompt is Unusable. Raises InvalidJob if all entries are unusable, or if there
    are more than MAX_PROMPTS.
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


def one_prompt(prompt: object, name: str) -> Prompt:
    """Return one prompt: a string or token ids. name: the prompt's name in errors. Raises InvalidJob."""
    if isinstance(prompt, list) and _are_token_ids(prompt):
        check_limit(len(prompt), MAX_PROMPT_BYTES, f"{name} has {{}} token ids", "shorten it")
        return list(prompt)
    if not isinstance(prompt, str):
        raise InvalidJob(
            f"{name} is {type(prompt).__name__}, expected a string or a non-empty list of token ids"
        )
    return checked_text(prompt, name)


def parse_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `sampling` without values that change nothing. The engine checks names and ranges later.

    Raises InvalidJob for a number that arrived as text, and for an argument that is not supported.
    """
    for name, value in sampling.items():
        if name in NOT_TEXT and isinstance(value, str):
            raise InvalidValue(
                f"{name} arrived as the text {{}}, expected JSON: "
                f"with rq enqueue write {name}:={{}}, in Python and JSON pass it without quotes",
                brief(value),
                value[:MAX_SHOWN_CHARS],
            )
    values = {}
    for name, value in sampling.items():
        # A known name with null is left out. An unknown name is kept, because the engine must refuse it.
        if value is not None or name not in SAMPLING_NAMES:
            values[name] = value
    return without_neutral(values)


def refuse_chat_options(values: Mapping[str, Any]) -> None:
    """Raise InvalidJob for an option that only chats have."""
    for name in CHAT_ONLY:
        if values.get(name) is not None:
            raise InvalidJob(
                f"{name} belongs to a chat, because a prompt that is a text has no chat template"
            )


def splits_control_tokens(values: Mapping[str, Any]) -> bool:
    """Whether control tokens in messages and in the values of a template are read as plain text. Raises InvalidJob."""
    splits = values.get(SPLIT_TOKENS)
    if splits is not None and not isinstance(splits, bool):
        raise wrong_value_error(SPLIT_TOKENS, splits, "true or false")
    return splits is not False


def check_choices(num_prompts: int, sampling: Mapping[str, Any]) -> None:
    """Raise InvalidJob if a job would have more than MAX_CHOICES answers. Each prompt has `n` answers."""
    n = sampling.get("n", 1)
    if isinstance(n, int):  # the engine refuses any other n
        problem = f"the job's {num_prompts} prompts ask for {{}} answers"
        check_limit(num_prompts * n, MAX_CHOICES, problem, "split it, or score a Parquet file")


def _are_token_ids(items: list[Any]) -> bool:
    """Whether a list has items, and all of them are integers, not truth values."""
    return set(map(type, items)) == {int}  # a loop would take longer than all other checks together


#: Arguments that are not built, each with the values that change nothing. Null changes nothing in any of them.
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

#: Arguments for the operator of a service. They change no answer.
FOR_OPERATORS = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "user"})


def without_neutral(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that change an answer. Arguments in NEUTRAL and FOR_OPERATORS are left out.

    An argument that has two names gets one name. Raises InvalidJob if an argument of NEUTRAL has a value that would
    change an answer.
    """
    used: dict[str, Any] = {}
    for name, value in values.items():
        if name in FOR_OPERATORS:
            continue
        if name not in NEUTRAL:
            used[name] = value
        elif value is not None and not is_neutral(name, value, values):
            neutral_values = " or ".join(map(json.dumps, (None, *NEUTRAL[name])))
            # The message is a format, in which braces are doubled.
            neutral_values = neutral_values.replace("{", "{{").replace("}", "}}")
            raise InvalidValue(
                f"{name} is {{}}, not built yet: leave it out, or send {neutral_values}",
                brief(value),
            )
    if used.get("parallel_tool_calls") is True:
        # The default is left out, so that equal requests have equal values.
        del used["parallel_tool_calls"]
    used = _with_max_tokens(used)
    return with_structured_outputs(used)


def _with_max_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in which `max_tokens` takes the place of `max_completion_tokens`, OpenAI's newer name.

    Raises InvalidJob if both names have values that differ.
    """
    renamed = dict(values)
    max_completion_tokens = renamed.pop("max_completion_tokens", None)
    if max_completion_tokens is not None:
        if renamed.get("max_tokens") not in (None, max_completion_tokens):
            raise InvalidJob(
                "max_tokens and max_completion_tokens are one value, and differ: send one of them"
            )
        renamed["max_tokens"] = max_completion_tokens
    return renamed


def is_neutral(name: str, value: Any, values: Mapping[str, Any]) -> bool:
    """Whether an argument of NEUTRAL has a value that changes nothing. values: all arguments."""
    if name == "best_of" and type(value) is int and value == values.get("n"):
        return True
    for neutral in NEUTRAL[name]:
        # In Python, 1 equals True. Here they mean different things, so a truth value equals only a truth value.
        is_of_same_kind = isinstance(value, bool) == isinstance(neutral, bool)
        if is_of_same_kind and value == neutral:
            return True
    return False


def with_structured_outputs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in which only `structured_outputs` says what form a text must have. Raises InvalidJob.

    The values of `response_format` and `allow_whitespace` are moved into `structured_outputs`.
    """
    form_names = ("response_format", WHITESPACE, "structured_outputs")
    if values.keys().isdisjoint(form_names):
        return dict(values)
    remaining = {name: value for name, value in values.items() if name not in form_names}
    form = values.get("structured_outputs")
    from_format = _form_of(values.get("response_format"))
    if form is not None and from_format is not None:
        raise InvalidJob(
            "response_format and structured_outputs each say what the text must be: send one"
        )
    if form is None:
        form = from_format
    if truth(WHITESPACE, values.get(WHITESPACE)):
        if not isinstance(form, dict):
            raise InvalidJob(
                f"{WHITESPACE} is for answers that are JSON: give response_format or structured_outputs too"
            )
        form = {**form, WHITESPACE: True}
    if form is not None:
        remaining["structured_outputs"] = form
    return remaining


def _form_of(response_format: Any) -> dict[str, Any] | None:
    """Return OpenAI's response_format as structured outputs; None if any text is allowed. Raises InvalidJob."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise wrong_value_error(
            "response_format",
            response_format,
            "an object whose type is text, json_object or json_schema",
        )
    named_schema = response_format.get("json_schema")
    if not isinstance(named_schema, dict):
        raise wrong_value_error(
            "json_schema of response_format", named_schema, '{"name": ..., "schema": ...}'
        )
    schema = named_schema.get("schema")
    return {"json_object": True} if schema is None else {"json": schema}
