"""Pictures of a prompt as the engine takes them: arrays, decoded just before they are prepared.

A request holds the bytes of their files until then: as pixels they take many times as much.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from engine import InvalidRequest
from jobs.errors import InvalidJob
from jobs.prompts.pictures import MAX_PIXELS, decode, filled, pictures_in


def has_pictures(value: Any) -> bool:
    """Return whether a prompt or messages hold any."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and bool(pictures_in(value))


def decoded(value: Any) -> Any:
    """Return messages, or the parts of a prompt, with arrays as their pictures; any other prompt as it is.

    An array: [height, width, 3] of uint8. Raises InvalidRequest for what is no picture, or more pixels than a prompt
    may have.
    """
    if not has_pictures(value):
        return value
    arrays, left = list[npt.NDArray[np.uint8]](), MAX_PIXELS
    for number, file in enumerate(pictures_in(value), 1):
        try:
            height, width, pixels = decode(file, f"picture {number}", left)
        except InvalidJob as error:
            raise InvalidRequest(str(error)) from None
        arrays.append(np.frombuffer(pixels, np.uint8).reshape(height, width, 3))
        left -= height * width
    found = filled(value, arrays)
    return found if "role" in found[0] else [each.get("text", each.get("image")) for each in found]
