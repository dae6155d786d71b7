"""Generate: requests whose prompts are continued by sampled tokens, and the completions of these."""

import logging
import random
import time
from array import array
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from engine.errors import InvalidRequest, InvalidSampling, NoLmHead, SequenceFailed
from engine.run.kinds.request_kind import LoadedModel, NewRequest, RequestKind
from engine.sampling.sampling_params import SamplingParams, check_params
from engine.schedule.logprobs import NOT_WANTED, as_dicts
from engine.schedule.outputs import Completion, Logprob, RequestMetrics
from engine.schedule.prepared_prompt import PreparedPrompt
from engine.schedule.sequence import Sequence
from engine.text.control_tokens import BREAK
from engine.text.marked_text import with_marks
from engine.text.prompts import Prompt
from engine.text.reasoning import Reasoner
from engine.text.tokenizer import Tokenizer
from engine.text.tool_calls import ToolCallReader, ToolCalls

logger = logging.getLogger(__name__)

#: The most log probabilities that one request may ask for. Each takes about 150 bytes until its completion is given.
MAX_LOGPROB_ENTRIES = 1 << 21


class Generate(RequestKind[SamplingParams]):
    """Completes prompts: one sequence and one completion for each of `params.n` samples."""

    params = SamplingParams
    generates = True

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._prompts = loaded.prompts
        self._new_sequences = loaded.sequences
        self._completions = Completions(loaded.tokenizer, loaded.sequences.reasoner)
        self._seeds = Seeds(loaded.config.seed, from_prompts=loaded.config.deterministic)

    def check(self, params: SamplingParams) -> None:
        """Raise NoLmHead if the model has no LM head, InvalidSampling for token ids outside the vocabulary."""
        check_params(params, self._loaded.model.vocab_size)
        if not self._loaded.generates:
            raise NoLmHead

    def prepare(self, prompt: Prompt, params: SamplingParams) -> PreparedPrompt:
        """Tokenize a prompt and keep the last tokens that it is cut to. Needs no LM head."""
        token_ids = self._prompts.token_ids(
            prompt, truncate_prompt_tokens=params.truncate_prompt_tokens
        )
        return PreparedPrompt(token_ids, self._loaded.keys_of(token_ids))

    def is_prepared(self, prompt: PreparedPrompt, params: SamplingParams) -> bool:
        """Return whether the prompt is short enough. Every prepared prompt leaves room for one new token."""
        most = params.truncate_prompt_tokens
        return most is None or most == -1 or len(prompt.token_ids) <= most

    def prepare_grammar(self, params: SamplingParams) -> Future[Any] | None:
        """Start compiling the grammar that the text must follow, once for equal grammars; return None for free text."""
        return self._new_sequences.grammars.prepare(params)

    def sequences(self, request: NewRequest[SamplingParams]) -> list[Sequence]:
        """Make a sequence for each sample. Resumed samples go on where they were in another engine."""
        token_ids = request.prompt.token_ids
        params = request.params
        self._prompts.check_continued(token_ids, request.continued)
        check_logprobs(params, len(token_ids), self._prompts.max_model_len)
        seed = params.seed if params.seed is not None else self._seeds.draw(token_ids)

        seqs = self._make(request, seed)
        if request.resumed and not self._resume(seqs, request.resumed):
            seqs = self._make(request, seed)  # anew, as the first ones may have taken some tokens
        return seqs

    def _make(self, request: NewRequest[SamplingParams], seed: int) -> list[Sequence]:
        seqs = self._new_sequences.make(
            request.request_id,
            request.prompt,
            request.params,
            lane=request.lane,
            seed=seed,
            continued=request.continued,
        )
        if request.params.tools and not request.params.parallel_tool_calls:
            for seq in seqs:
                seq.ends_call = self._completions.call_watch(seq)
        return seqs

    def _resume(self, seqs: list[Sequence], resumed: Mapping[int, Collection[int]]) -> bool:
        """Give sequences the tokens that they had elsewhere; return False if one cannot have had them."""
        try:
            for index, token_ids in resumed.items():
                self._prompts.check_ids(token_ids)
                seqs[index].resume(token_ids, self._prompts.max_model_len)
        except (InvalidRequest, IndexError) as error:
            logger.warning(
                "request %s begins anew, it cannot go on where it was: %s",
                seqs[0].request_id,
                error,
            )
            return False
        return True

    def is_complete(self, seq: Sequence) -> bool:
        """Return whether a sample's completion is whole; the first sample may still be scoring the prompt for all."""
        if seq.params.prompt_logprobs is None or seq.error is not None:
            return True
        num_scored = sum(len(part.ranks) for part in seq.prompt_logprobs)
        return num_scored >= seq.num_prompt_tokens - 1

    def completion(self, seq: Sequence) -> Completion:
        """Make the completion of a sample: its text, reasoning, tool calls and log probabilities."""
        return self._completions.of(seq)


#: How a call of a tool may end, in any form.
_CALL_ENDS = ("}", "]", ")", ">")


class Completions:
    """Makes completions of finished sequences: their texts, reasoning and tool calls."""

    def __init__(self, tokenizer: Tokenizer, reasoner: Reasoner) -> None:
        self._tokenizer = tokenizer
        self._reasoner = reasoner
        self._tool_calls = ToolCallReader(tokenizer)

    def of(self, seq: Sequence) -> Completion:
        """Make the completion of a finished sequence."""
        tokenizer = self._tokenizer
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        num_given = seq.num_prompt_tokens + seq.num_continued
        reasoning: str | None = None
        text = seq.text
        calls: ToolCalls | None = None
        if seq.error is None:
            reasoning, text, calls = self._parts_of(seq, seq.text)
        prompt_text: str | None = None
        prompt_tokens: list[str] | None = None
        if seq.params.echo:
            prompt_text = tokenizer.decode(prompt)
            prompt_tokens = [tokenizer.token_text(token_id).text for token_id in prompt]

        assert seq.finish_reason is not None
        return Completion(
            request_id=seq.request_id,
            index=seq.index,
            token_ids=seq.generated_token_ids,
            text=text,
            finish_reason=seq.finish_reason,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=min(seq.num_cached_tokens or 0, num_given),
            logprobs=self._logprobs_of(seq),
            error=None if seq.error is None else str(SequenceFailed(seq.error)),
            prompt_logprobs=self._prompt_logprobs_of(seq),
            reasoning=reasoning,
            tool_calls=calls.calls if calls is not None and calls.calls else None,
            tool_call_error=None if calls is None else calls.problem,
            prompt_text=prompt_text,
            prompt_tokens=prompt_tokens,
            num_continued=seq.num_continued + seq.num_resumed,
            metrics=RequestMetrics(seq.arrived_at, seq.first_token_at, time.monotonic()),
        )

    def call_watch(self, seq: Sequence) -> Callable[[int], bool]:
        """Return a function that takes each new token and says whether the sequence's first tool call ends with it."""
        params = seq.params
        incremental = self._tokenizer.incremental_text(
            follows_text=seq.follows_text,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        text = "".join(incremental.add(token_id) for token_id in seq.generated_token_ids)

        def ends_call(token_id: int) -> bool:
            nonlocal text
            new_text = incremental.add(token_id)
            text += new_text
            if not any(mark in new_text for mark in _CALL_ENDS):
                return False
            _, _, calls = self._parts_of(seq, text, is_growing=True)
            return calls is not None and bool(calls.calls)

        return ends_call

    def _logprobs_of(self, seq: Sequence) -> list[dict[int, Logprob]] | None:
        """Return the log probabilities of the sampled and resumed tokens; None if they are not wanted."""
        if seq.sample_top == NOT_WANTED:
            return None
        begin = seq.num_prompt_tokens + seq.num_continued
        first = begin
        known = seq.logprobs
        if seq.num_resumed and seq.targets is not None:
            # those of the resumed tokens were computed like a prompt's, and perhaps together with it
            known = [*seq.scored, *known]
            first = int(seq.targets.places[0])
        token_text = self._tokenizer.token_text
        return as_dicts(known, seq.token_ids[first:], seq.sample_top, token_text)[begin - first :]

    def _prompt_logprobs_of(self, seq: Sequence) -> list[dict[int, Logprob] | None] | None:
        """Return the log probabilities of the prompt's tokens; None if they are not wanted, or the sequence failed."""
        top = seq.params.prompt_logprobs
        if top is None or seq.error is not None:
            return None
        token_ids = seq.token_ids[1 : seq.num_prompt_tokens]
        token_text = self._tokenizer.token_text
        return [None, *as_dicts(seq.prompt_logprobs, token_ids, top, token_text)]

    def _parts_of(
        self, seq: Sequence, text: str, *, is_growing: bool = False
    ) -> tuple[str | None, str, ToolCalls | None]:
        """Return the reasoning of a completion, its text without that and without calls, and the calls.

        text: of all its tokens. is_growing: more of it may come.
        """
        params = seq.params
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        reasoning: str | None = None
        calls: ToolCalls | None = None
        spans = self._reasoner.marks(params.reasoning_marks) if params.separate_reasoning else {}
        marks = spans | (self._tool_calls.hidden_marks if params.tools else {})
        if marks:
            text = with_marks(
                self._tokenizer,
                text,
                seq.generated_token_ids,
                marks,
                broken=spans.values(),
                follows_text=seq.follows_text,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        if params.separate_reasoning:
            reasoning, text = self._reasoner.split(text, params.reasoning_marks, prompt)
            if params.skip_special_tokens:
                text = self._reasoner.without_hidden(text, params.reasoning_marks)
        if params.tools:
            is_cut = is_growing or seq.finish_reason == "length"
            calls = self._tool_calls.read(text, params.tools, is_cut=is_cut, logs=not is_growing)
            text = calls.content
            if not params.parallel_tool_calls:
                calls = replace(calls, calls=calls.calls[:1])
        reasoning = None if reasoning is None else reasoning.replace(BREAK, "")
        return reasoning, text.replace(BREAK, ""), calls


def check_logprobs(params: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> None:
    """Raise InvalidSampling if a request's log probabilities alone could fill the engine's memory."""
    num_entries = 0
    if params.prompt_logprobs is not None:
        num_entries += num_prompt_tokens * (params.prompt_logprobs + 1)
    if params.logprobs is not None:
        longest = min(params.max_tokens, max_model_len - num_prompt_tokens)
        num_entries += params.n * longest * (params.logprobs + 1)
    if num_entries > MAX_LOGPROB_ENTRIES:
        raise InvalidSampling(
            f"the request may have {num_entries} log probabilities, more than the limit of {MAX_LOGPROB_ENTRIES}: ask "
            "for fewer by logprobs or prompt_logprobs, a lower max_tokens or n, or a shorter prompt"
        )


class Seeds:
    """Draws seeds, from one generator, or from the prompt if results must depend on the request alone."""

    def __init__(self, seed: int, *, from_prompts: bool) -> None:
        self._seed = seed
        self._from_prompts = from_prompts
        self._generator = random.Random(seed)

    def draw(self, token_ids: list[int]) -> int:
        """Draw a seed of 64 bits. token_ids: of the prompt."""
        if not self._from_prompts:
            return self._generator.getrandbits(64)
        digest = blake2b(f"{self._seed}:".encode(), digest_size=8)
        digest.update(array("q", token_ids).tobytes())
        return int.from_bytes(digest.digest(), "little")
