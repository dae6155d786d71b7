"""The engine's results: completions, and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Literal, NamedTuple

from engine.errors import AdapterGone

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """The natural log of the probability that the model gives a token.

    rank: 1 for the most likely token of the vocabulary; of equally likely ones the lower id comes first.
    decoded_token: the token's text, as it stands behind other text.
    partial_bytes: the token's bytes if they are only part of a character; decoded_token then has U+FFFD.
    """

    logprob: float
    rank: int
    decoded_token: str
    partial_bytes: bytes | None = None


@dataclass(frozen=True)
class LogLikelihood:
    """The likelihood of a continuation's tokens, each given all before it.

    logprob: the sum of their log probabilities.  is_greedy: greedy generation would have given them.
    token_logprobs, greedy_tokens: the same for each token.
    """

    logprob: float
    num_tokens: int
    is_greedy: bool
    token_logprobs: tuple[float, ...] = ()
    greedy_tokens: tuple[bool, ...] = ()

    @classmethod
    def of(
        cls, token_logprobs: tuple[float, ...], greedy_tokens: tuple[bool, ...]
    ) -> LogLikelihood:
        """Sum up these tokens' log probabilities."""
        return cls(
            fsum(token_logprobs),
            len(token_logprobs),
            all(greedy_tokens),
            token_logprobs,
            greedy_tokens,
        )


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The moments of a sequence's arrival, first token (if any) and end, in monotonic seconds."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float


class PartialText(NamedTuple):
    """The beginning of an unfinished completion: as much of its reasoning and text as is certain.

    reasoning: None if no reasoning has begun.  token_ids: all tokens generated so far.
    """

    reasoning: str | None
    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """A running request's progress in tokens. generation_tokens: of all its running samples."""

    prompt_tokens: int = 0
    prompt_tokens_left: int = 0
    generation_tokens: int = 0


@dataclass(frozen=True)
class Completion:
    """One finished sample of one request.

    index: numbers the samples of a request, 0 to n - 1.
    token_ids: all generated ids, including the end or stop token that ended it.
    text: without special tokens, and cut at a stop string.
    finish_reason: "stop" (end token, stop token, stop string), "length" (max_tokens, max_model_len),
        "error" (`error` says why), "abort" (given up by a caller that needs a record of it).
    num_cached_tokens: prompt tokens whose KV came from the prefix cache when the sequence was admitted.
    logprobs: if wanted, for each of token_ids a dict by token id: its own first, then the most likely ones.
    embedding: with PoolingParams, float32; such a completion has no token.
    class_scores: with ClassParams, each class's probability by its label. For a head of a single class it is the head's
        number. For two texts that number is turned into a probability, unless the checkpoint says otherwise.
    reasoning: with SamplingParams.separate_reasoning, the reasoning span, which `text` then leaves out.
    tool_calls: with SamplingParams.tools, the calls, as {"name", "arguments": their JSON}. `text` leaves them out.
    tool_call_error: why something that looks like a call is no call. It stays in `text`.
    prompt_text, prompt_tokens: with SamplingParams.echo, the prompt's text and that of each of its tokens.
    prompt_logprobs: for each token of the prompt; the first one has none.
    num_continued: tokens of token_ids that came with the request; cached ones count in num_cached_tokens.
    lacks_adapter: it ended with an error because the files that its adapter was pinned to are not there now.
    loglikelihoods: of each continuation of ScoringParams; such a completion has no token, and ends with "stop".
    metrics: None for scores and refused requests; ignored when completions are compared.
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    loglikelihoods: list[LogLikelihood] | None = None
    embedding: list[float] | None = None
    class_scores: dict[str, float] | None = None
    reasoning: str | None = None
    prompt_text: str | None = None
    prompt_tokens: list[str] | None = None
    tool_calls: list[dict[str, str]] | None = None
    tool_call_error: str | None = None
    num_continued: int = 0
    lacks_adapter: bool = False
    metrics: RequestMetrics | None = field(default=None, compare=False, repr=False)

    @classmethod
    def refused(cls, request_id: str, error: Exception) -> Completion:
        """Return a completion that stands for all samples of a request that could not run."""
        return cls(
            request_id,
            index=0,
            token_ids=[],
            text="",
            finish_reason="error",
            num_prompt_tokens=0,
            num_cached_tokens=0,
            error=str(error),
            lacks_adapter=isinstance(error, AdapterGone),
        )


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and the current state, in sequences, tokens and blocks.

    max_running: the most sequences that ran at once.
    prefill_tokens: computed for prompts, and again for preempted sequences.
    cached_tokens: taken from the prefix cache instead.
    decode_tokens: computed for running sequences, one at a time or with guesses.
    generation_tokens: sampled so far, those of unfinished sequences included.
    step_seconds: by part of a step: schedule, prepare, launch (on a CPU all computing), wait (for the
        device), update, detokenize.
    num_scheduled: the sequences of each step, added up.
    adapter_steps: steps with rows of adapters, which run without CUDA graphs.
    batch_sizes: steps by number of sequences: 1, 2, up to 4, up to 8 and so on; the last count has all larger ones.
    """

    num_steps: int
    num_running: int
    max_running: int
    num_waiting: int
    num_preemptions: int
    prefill_tokens: int
    cached_tokens: int
    decode_tokens: int
    num_blocks: int
    free_blocks: int
    cpu_threads: int = 0
    generation_tokens: int = 0
    step_seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    num_scheduled: int = 0
    batch_sizes: tuple[int, ...] = ()
    adapter_steps: int = 0
