"""Records of items under way. Another execution reads them to go on where the last execution stopped."""

from array import array
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple, Self

from jobs.items.item import Samples

Reply = str | None | Sequence[Samples]
"""What an item was sent after a step: the completions of the step's requests, or the outcome of the step's check."""

Tokens = Mapping[int, Sequence[int]]
"""The tokens so far of each sample of one request, by the sample's index."""


class PlainLogprob(NamedTuple):
    """A token's log probability; see engine.Logprob."""

    logprob: float
    rank: int
    decoded_token: str
    partial_bytes: bytes | None = None


@dataclass(frozen=True, slots=True)
class PlainCompletion:
    """A completion as plain values; see engine.Completion."""

    index: int = 0
    token_ids: Sequence[int] = ()
    text: str = ""
    finish_reason: str = "stop"
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_continued: int = 0
    error: str | None = None
    reasoning: str | None = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    tool_calls: Any = None
    tool_call_error: str | None = None
    prompt_text: str | None = None
    prompt_tokens: Any = None
    embedding: Any = None
    loglikelihoods: Any = None
    class_scores: Any = None
    lacks_adapter: bool = False

    @classmethod
    def of(cls, completion: Any, **changes: Any) -> Self:
        """Copy an engine.Completion, with some values changed."""
        values = {field.name: getattr(completion, field.name) for field in fields(cls)}
        return cls(**{**values, **changes})


#: Values that no record has, because the engine can make them again in one pass.
_NOT_WRITTEN = ("prompt_text", "prompt_tokens", "embedding", "loglikelihoods", "class_scores")

_DEFAULTS = {
    field.name: field.default for field in fields(PlainCompletion) if field.default is not MISSING
}


@dataclass(frozen=True)
class Progress:
    """How far an item has come: the replies that it was sent, and what its present step has received.

    replies: the replies to the earlier steps, in order.
    received: the completions of the present step's completed requests, by the number of the request in the step.
    tokens: the tokens that the present step's open requests have so far, by the number of the request in the step.
    num_tokens: how many tokens were generated for all completions of the item.
    """

    replies: Sequence[Reply] = ()
    received: Mapping[int, Samples] = field(default_factory=dict)
    tokens: Mapping[int, Tokens] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """A key that orders the records of one item: the key of a record with more progress is greater."""
        num_tokens_of_open_requests = 0
        for tokens_by_sample in self.tokens.values():
            num_tokens_of_open_requests += sum(map(len, tokens_by_sample.values()))
        return len(self.replies), len(self.received), num_tokens_of_open_requests

    @property
    def can_be_written(self) -> bool:
        """Whether there is progress, and a record can hold each value of its completions; see _NOT_WRITTEN."""
        completions: list[Any] = []
        for samples in self.received.values():
            completions += samples
        for reply in self.replies:
            if reply is None or isinstance(reply, str):
                continue  # the outcome of a check has no completions
            for samples in reply:
                completions += samples
        for completion in completions:
            if any(getattr(completion, name) is not None for name in _NOT_WRITTEN):
                return False
        # The key counts replies, completions and tokens. Without progress, all of these numbers are 0.
        return any(self.sort_key)

    def to_json(self) -> Any:
        """Return the record as JSON for `from_json`."""
        received = [[number, _samples_json(samples)] for number, samples in self.received.items()]
        tokens = []
        for number, tokens_by_sample in self.tokens.items():
            tokens.append([number, _tokens_json(tokens_by_sample)])
        return {
            "replies": [_reply_json(reply) for reply in self.replies],
            "received": received,
            "tokens": tokens,
            "num_tokens": self.num_tokens,
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read what `to_json` returned. Raises ValueError, TypeError or KeyError for anything else."""
        return cls(
            replies=[_reply(reply) for reply in value["replies"]],
            received={int(number): _samples(samples) for number, samples in value["received"]},
            tokens={int(number): _tokens(pairs) for number, pairs in value["tokens"]},
            num_tokens=int(value["num_tokens"]),
        )


#: The progress of an item that has no reply, completion or token yet.
NOTHING = Progress()


def _reply_json(reply: Reply) -> Any:
    """Return the reply to a step as JSON."""
    if reply is None or isinstance(reply, str):
        return reply
    return [_samples_json(samples) for samples in reply]


def _reply(value: Any) -> Reply:
    """Read what `_reply_json` returned."""
    if value is None or isinstance(value, str):
        return value
    return [_samples(samples) for samples in value]


def _tokens_json(tokens_by_sample: Mapping[int, Sequence[int]]) -> list[Any]:
    """Return the token ids of a request's samples as JSON: pairs of a sample's index and its packed token ids."""
    return [[index, _packed(token_ids)] for index, token_ids in tokens_by_sample.items()]


def _tokens(value: Any) -> dict[int, list[int]]:
    """Read what `_tokens_json` returned."""
    return {int(index): _unpacked(packed) for index, packed in value}


def _samples_json(samples: Samples) -> list[Any]:
    """Return a request's completions as JSON."""
    return [_completion_json(completion) for completion in samples]


def _samples(value: Any) -> list[PlainCompletion]:
    """Read what `_samples_json` returned."""
    return [_completion(completion) for completion in value]


def _completion_json(completion: Any) -> dict[str, Any]:
    """Return a completion as JSON. Values that equal their defaults are left out."""
    values: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        value = getattr(completion, name)
        if value is None or value == default:
            continue
        if name == "token_ids":
            value = _packed(value)
        elif name in ("logprobs", "prompt_logprobs"):
            value = _logprobs_json(value)
        values[name] = value
    return values


def _completion(values: Mapping[str, Any]) -> PlainCompletion:
    """Read what `_completion_json` returned."""
    fields_of_completion = dict(values)
    fields_of_completion["token_ids"] = _unpacked(values.get("token_ids", ""))
    for name in ("logprobs", "prompt_logprobs"):
        if name in values:
            fields_of_completion[name] = _logprobs(values[name])
    return PlainCompletion(**fields_of_completion)


def _logprobs_json(positions: Any) -> list[Any]:
    """Return log probabilities as JSON. A prompt's first position has none."""
    return [None if logprobs is None else _position_json(logprobs) for logprobs in positions]


def _position_json(logprobs: Mapping[int, Any]) -> list[Any]:
    """Return the log probabilities at one position as JSON: a list of fields for each token."""
    tokens = []
    for token_id, entry in logprobs.items():
        partial_hex = None if entry.partial_bytes is None else entry.partial_bytes.hex()
        tokens.append([token_id, entry.logprob, entry.rank, entry.decoded_token, partial_hex])
    return tokens


def _logprobs(positions: Any) -> list[Any]:
    """Read what `_logprobs_json` returned."""
    return [None if tokens is None else _position(tokens) for tokens in positions]


def _position(tokens: Any) -> dict[int, PlainLogprob]:
    """Read what `_position_json` returned."""
    logprobs = {}
    for token_id, logprob, rank, decoded_token, partial_hex in tokens:
        partial_bytes = None if partial_hex is None else bytes.fromhex(partial_hex)
        logprobs[token_id] = PlainLogprob(logprob, rank, decoded_token, partial_bytes)
    return logprobs


def _packed(token_ids: Sequence[int]) -> str:
    """Return token ids as a short text: base64 of four bytes for each."""
    return b64encode(array("i", token_ids).tobytes()).decode()


def _unpacked(text: str) -> list[int]:
    """Read what `_packed` returned."""
    return array("i", b64decode(text)).tolist()
