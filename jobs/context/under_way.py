"""What is kept of prompts under way, so that another execution goes on where one was, and a job's key that holds it."""

import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from redis import Redis

from jobs.common.keys import JOURNAL_TTL_S, JOURNALS_KEY, journal_key


@dataclass(frozen=True, slots=True)
class KeptCompletion:
    index: int
    token_ids: Sequence[int]
    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str | None
    reasoning: str | None
    num_continued: int = 0
    logprobs: Any = None
    prompt_logprobs: Any = None
    prompt_text: None = None
    prompt_tokens: None = None
    embedding: None = None
    loglikelihoods: None = None
    class_scores: None = None
    tool_calls: Any = None
    tool_call_error: str | None = None


_NAMES = tuple(KeptCompletion.__dataclass_fields__)
_KEPT, _NOT_KEPT, _OF_TOOLS = _NAMES[2:8], _NAMES[11:-2], _NAMES[-2:]


class KeptLogprob(NamedTuple):
    """A token's log probability in a journal; see engine.Logprob."""

    logprob: float
    rank: int
    decoded_token: str
    partial_bytes: bytes | None = None

    @classmethod
    def from_json(cls, logprob: float, rank: int, decoded_token: str, partial_hex: str | None = None) -> Self:
        """Read an entry of a journal."""
        return cls(logprob, rank, decoded_token, None if partial_hex is None else bytes.fromhex(partial_hex))


def _logprob_json(entry: Any) -> list[Any]:
    """Return an engine.Logprob or KeptLogprob as JSON."""
    plain = [entry.logprob, entry.rank, entry.decoded_token]
    return plain if entry.partial_bytes is None else [*plain, entry.partial_bytes.hex()]


@dataclass(frozen=True)
class UnderWay:
    """How far a prompt was.

    delivered: place of a request among those of the prompt, and its completions; num_tokens: generated for these.
    so_far: the tokens of those that wait, by place and sample.
    """

    delivered: Sequence[tuple[int, Sequence[Any]]] = ()
    so_far: Mapping[int, Mapping[int, Sequence[int]]] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def length(self) -> tuple[int, int]:
        return len(self.delivered), sum(len(each) for samples in self.so_far.values() for each in samples.values())

    @property
    def can_be_kept(self) -> bool:
        """Whether it is worth keeping, and has nothing but what is kept."""
        completions = [each for _, delivered in self.delivered for each in delivered]
        return any(self.length) and all(getattr(each, name) is None for each in completions for name in _NOT_KEPT)

    def to_json(self) -> Any:
        delivered = [[place, [_kept(each) for each in completions]] for place, completions in self.delivered]
        so_far = [
            [place, [[index, _packed(tokens)] for index, tokens in samples.items()]]
            for place, samples in self.so_far.items()
        ]
        return [delivered, so_far, self.num_tokens]

    @classmethod
    def from_json(cls, value: Any) -> Self:
        delivered, so_far, num_tokens = value
        return cls(
            [(place, [_completion(*each) for each in completions]) for place, completions in delivered],
            {place: {index: _unpacked(each) for index, each in samples} for place, samples in so_far},
            num_tokens,
        )


def _kept(completion: Any) -> list[Any]:
    kept = [completion.index, _packed(completion.token_ids), *(getattr(completion, name) for name in _KEPT)]
    kept += [_entries(each) for each in (completion.logprobs, completion.prompt_logprobs)]
    of_tools = [getattr(completion, name) for name in _OF_TOOLS]
    return kept + of_tools if any(of_tools) else kept


def _completion(index: int, token_ids: str, *others: Any) -> KeptCompletion:
    kept, (logprobs, of_prompt, *of_tools) = others[: len(_KEPT)], others[len(_KEPT) :]
    own = {"logprobs": _logprobs(logprobs), "prompt_logprobs": _logprobs(of_prompt)}
    own |= dict(zip(_OF_TOOLS, of_tools, strict=False))
    return KeptCompletion(index, _unpacked(token_ids), **dict(zip(_KEPT, kept, strict=True)), **own)


def _entries(found: Any) -> Any:
    return found and [
        each and [[token_id, *_logprob_json(entry)] for token_id, entry in each.items()] for each in found
    ]


def _logprobs(kept: Any) -> Any:
    return kept and [each and {token: KeptLogprob.from_json(*entry) for token, *entry in each} for each in kept]


def _packed(token_ids: Sequence[int]) -> str:
    return b64encode(array("i", token_ids).tobytes()).decode()


def _unpacked(text: str) -> list[int]:
    return array("i", b64decode(text)).tolist()


#: Of one job: it is written whole each time, and comes with the job's claim.
MAX_BYTES = 256 << 10


class LeftPrompt(NamedTuple):
    """How far a prompt was, and for each answer that it had the reason why a check refused it.

    asked: a hash of what the prompt asks. Its tokens are continued only if the prompt still asks the same.
    """

    under_way: UnderWay
    reasons: Sequence[str | None]
    asked: str


class JobJournal:
    """The journal of one execution of a job: a line that says whose it is, and a line for each prompt.

    whose: the job, when it was created, its payload and model. found: the key's value when the job was claimed.
    lease: a sorted set, and the execution's member in it.
    """

    def __init__(
        self, connection: Redis, job_id: str, whose: str, found: bytes | None, lease: tuple[str, str] | None = None
    ) -> None:
        self._connection, self._job_id, self._whose = connection, job_id, whose
        self._found, self._lease = found, lease

    def read(self) -> dict[int, LeftPrompt]:
        """Return what is left of the job's prompts, by their places: nothing of another job or model."""
        whose, *lines = (self._found or b"").decode(errors="replace").split("\n")
        try:
            prompts = list(map(json.loads, lines if whose == self._whose else ()))
            return {
                place: LeftPrompt(UnderWay.from_json(was), reasons, asked) for place, was, reasons, asked in prompts
            }
        except (ValueError, TypeError, KeyError, RecursionError):  # damaged: it only saves time
            return {}

    def write(self, prompts: Iterable[tuple[int, LeftPrompt]]) -> None:
        contents = self._whose
        for place, left in prompts:
            line = json.dumps([place, left.under_way.to_json(), left.reasons, left.asked])
            if len(contents) + len(line) < MAX_BYTES:
                contents += "\n" + line
        if self._lease is None or self._connection.zscore(*self._lease) is not None:
            with self._connection.pipeline(transaction=False) as pipe:
                pipe.set(journal_key(self._job_id), contents, ex=JOURNAL_TTL_S)
                pipe.sadd(JOURNALS_KEY, self._job_id)
                pipe.execute()
