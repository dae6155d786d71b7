"""TextPiece: a piece of a job's answer, with its tokens."""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from jobs.context.job_journal import SentTokens


class TextPiece(NamedTuple):
    """A piece of a job's answer. Pieces are made if a client reads the answer as it grows.

    sample: the sample's index. part: "reasoning" or "text". offset: how many characters of this part came before the
    piece.
    token_ids: the tokens since the sample's previous piece.
    num_tokens_before: how many tokens the sample had before this piece.
    owner: a hash that identifies the job, its payload and its model (see JobJournal.owner_digest).
    """

    sample: int
    part: str
    offset: int
    text: str
    num_tokens_before: int
    token_ids: Sequence[int]
    owner: str

    def to_values(self) -> list[Any]:
        """Return the piece's entry in the job's stream: its fields and values in turn."""
        values = {
            "sample": self.sample,
            "part": self.part,
            "offset": self.offset,
            "text": self.text.encode("utf-8", "replace").decode(),
            "num_tokens_before": self.num_tokens_before,
            "tokens": array("i", self.token_ids).tobytes(),
            "owner": self.owner,
        }
        flat: list[Any] = []
        for name, value in values.items():
            flat += [name, value]
        return flat


NUM_VALUES = 14
"""How many elements a piece has in the job's stream. A field's name and its value are two."""


def sent_tokens(entries: Sequence[Any], owner_digest: str) -> list[SentTokens]:
    """Return the tokens in the pieces of one owner. Damaged entries are left out.

    entries: the job's stream. owner_digest: see TextPiece.owner.
    """
    tokens = []
    for _, names_and_values in entries:
        fields = dict(zip(names_and_values[::2], names_and_values[1::2], strict=False))
        if fields.get(b"owner") != owner_digest.encode():
            continue
        try:
            token_ids = array("i", fields[b"tokens"]).tolist()
            tokens.append(
                SentTokens(int(fields[b"sample"]), int(fields[b"num_tokens_before"]), token_ids)
            )
        except (KeyError, ValueError):  # damaged
            continue
    return tokens
