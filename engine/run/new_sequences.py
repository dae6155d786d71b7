"""NewSequences: makes the sequences of a request that generates, one for each of its samples."""

import logging
from collections.abc import Collection, Iterable

from engine.sampling.logit_edits import RequestEdits, SequenceEdits
from engine.sampling.sampling_params import SamplingParams
from engine.schedule.prepared_prompt import PreparedPrompt
from engine.schedule.sequence import Forcing, Sequence
from engine.structured.forced_calls import ForcedCalls
from engine.structured.grammars import Grammars
from engine.structured.matcher import JumpAhead, Matcher
from engine.text.reasoning import Reasoner
from engine.text.stop_strings import StopStrings
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class NewSequences:
    """Makes sequences that generate. eos_token_ids: the ids that end texts, including the tokenizer's own."""

    def __init__(
        self, tokenizer: Tokenizer, configured_ends: frozenset[int], vocab_size: int
    ) -> None:
        """configured_ends: the end tokens that the model's configuration names."""
        surplus = tokenizer.surplus(vocab_size)
        if surplus:
            logger.warning("%s; is it the model's own?", surplus)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.reasoner = Reasoner(tokenizer, vocab_size)
        self.eos_token_ids = configured_ends | tokenizer.end_token_ids(vocab_size)
        forced_calls = ForcedCalls(tokenizer, self.eos_token_ids)
        self.grammars = Grammars(
            tokenizer.backend, vocab_size, self.eos_token_ids, forced_calls.form
        )

    def make(
        self,
        request_id: str,
        prompt: PreparedPrompt,
        params: SamplingParams,
        *,
        lane: int,
        seed: int,
        continued: Collection[int] = (),
    ) -> list[Sequence]:
        """Make params.n sequences.

        Raises InvalidSampling for parameters that this tokenizer cannot serve, InvalidRequest for a `continued`
        completion that cannot go on.
        """
        end_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_token_ids |= self.eos_token_ids
        # the form covers the whole text, so the space before its first word stays
        follows_text = self._tokenizer.has_text(prompt.token_ids) or params.has_form
        edits: RequestEdits | None = None
        if params.edits_logits:
            bad_words = self._tokenizer.bad_words(tuple(params.bad_words or ()))
            edits = RequestEdits.of(params, prompt.token_ids, self._vocab_size, bad_words)
        matchers: Iterable[Matcher | None] = [None] * params.n
        if params.has_form:
            matchers = self.grammars.matchers(params, end_token_ids)
        seqs = [
            Sequence(
                request_id,
                prompt.token_ids,
                params,
                index=index,
                lane=lane,
                seed=seed,
                follows_text=follows_text,
                stop_token_ids=end_token_ids,
                stop_strings=self._stop_strings(params, prompt.token_ids, follows_text, matcher),
                edits=None if edits is None else SequenceEdits(edits),
                forcing=self._forcing(params, prompt.token_ids, follows_text, matcher),
                matcher=matcher,
                block_keys=prompt.block_keys,
                pictures=prompt.pictures,
            )
            for index, matcher in enumerate(matchers)
        ]
        for seq in seqs:  # all share one list, which the first one fills
            seq.prompt_logprobs = seqs[0].prompt_logprobs
            for token_id in continued:
                seq.go_on_behind(token_id)
        return seqs

    def _forcing(
        self, params: SamplingParams, prompt: list[int], follows_text: bool, matcher: Matcher | None
    ) -> Forcing | None:
        """Return the Forcing that gives the tokens that must come next; None for a sequence without such tokens."""
        if params.thinking_token_budget is not None:
            return self.reasoner.budget(
                params.thinking_token_budget, params.reasoning_marks, prompt, follows_text
            )
        return None if matcher is None else JumpAhead.of(matcher, params)

    def _stop_strings(
        self, params: SamplingParams, prompt: list[int], follows_text: bool, matcher: Matcher | None
    ) -> StopStrings | None:
        if not params.stop:
            return None
        # the form covers the whole text, so no reasoning is split from it
        span = None
        if matcher is None:
            span = self.reasoner.answer_span(params.reasoning_marks, prompt, params.stop)
        text = self._tokenizer.incremental_text(
            follows_text=follows_text,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        return StopStrings(
            params.stop,
            text,
            min_tokens=params.min_tokens,
            include=params.include_stop_str_in_output,
            may_end=None if matcher is None else matcher.accepts,
            answer_part=None if span is None else span.answer_part,
        )
