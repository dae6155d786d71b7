"""Pictures of a prompt as the engine takes them: arrays, decoded in a child just before they are prepared.

A request holds the bytes of their files until then: as pixels they take many times as much.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from engine import InvalidRequest
from jobs.context.children import CHILDREN
from jobs.prompts.pictures import MAX_PIXELS, with_pictures
from sandbox import ChildFailed, Limits

_TASK = "jobs.prompts.picture_child:decode"

#: Seconds for a picture, and bytes: some copies of MAX_PIXELS, of four bytes each.
LIMITS = Limits(20.0, 24 * MAX_PIXELS)


def decoded(value: Any) -> Any:
    """Return messages, or the parts of a prompt, with arrays as their pictures; any other prompt as it is.

    An array: [height, width, 3] of uint8. Raises InvalidRequest for what is no picture, or more pixels than a prompt
    may have.
    """
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return value
    found = with_pictures(value, _Decoder())
    return found if "role" in found[0] else [each.get("text", each.get("image")) for each in found]


class _Decoder:
    """Decodes the pictures of one prompt, in order."""

    def __init__(self) -> None:
        self._count, self._left = 0, MAX_PIXELS

    def __call__(self, file: bytes) -> npt.NDArray[np.uint8]:
        self._count += 1
        question = {"most": self._left}
        try:
            found, pixels = CHILDREN.call(lambda child: child.ask(_TASK, question, LIMITS, file))
        except ChildFailed as error:
            raise InvalidRequest(f"decoding picture {self._count} {error}") from None
        if "problem" in found:
            raise InvalidRequest(f"picture {self._count} {found['problem']}")
        array = np.frombuffer(pixels, np.uint8).reshape(found["height"], found["width"], 3)
        self._left -= array.size // 3
        return array
