"""Remembers the texts of a streamed answer that were sent, so that each character is sent once."""

import logging
from dataclasses import dataclass, field

from tokenmill.server.answers.jobs_asked import TextPiece
from tokenmill.server.errors import ApiError

logger = logging.getLogger("tokenmill")


@dataclass
class SentTexts:
    """The texts of one answer that were sent so far. job_id: for the log."""

    job_id: str
    #: The texts by sample and part.
    _texts: dict[tuple[int, str], str] = field(default_factory=dict)

    def take(self, piece: TextPiece) -> str:
        """Return the text that a piece adds to what was sent, and count it as sent.

        Return "" for a piece that was sent: a worker that takes over a job writes the text from the beginning again.
        Return "" as well if there is a gap before the piece. The whole answer fills the gap at the end.
        """
        key = (piece.sample, piece.part)
        sent = self._texts.get(key, "")
        if not piece.offset <= len(sent) < piece.offset + len(piece.text):
            return ""
        num_known = len(sent) - piece.offset
        new_text = piece.text[num_known:]
        self._texts[key] = sent + new_text
        return new_text

    def rest(self, sample: int, part: str, whole: str) -> str:
        """Return the end of a whole text that was not sent yet, and count it as sent.

        Raises ApiError if the text does not begin with what was sent.
        """
        sent = self._texts.get((sample, part), "")
        if not whole.startswith(sent):
            logger.error(
                "%s: the %s of the answer does not begin with what was sent", self.job_id, part
            )
            raise ApiError(500, "the answer differs from the text that was sent: ask again")
        self._texts[sample, part] = whole
        return whole.removeprefix(sent)
