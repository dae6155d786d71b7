"""Sequence: one prompt with the tokens generated for it so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum, auto
from typing import Protocol

import numpy as np

from engine.errors import InvalidRequest, NoToken
from engine.sampling.logit_edits import SequenceEdits
from engine.sampling.sampling_params import SamplingParams
from engine.schedule.logprobs import NOT_WANTED, RowLogprobs, num_top
from engine.schedule.outputs import FinishReason, RequestProgress
from engine.schedule.pictures import PromptPictures
from engine.schedule.pooled import PooledStates
from engine.schedule.prepared_prompt import BlockKey
from engine.schedule.score_tree import ScoreTree, Targets
from engine.structured.matcher import Matcher
from engine.text.stop_strings import StopStrings


class SequenceStatus(Enum):
    """The state of a sequence. Only the scheduler changes it."""

    HELD = auto()  # until another one of its request, which computes its first tokens, is finished
    WAITING = auto()
    RUNNING = auto()
    ENDING = auto()  # its last token is being computed; it holds neither slot nor blocks any more
    FINISHED = auto()


class Forcing(Protocol):
    """Says which tokens of one sequence must come next. It is told of each token once, in order."""

    def first(self) -> Iterable[int]:
        """Return the tokens that must come first."""

    def after(self, token_id: int, num_left: int) -> Iterable[int]:
        """Return the tokens that must follow this one and the num_left forced ones behind it."""


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """State of one sample of one request.

    `token_ids`: the known tokens of prompt and completion. `num_tokens` also counts the pending ones, which launched
    steps sample. The first `num_computed_tokens` have their keys and values in `block_table`, once the launched steps
    have run. It ends at `max_len` tokens, with `text` or `error`. `block_keys`: one key per full block, kept over
    preemption. `arrival` orders sequences of one lane. `forced` tokens come next, whatever was sampled; the first
    `num_stale` pending samples are dropped. A snapshot of its state is made at each of `state_cuts` tokens. `slot`:
    its row in the slot table while it runs. The scheduler owns status, lane, slot, num_tokens and max_len; the block
    manager owns table, keys and cuts.

    `targets`: known tokens whose log probabilities are wanted, `scored` has what is known of them; `prompt_logprobs`
    is that of the first sample, `logprobs` has those of sampled tokens. `sample_top`: the number of likely tokens with
    each of these, or NOT_WANTED. A sequence that does not generate is branch `index` of `tree`, or its hidden states
    are `pooled`. `followers` wait until it is finished. The first `num_continued` tokens behind the prompt came with
    the request, and the `num_resumed` behind those are of another engine. `arrived_at`, `first_token_at`: monotonic
    seconds.

    follows_text: the prompt holds text, and not special tokens alone.
    stop_token_ids: every id that ends it, the model's own included unless ignored.
    edits: of its logits, None if there are none but bans for min_tokens.
    forcing: says which tokens must come next; None if none ever must.
    matcher: follows its grammar, None if the text is free.
    pictures: of the prompt; their features are there once it is scheduled.
    """

    request_id: str
    prompt_token_ids: InitVar[list[int]]
    params: SamplingParams
    _: KW_ONLY
    index: int = 0
    lane: int = 0
    arrival: int = 0
    seed: int = 0
    follows_text: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: StopStrings | None = None
    edits: SequenceEdits | None = None
    forcing: Forcing | None = None
    matcher: Matcher | None = None
    block_keys: list[BlockKey] = field(default_factory=list)
    targets: Targets | None = None
    tree: ScoreTree | None = None
    pooled: PooledStates | None = None
    pictures: PromptPictures | None = None

    token_ids: list[int] = field(init=False)
    num_tokens: int = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_len: int = field(init=False)
    generates: bool = field(init=False)
    forced: deque[int] = field(init=False)
    sample_top: int = field(init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_stale: int = field(default=0, init=False)
    state_cuts: list[int] = field(default_factory=list, init=False)
    num_continued: int = field(default=0, init=False)
    num_resumed: int = field(default=0, init=False)
    num_cached_tokens: int | None = field(default=None, init=False)
    num_published_blocks: int = field(default=0, init=False)
    block_table: list[int] = field(default_factory=list, init=False)
    slot: int = field(default=-1, init=False)
    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)
    arrived_at: float = field(default=0.0, init=False)
    first_token_at: float | None = field(default=None, init=False)
    text: str = field(default="", init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    logprobs: list[RowLogprobs] = field(default_factory=list, init=False)
    scored: list[RowLogprobs] = field(default_factory=list, init=False)
    prompt_logprobs: list[RowLogprobs] = field(init=False)
    followers: list[Sequence] = field(default_factory=list, init=False)

    def __post_init__(self, prompt_token_ids: list[int]) -> None:
        self.token_ids, self.block_keys = list(prompt_token_ids), list(self.block_keys)  # its own
        self.prompt_logprobs = self.scored
        self.num_tokens = self.num_prompt_tokens = len(prompt_token_ids)
        self.generates = self.targets is None and self.pooled is None
        self.max_len = self.num_prompt_tokens + (self.params.max_tokens if self.generates else 0)
        self.forced = deque(() if self.forcing is None else self.forcing.first())
        self.sample_top = num_top(self.params.logprobs)
        if self.index == 0 and self.params.prompt_logprobs is not None:  # one sample speaks for all
            self.targets = Targets.of(self.token_ids, 1, num_top(self.params.prompt_logprobs))

    def go_on_behind(self, token_id: int) -> None:
        """Learn a token of a cut completion, before it is scheduled: max_tokens more follow it.

        Raises InvalidRequest if the completion ends with it, or cannot have it.
        """
        self.max_len += 1
        try:
            ends = self.append(token_id) is not None
        except Exception as error:
            raise InvalidRequest(f"the completion cannot go on behind token {token_id}: {error}") from error
        if ends:
            raise InvalidRequest("the completion cannot go on: it has ended with the tokens that it has")
        self.num_continued += 1
        self.num_tokens += 1

    def resume(self, token_ids: Collection[int], max_model_len: int) -> None:
        """Learn the tokens that it has had in another engine, before it is scheduled; it may end with the last.

        Where log probabilities are wanted the last one is sampled again, and those of the others computed.
        Raises InvalidRequest if it cannot have had them.
        """
        self.max_len = min(self.max_len, max_model_len)
        wants_logprobs = self.sample_top != NOT_WANTED or self.targets is not None
        known = list(token_ids)[:-1] if wants_logprobs else token_ids
        try:
            for token_id in known:
                if self.finish_reason is not None:
                    raise InvalidRequest("it has ended before")
                self.append(token_id)
                if self.token_ids[-1] != token_id:
                    raise InvalidRequest(f"another token than {token_id} comes next")
        except Exception as error:
            raise InvalidRequest(f"it cannot have had these tokens: {error}") from error
        self.num_resumed = len(known)
        begin, self.num_tokens = self.num_tokens, self.num_tokens + len(known)
        if self.sample_top != NOT_WANTED:
            begin, top = (begin, NOT_WANTED) if self.targets is None else (1, self.targets.num_top)
            self.targets = Targets.of(self.token_ids, begin, max(top, self.sample_top))

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, index={self.index}, lane={self.lane}, {self.status.name}, "
            f"{self.num_computed_tokens} of {self.num_tokens} tokens computed)"
        )

    @property
    def num_pending_tokens(self) -> int:
        """The number of tokens that are being computed; their ids are not known."""
        return self.num_tokens - len(self.token_ids)

    @property
    def key_ids(self) -> list[int]:
        """The known tokens as block keys have them: with pictures in the place of their placeholders."""
        if self.pictures is None:
            return self.token_ids
        return self.pictures.key_ids + self.token_ids[len(self.pictures.key_ids) :]

    @property
    def shares_blocks(self) -> bool:
        """Whether others may use its blocks: not if all hidden states of a prompt are needed."""
        return self.pooled is None or not self.pooled.needs_all

    @property
    def num_cacheable_tokens(self) -> int:
        """The number of tokens that need no computing: neither the last, nor those that score."""
        last = self.num_tokens - 1
        if self.pooled is not None:
            return min(last, self.pooled.next)
        if self.targets is not None and self.targets.next < len(self.targets.places):
            return min(last, int(self.targets.places[self.targets.next]) - 1)
        return last

    def forget_launched(self) -> None:
        """Score or pool again from the first unknown token: launched steps are withdrawn."""
        if self.targets is not None:
            self.targets.next = sum(len(part.ranks) for part in self.scored)
        if self.pooled is not None:
            self.pooled.forget()

    @property
    def generated_token_ids(self) -> list[int]:
        """The completion so far, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]

    def fail(self, error: Exception) -> None:
        """End the sequence with an error of its own."""
        self.finish_reason, self.error = "error", error

    def append(self, token_id: int) -> FinishReason | None:
        """Learn the first pending token, or the forced one; return why the sequence ends with it, or None.

        Raises NoToken for a negative one, or GrammarFailed, and any error of decoding the text.
        """
        if self.forced:
            token_id = self.forced.popleft()
        if self.matcher is not None:
            self.matcher.accept(token_id)
        if token_id < 0:
            raise NoToken("no token could be chosen: the model's logits are no finite numbers, or all banned")
        self.token_ids.append(token_id)
        num_known = len(self.token_ids)
        text_stops = self.stop_strings is not None and self.stop_strings.add(token_id)
        token_stops = (
            token_id in self.stop_token_ids
            and num_known - self.num_prompt_tokens > self.params.min_tokens
            and (self.matcher is None or self.matcher.may_end)
        )
        if text_stops or token_stops or (self.matcher is not None and self.matcher.must_end):
            self.finish_reason = "stop"
        elif num_known >= self.max_len:
            self.finish_reason = "length"
        elif self.forcing is not None:
            self.forced += self.forcing.after(token_id, len(self.forced))
        return self.finish_reason

    def end_scored(self) -> None:
        """End a sequence of scores or an embedding, once all is there."""
        self.finish_reason = "stop"
        if self.pooled is not None and not self.pooled.is_finite:
            self.fail(NoToken("no embedding can be told: the model's hidden states are no finite numbers"))
        if any(np.isnan(part.logprobs).any() for part in self.prompt_logprobs):
            self.fail(NoToken("no log probability can be told: the model's logits are no finite numbers"))

    def ends_with(self, token_id: int) -> bool:
        """Learn the first pending token; return whether that, or an error of its text, ends it."""
        try:
            return self.append(token_id) is not None
        except Exception as error:  # noqa: BLE001 - whatever it is
            self.fail(error)
            return True


def request_progress(running: Iterable[Sequence]) -> dict[str, RequestProgress]:
    """Return each request's progress by id. running: the sequences in the batch.

    Samples of one request share the prompt, which counts once.
    """
    found: dict[str, RequestProgress] = {}
    for seq in running:
        prompt, known = seq.num_prompt_tokens, found.get(seq.request_id)
        computed = min(seq.num_computed_tokens, prompt) if known is None else known.prompt_tokens
        earlier = 0 if known is None else known.generation_tokens
        generated = earlier + len(seq.token_ids) - prompt
        found[seq.request_id] = RequestProgress(computed, prompt - computed, generated)
    return found
