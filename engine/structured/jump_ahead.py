"""Jump ahead: where a grammar leaves one way, tokens are appended without a forward pass for each.

They are those that the masks would leave, one after the other: llguidance masks all but the tokens that its
tokenizer makes of the text that must come. So a completion has the same tokens as without.
"""

from __future__ import annotations

from engine.sampling.parameters.sampling import SamplingParams
from engine.structured.matcher import Matcher

#: One alone is left to the mask: what a chunk costs its step is more than it saves.
MIN_TOKENS = 2


class JumpAhead:
    """Says which tokens a grammar forces: a Forcing of engine.schedule, of a sequence with a matcher."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._num_forced = 0  # tokens that have been named, and that the matcher has not learnt yet

    @classmethod
    def of(cls, matcher: Matcher | None, params: SamplingParams) -> JumpAhead | None:
        """None where there is no grammar, or none that can say; where a forced token may be banned, which its
        row has to hear of; and where log probabilities are wanted, which are known of what is computed alone.
        """
        if matcher is None or not matcher.may_force:
            return None
        may_ban = params.bad_words or params.allowed_token_ids is not None or params.min_tokens
        if may_ban or params.logprobs is not None:
            return None
        return cls(matcher)

    def first(self) -> list[int]:
        return self._find()

    def after(self, token_id: int) -> list[int]:
        if self._num_forced:
            self._num_forced -= 1
            if self._num_forced:
                return []
        return self._find()

    def _find(self) -> list[int]:
        token_ids = self._matcher.forced()
        if len(token_ids) < MIN_TOKENS:
            return []
        self._num_forced = len(token_ids)
        return token_ids
