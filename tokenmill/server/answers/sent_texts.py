"""Remembers which texts of a streamed answer were sent, so that each character is sent once."""

import logging
from dataclasses import dataclass, field

from tokenmill.server.answers.jobs_asked import TextPiece
from tokenmill.server.errors import ApiError

logger = logging.getLogger("tokenmill")


@dataclass
class SentTexts:
    """The texts of one answer's samples that were sent, by sample and part. job_id: names it in the log."""

    job_id: str
    _texts: dict[tuple[int, str], str] = field(default_factory=dict)

    def take(self, piece: TextPiece) -> str:
        """Return what a piece adds to the text that was sent; "" for a known piece, and for one behind a gap.

        A worker that takes over a job sends its text from the beginning. The whole answer fills a gap.
        """
        key = (piece.sample, piece.part)
        known = self._texts.get(key, "")
        if not piece.offset <= len(known) < piece.offset + len(piece.text):
            return ""
        new_text = piece.text[len(known) - piece.offset :]
        self._texts[key] = known + new_text
        return new_text

    def rest(self, sample: int, part: str, whole: str) -> str:
        """Return the part of the whole text that was not sent yet. Raises ApiError if the texts differ."""
        known = self._texts.get((sample, part), "")
        if not whole.startswith(known):
            logger.error("%s: the %s that was sent is not the answer's", self.job_id, part)
            raise ApiError(500, "the answer differs from the text that was sent: ask again")
        self._texts[sample, part] = whole
        return whole[len(known) :]
