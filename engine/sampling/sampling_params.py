"""SamplingParams: how to choose tokens for one request and when to stop.

Each field has a name, a neutral default and a range. A `column` also has the dtype of the sampler's array. Slots,
batches, graphs and warm-up take the columns from here: a new column needs only a row here, a row in sampling_rows.py,
and a function in each sampler.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from engine.errors import InvalidSampling
from engine.sampling import parameter_values
from engine.sampling.parameter_values import (
    MAX_COUNT,
    Range,
    brief,
    check_adapter_name,
    check_switch,
)
from engine.sampling.structured_params import StructuredOutputsParams, structured_outputs

MAX_NAME_CHARS = 64
MAX_LOGPROBS = 20  # the default of vLLM's max_logprobs

# Parameters of vLLM and OpenAI that callers may know and that are not built: the error says so.
NOT_BUILT = (
    "best_of", "detokenize", "flat_logprobs", "guided_decoding", "length_penalty", "logits_processors",
    "response_format", "stream", "suffix", "top_logprobs", "use_beam_search",
)  # fmt: skip


def integer(default: int | None, low: int, high: int) -> Any:
    """Make a field for an integer."""
    return field(default=default, metadata={"range": Range(low, high, integer=True)})


def number(default: float, low: float, high: float) -> Any:
    """Make a field for a number."""
    return field(default=default, metadata={"range": Range(low, high, integer=False)})


def column(default: float, low: int, high: int, dtype: str) -> Any:
    """Make a field that the sampler reads for each row. dtype: numpy's name; it holds every value in range."""
    is_integer = dtype.startswith("int")
    return field(default=default, metadata={"range": Range(low, high, is_integer), "dtype": dtype})


@dataclass(frozen=True)
class SamplingParams:
    """Names and meanings are vLLM's and OpenAI's. Raises InvalidSampling for an impossible value.

    max_tokens: the most new tokens.
    temperature: 0 is greedy: the highest logit, the lowest token id among equals.
    top_p, top_k, min_p: cuts of the distribution, applied in the order min_p, top_k, top_p; top_k of 0 or -1 is off.
    seed: with the position and the sample's index it fixes every choice; None draws a fresh seed.
    stop: text that ends the completion and is cut from it; one string or several.
    stop_token_ids: token ids that end the completion, beside the model's own end tokens.
    ignore_eos: go on past the model's end tokens.
    min_tokens: new tokens before any end token, stop token or stop string may end the completion.
    n: independent samples of the request.
    logprobs: give the log probabilities of each new token and of this many most likely tokens, 0 to
        MAX_LOGPROBS. None gives none. They come from the model's own distribution, before temperature and
        everything else that changes it.
    prompt_logprobs: the same for each token of the prompt but the first. The prefix cache saves none of this
        computing.
    presence_penalty, frequency_penalty: subtracted from the logit of each token that the completion has so
        far: the first one once, the second one as often as the token is there.
    repetition_penalty: divides the logit of each token that is in the prompt or the completion; a negative
        logit is multiplied instead.
    logit_bias: by token id, which may be text, what is added to its logit. Before the penalties.
    allowed_token_ids: no other token may be chosen; None allows all.
    bad_words: texts that the completion may not hold, at its beginning or behind a space. Each is tokenized
        by itself, and its last token is not chosen behind its other ones.
    thinking_token_budget: the most tokens of a reasoning span; behind these its end mark is forced.
    separate_reasoning: give what is in a reasoning span apart from the text.
    tools: in OpenAI's shape. Calls of these are given apart from the text.
    tool_choice: "required" for an answer that is a call of one of the tools, or {"type": "function", "function":
        {"name": ...}} for a call of that one. It decides the form of the text, in place of structured_outputs.
    parallel_tool_calls: False ends the completion behind its first call of a tool, so that it has one call at most.
    echo: give the prompt's text and its tokens too.
    reasoning_marks: the two texts before and behind a reasoning span; () takes those of the model's template or
        special tokens.
    include_stop_str_in_output: leave the stop string that ends the completion at the end of its text.
    skip_special_tokens: leave special tokens out of the text; stop strings are looked for in what remains.
    spaces_between_special_tokens: with special tokens in the text, leave the spaces that some tokenizers put
        between two of them.
    truncate_prompt_tokens: read only this number of the prompt's last tokens, be it token ids, text or a chat;
        -1 reads as many as leave room for one new token.
    structured_outputs: the form of the text; a pydantic model's class stands for JSON of its schema. The text ends
        only where the form is complete, or by its length. Where nothing can follow, it ends whatever min_tokens and
        ignore_eos say. No reasoning is split from it. With tools the text has this form or is one call of a tool.
    adapter: the LoRA adapter of this request, by its name in the engine's folder; None for the model alone.
    """

    max_tokens: int = integer(256, 1, MAX_COUNT)
    temperature: float = column(1.0, 0, 1_000_000, "float32")
    top_p: float = column(1.0, 0, 1, "float32")
    top_k: int = column(-1, -1, MAX_COUNT, "int32")
    min_p: float = column(0.0, 0, 1, "float32")
    seed: int | None = integer(None, -(2**63), 2**64 - 1)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = integer(0, 0, MAX_COUNT)
    n: int = integer(1, 1, 128)
    logprobs: int | None = integer(None, 0, MAX_LOGPROBS)
    prompt_logprobs: int | None = integer(None, 0, MAX_LOGPROBS)
    presence_penalty: float = number(0.0, -2, 2)
    frequency_penalty: float = number(0.0, -2, 2)
    repetition_penalty: float = number(1.0, 1e-6, 1_000_000)  # a logit stays finite
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    thinking_token_budget: int | None = integer(None, 0, MAX_COUNT)
    separate_reasoning: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    echo: bool = False
    reasoning_marks: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = integer(None, -1, MAX_COUNT)
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | type | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                allowed.check(name, value)
        for name in _SWITCHES:
            check_switch(name, getattr(self, name))
        if self.top_p == 0:
            raise InvalidSampling(
                "top_p must be above 0; for the likeliest token alone set temperature=0"
            )
        check_truncation(self.truncate_prompt_tokens)
        check_adapter_name(self.adapter)
        if self.min_tokens > self.max_tokens:
            raise InvalidSampling(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}"
            )
        for name, read in _READERS.items():
            object.__setattr__(self, name, read(getattr(self, name)))
        if self.has_form:
            if self.thinking_token_budget is not None:
                form = (
                    "structured_outputs hold" if self.tool_choice is None else "tool_choice holds"
                )
                raise InvalidSampling(
                    f"{form} for all of the text: no thinking_token_budget with that"
                )
            object.__setattr__(self, "separate_reasoning", False)

    @property
    def has_form(self) -> bool:
        """Whether the text must have a form, by structured_outputs or as a call of a tool."""
        return self.structured_outputs is not None or self.tool_choice is not None

    @property
    def edits_logits(self) -> bool:
        """Whether something beside the sampler's columns changes logits before a token is chosen."""
        has_penalties = (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )
        return (
            has_penalties
            or bool(self.logit_bias)
            or bool(self.bad_words)
            or self.allowed_token_ids is not None
        )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SamplingParams:
        """Build from names and values that came from outside, such as a job's keyword arguments.

        A value of None stands for the default. Raises InvalidSampling for a name that is unknown or not built
        yet: no name is ignored.
        """
        for name in mapping:
            if name not in _NAMES:
                problem = "is not built yet" if name in NOT_BUILT else "is no sampling parameter"
                near = get_close_matches(str(name)[:MAX_NAME_CHARS].lower(), _NAMES, n=1)
                hint = f"did you mean {near[0]}? " if near and name not in NOT_BUILT else ""
                raise InvalidSampling(
                    f"{brief(name)} {problem}; {hint}accepted are {', '.join(_NAMES)}"
                )
        values = {name: value for name, value in mapping.items() if value is not None}
        if not _is_plain(values):  # such as a number of numpy, which marshal would write as bytes
            return cls(**values)
        try:
            key = marshal.dumps(values, 2)  # without references: equal values have equal bytes
        except ValueError:  # a value that marshal cannot write, such as lists nested too deeply
            return cls(**values)
        return _remembered(key) if len(key) <= MAX_KEY_BYTES else cls(**values)


def _is_plain(value: object) -> bool:
    """Whether a value consists of Python's own mappings, lists, numbers and texts alone."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in (bool, int, float, str)


def check_truncation(truncate_prompt_tokens: int | None) -> None:
    """Raise InvalidSampling for an impossible truncate_prompt_tokens."""
    if truncate_prompt_tokens is not None:
        RANGES["truncate_prompt_tokens"].check("truncate_prompt_tokens", truncate_prompt_tokens)
        if truncate_prompt_tokens == 0:
            raise InvalidSampling(
                "truncate_prompt_tokens=0 leaves nothing of the prompt; -1 is what fits"
            )


def check_params(params: object, vocab_size: int) -> None:
    """Raise InvalidSampling unless params are SamplingParams that fit a vocabulary of that size."""
    if not isinstance(params, SamplingParams):
        raise InvalidSampling(f"params must be SamplingParams, got {type(params).__name__}")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        token_ids = getattr(params, name)
        if token_ids and (highest := max(token_ids)) >= vocab_size:
            raise InvalidSampling(
                f"token id {highest} of {name} is outside the vocabulary of {vocab_size}"
            )


_NAMES = tuple(sorted(parameter.name for parameter in fields(SamplingParams)))
RANGES: dict[str, Range] = {
    parameter.name: parameter.metadata["range"]
    for parameter in fields(SamplingParams)
    if "range" in parameter.metadata
}
#: Name and numpy's dtype of each column of the sampler.
COLUMNS: dict[str, str] = {
    parameter.name: parameter.metadata["dtype"]
    for parameter in fields(SamplingParams)
    if "dtype" in parameter.metadata
}
_SWITCHES = tuple(
    parameter.name for parameter in fields(SamplingParams) if isinstance(parameter.default, bool)
)
_OPTIONAL = frozenset(
    name for name in RANGES if SamplingParams.__dataclass_fields__[name].default is None
)
_READERS: dict[str, Callable[[object], object]] = {
    "stop": parameter_values.stop_strings,
    "stop_token_ids": parameter_values.stop_token_ids,
    "bad_words": parameter_values.bad_words,
    "allowed_token_ids": parameter_values.allowed_token_ids,
    "logit_bias": parameter_values.logit_bias,
    "tools": parameter_values.tools,
    "tool_choice": parameter_values.tool_choice,
    "reasoning_marks": parameter_values.reasoning_marks,
    "structured_outputs": structured_outputs,
}
MAX_KEY_BYTES = 16_384  # of values that are remembered


@lru_cache(maxsize=256)
def _remembered(key: bytes) -> SamplingParams:
    """Return the params of values that `marshal` wrote as `key`, from the cache if they came before.

    Many requests have the same values. The values themselves are no good key: 1, 1.0 and True are equal, and their
    bytes are not.
    """
    return SamplingParams(**marshal.loads(key))
