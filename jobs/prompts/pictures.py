"""Reads the pictures of prompts, within limits, and has child processes decode them."""

import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jobs.common.display import brief
from jobs.context import JobContext
from jobs.context.shared_files import DECODERS
from jobs.errors import InvalidJob, InvalidValue
from jobs.tasks import LateTask, Parts, Task
from sandbox import ChildFailed, Limits

#: The most pictures of a prompt.
MAX_PICTURES = 100
#: The most bytes and the most pixels that a prompt's pictures may have together.
MAX_BYTES = 20 << 20
MAX_PIXELS = 1 << 26

MAX_PATH_CHARS = 4096
_DATA_URL = re.compile(r"data:image/[^,]{0,1000};base64,", re.IGNORECASE)
Picture = bytes | str
"""The bytes of a picture's file, or the path of the file."""

#: Returns the bytes of a path's file.
ReadFile = Callable[[str], bytes]


def is_url(text: str) -> bool:
    """Whether a text is a data: URL or a URL of the web, and not a path."""
    beginning = text[: len("https:")].lower()
    return beginning.startswith(("data:", "http:", "https:"))


def picture_of(url: str, name: str) -> Picture:
    """Return the bytes in a data: URL, or the text itself if it is a path. Raises InvalidJob for any other URL.

    name: the picture's name in errors.
    """
    data = _DATA_URL.match(url)
    if data is not None:
        try:
            return b64decode(url[data.end() :], validate=True)
        except ValueError as error:
            raise InvalidJob(f"{name} is no base64: {error}") from None
    is_other_data = url[:5].lower() == "data:"  # a data: URL that is no picture in base64
    if is_url(url) and not is_other_data:  # the URL is not shown, because it may hold keys
        raise InvalidJob(
            f"{name} has a URL of the web, which is not fetched: give a data: URL, or a path"
        )
    has_path_length = 0 < len(url) <= MAX_PATH_CHARS
    if has_path_length and not is_other_data:
        return url
    expected = f"data:image/...;base64,... or a path of at most {MAX_PATH_CHARS} characters"
    raise InvalidValue(f"{name} is {{}}, expected {expected}", brief(url))


def map_pictures(value: Parts, replacement: Callable[[Any], Any]) -> Parts:
    """Return a copy of messages or parts in which `replacement(picture)` takes the place of each picture, in order."""
    copies = []
    for item in value:
        copy = item
        if item.get("type") == "image":
            copy = {**item, "image": replacement(item["image"])}
        elif isinstance(item.get("content"), list):
            copy = {**item, "content": map_pictures(item["content"], replacement)}
        copies.append(copy)
    return copies


def without_pictures(value: Parts) -> Parts:
    """Return a copy of messages or parts that has None in place of each picture."""
    return map_pictures(value, lambda picture: None)


def pictures_in(value: Parts) -> list[Any]:
    """Return the pictures of messages or parts, in order."""
    pictures: list[Any] = []
    map_pictures(value, pictures.append)  # the copy that it returns is not needed
    return pictures


def filled(value: Parts, pictures: Sequence[Any]) -> Parts:
    """Return a copy of messages or parts in which these pictures replace the present ones, in order."""
    replacements = iter(pictures)
    return map_pictures(value, lambda _: next(replacements))


def loaded(pictures: Iterable[Picture], read: ReadFile) -> list[bytes]:
    """Return the bytes of a prompt's pictures. Raises InvalidJob if they exceed MAX_BYTES or MAX_PICTURES.

    read: returns the bytes of a picture that is a path. Its errors are raised.
    """
    files: list[bytes] = []
    size = 0
    for picture in pictures:
        file = read(picture) if isinstance(picture, str) else picture
        files.append(file)
        size += len(file)
        if size > MAX_BYTES:
            raise InvalidJob(
                f"the prompt's pictures have more than {MAX_BYTES} bytes: make them smaller"
            )
        if len(files) > MAX_PICTURES:
            raise InvalidJob(f"the prompt has more than {MAX_PICTURES} pictures: leave some out")
    return files


#: The most seconds and bytes of memory for decoding a picture. This memory holds six copies of MAX_PIXELS pixels of
#: four bytes each.
LIMITS = Limits(20.0, 24 * MAX_PIXELS)


class DecodedPicture(NamedTuple):
    """A decoded picture. height, width: in pixels. rgb: three bytes for each pixel, row by row."""

    height: int
    width: int
    rgb: bytearray


def decode(file: bytes, name: str, max_pixels: int) -> DecodedPicture:
    """Have a child process decode a picture. Raises InvalidJob. name: the picture's name in errors."""
    question = {"max_pixels": max_pixels}
    try:
        reply, rgb = DECODERS.call(
            lambda child: child.ask("jobs.prompts.picture_child:decode", question, LIMITS, file)
        )
    except ChildFailed as error:
        raise InvalidJob(f"decoding {name} {error}") from None
    if "problem" in reply:
        raise InvalidJob(f"{name} {reply['problem']}")
    return DecodedPicture(reply["height"], reply["width"], rgb)


def pictured_task(messages: Parts, make: Callable[[Parts], Task]) -> Task:
    """Return a task for messages that may have pictures. Raises InvalidJob.

    Pictures in files are loaded when the task is opened. make: makes the task from messages with loaded pictures.
    """
    pictures = pictures_in(messages)

    def task_with_files(context: JobContext) -> Task:
        """Read the pictures' files, and return the task."""
        assert context.picture_reader is not None, "every process that runs jobs sets it"
        read_file = context.picture_reader(context)
        files = loaded(pictures, read_file)
        return make(filled(messages, files))

    has_paths = any(isinstance(picture, str) for picture in pictures)
    if has_paths:
        return LateTask(task_with_files, blocking=True)
    # This call only checks the limits. Without paths, it never calls `read`.
    loaded(pictures, read=str.encode)
    return make(messages)
