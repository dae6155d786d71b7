"""Pictures of a prompt as the engine takes them: arrays, decoded in a child just before they are prepared.

A request holds the bytes of their files until then: as pixels they take many times as much.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from engine import InvalidRequest
from jobs.context.children import CHILDREN
from jobs.prompts.pictures import MAX_PIXELS, filled, pictures_in
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
    arrays, left = list[npt.NDArray[np.uint8]](), MAX_PIXELS
    for number, file in enumerate(pictures_in(value), 1):
        arrays.append(_array(file, f"picture {number}", left))
        left -= arrays[-1].size // 3
    found = filled(value, arrays)
    return found if "role" in found[0] else [each.get("text", each.get("image")) for each in found]


def _array(file: bytes, what: str, most: int) -> npt.NDArray[np.uint8]:
    try:
        found, pixels = CHILDREN.call(lambda child: child.ask(_TASK, {"most": most}, LIMITS, file))
    except ChildFailed as error:
        raise InvalidRequest(f"decoding {what} {error}") from None
    if "problem" in found:
        raise InvalidRequest(f"{what} {found['problem']}")
    return np.frombuffer(pixels, np.uint8).reshape(found["height"], found["width"], 3)
