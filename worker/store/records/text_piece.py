"""TextPiece: what a sample's text has grown by."""

from typing import Any, NamedTuple


class TextPiece(NamedTuple):
    """A piece of a followed job's answer.

    sample: its index. part: "reasoning" or "text". offset: the characters of that part before the piece.
    """

    job_id: str
    sample: int
    part: str
    offset: int
    text: str

    def to_fields(self) -> dict[Any, Any]:
        """Return the fields of its entry in the job's stream."""
        return {
            "sample": self.sample,
            "part": self.part,
            "offset": self.offset,
            "text": self.text.encode("utf-8", "replace").decode(),
        }
