"""Writes marks, such as those of reasoning and tool calls, into a completion's text, and tells them from mere text."""

from collections.abc import Collection, Mapping
from functools import partial

from engine.text.control_tokens import Spellings
from engine.text.tokenizer import Tokenizer


def with_marks(
    tokenizer: Tokenizer,
    text: str,
    token_ids: list[int],
    marks: Mapping[int, str],
    *,
    follows_text: bool,
    broken: Collection[str] = (),
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> str:
    """Return a completion's text with all marks among its tokens, also the marks that the text leaves out.

    marks: the texts of marks by token id. broken: marks that count only as a token of their own. Where other tokens
    spell such a mark, the text returned has BREAK. The other arguments are those of the `decode` that made the text.
    """
    decode = partial(
        tokenizer.decode,
        skip_special_tokens=skip_special_tokens,
        spaces_between_special_tokens=spaces_between_special_tokens,
    )
    # What the text has of each mark: nothing if it leaves the mark out.
    in_text = {
        token_id: decode([token_id], follows_text=True)
        for token_id in set(token_ids) & marks.keys()
    }
    num_spelled = sum(map(text.count, broken))
    if not in_text and not num_spelled:
        return text
    spellings = Spellings(broken)
    written = ""
    done = 0  # characters of the text that are written
    begin = 0  # place of the first token behind the last mark
    for place, token_id in enumerate(token_ids):
        if token_id not in in_text:
            continue
        end = done + len(decode(token_ids[begin:place], follows_text=follows_text or begin > 0))
        if end > len(text):  # the text was cut at a stop string
            break
        written += spellings.broken(text[done:end]) + marks[token_id]
        done = end + len(in_text[token_id])
        begin = place + 1
    return f"{written}{spellings.broken(text[done:])}"
