"""Turns finished sequences that have generated tokens into completions."""

import time
from collections.abc import Callable
from dataclasses import replace

from engine.errors import SequenceFailed
from engine.schedule.logprobs import NOT_WANTED, as_dicts, num_top
from engine.schedule.outputs import Completion, Logprob, RequestMetrics
from engine.schedule.sequence import Sequence
from engine.text.control_tokens import BREAK
from engine.text.marked_text import with_marks
from engine.text.reasoning import Reasoner
from engine.text.tokenizer import Tokenizer
from engine.text.tool_calls import ToolCallReader, ToolCalls

#: How a call of a tool may end, in any form.
_CALL_ENDS = ("}", "]", ")", ">")


class Completions:
    """Makes completions of finished sequences: their texts, reasoning and tool calls."""

    def __init__(self, tokenizer: Tokenizer, reasoner: Reasoner) -> None:
        self._tokenizer, self._reasoner = tokenizer, reasoner
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
        """Return what says of each token of a sequence, as it comes, whether a first call of a tool ends with it."""
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
        """Return the log probabilities of the prompt's tokens; None if they are not wanted or not whole."""
        if seq.params.prompt_logprobs is None or seq.error is not None:
            return None
        token_ids = seq.token_ids[1 : seq.num_prompt_tokens]
        top = num_top(seq.params.prompt_logprobs)
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
