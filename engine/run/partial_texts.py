"""Makes the certain beginnings of running sequences' texts, for readers of texts that still grow."""

from dataclasses import dataclass

from engine.schedule.outputs import PartialText
from engine.schedule.sequence import Sequence
from engine.text.control_tokens import BREAK
from engine.text.marked_text import with_marks
from engine.text.reasoning import Reasoner
from engine.text.stop_strings import IncrementalText
from engine.text.tokenizer import Tokenizer


@dataclass
class GrowingText:
    """The text of one sequence's tokens so far.

    num_tokens: those that were added. num_certain: those whose text no later token changes.
    """

    incremental: IncrementalText
    text: str = ""
    num_tokens: int = 0
    num_certain: int = 0


class PartialTexts:
    """Makes the texts of running sequences. Each call decodes only the new tokens, unless a sequence reasons."""

    def __init__(self, tokenizer: Tokenizer, reasoner: Reasoner) -> None:
        self._tokenizer = tokenizer
        self._reasoner = reasoner

    def of(self, seq: Sequence, growing_texts: dict[int, GrowingText]) -> PartialText:
        """Return what a sequence's text begins with.

        Empty for a request with tools, as the text around their calls is known only at its end.
        growing_texts: the texts of the request's samples by index, as earlier calls have left them.
        """
        params = seq.params
        if params.tools:
            return PartialText(None, "", ())
        token_ids = seq.generated_token_ids
        growing = self._grown(seq, token_ids, growing_texts)
        marks = self._reasoner.marks(params.reasoning_marks) if params.separate_reasoning else {}
        reasoning: str | None = None
        text = growing.text
        if params.separate_reasoning:
            certain_ids = token_ids[: growing.num_certain]
            reasoning, text = self._split(seq, growing.text, certain_ids, marks)
        if params.stop:
            # The end of the text may be the beginning of a stop string.
            longest = max(map(len, params.stop))
            text = text[: max(0, len(text) - longest + 1)]
        return PartialText(reasoning, text.replace(BREAK, ""), token_ids)

    def _grown(
        self, seq: Sequence, token_ids: list[int], growing_texts: dict[int, GrowingText]
    ) -> GrowingText:
        growing = growing_texts.get(seq.index)
        if growing is None:
            growing = GrowingText(
                self._tokenizer.incremental_text(
                    follows_text=seq.follows_text,
                    skip_special_tokens=seq.params.skip_special_tokens,
                    spaces_between_special_tokens=seq.params.spaces_between_special_tokens,
                )
            )
            growing_texts[seq.index] = growing
        for token_id in token_ids[growing.num_tokens :]:
            growing.text += growing.incremental.add(token_id)
            growing.num_tokens += 1
            if growing.incremental.is_whole:
                growing.num_certain = growing.num_tokens
        return growing

    def _split(
        self, seq: Sequence, text: str, token_ids: list[int], marks: dict[int, str]
    ) -> tuple[str | None, str]:
        """Return the reasoning and the rest. If either ends with what may be the beginning of a mark, that is cut off.

        text: what is returned if there are no marks. token_ids: those whose text no later token changes.
        """
        params = seq.params
        pair = self._reasoner.pair(params.reasoning_marks)
        if not marks and not pair:
            return None, text
        text = self._tokenizer.decode(
            token_ids,
            follows_text=seq.follows_text,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        text = with_marks(
            self._tokenizer,
            text,
            token_ids,
            marks,
            broken=marks.values(),
            follows_text=seq.follows_text,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        if self._reasoner.is_answer(params.reasoning_marks, prompt):
            return None, text
        reasoning, answer = self._reasoner.split(text, params.reasoning_marks, prompt)
        if reasoning is None:
            return None, ""  # a later mark may make reasoning of the text
        for mark in pair:
            reasoning = _without_partial_mark(reasoning, mark)
            # A mark in the middle of the answer opens a span. What the span hides is known only at its end.
            answer = _without_partial_mark(answer.partition(mark)[0], mark)
        return reasoning.replace(BREAK, ""), answer


def _without_partial_mark(text: str, mark: str) -> str:
    """Cut off the end of a text if it may be the beginning of a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return text[:-length]
    return text
