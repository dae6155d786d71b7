"""Pictures that lie in files below the data roots."""

import os
from collections.abc import Callable

from jobs.common.display import brief
from jobs.context import JobContext
from jobs.errors import InputNotFound, InvalidValue, PathSwapped
from jobs.parquet.files.storage import Storage, reading
from jobs.prompts.pictures import MAX_BYTES


def picture_reader(context: JobContext, folder: str | None = "") -> Callable[[str], bytes]:
    """Return what reads the file of a path or URI. folder: of relative paths; None where rows have several."""
    storage = Storage.of(context)

    def read(path: str) -> bytes:
        is_relative = not path.startswith("/") and "://" not in path
        if is_relative and folder is None:
            raise InvalidValue("{} is relative, and rows of several folders were put together: name it whole", path)
        path = storage.resolve(os.path.join(folder or "", path) if is_relative else path)
        try:
            with reading(path), storage.open_input(path) as file:
                if (size := file.size()) > MAX_BYTES:
                    raise InvalidValue(f"{{}} has {size} bytes, more than the limit of {MAX_BYTES}", brief(path))
                return bytes(file.read())
        except (InputNotFound, PathSwapped, PermissionError):
            raise InvalidValue("there is no picture at {}, or it may not be read", brief(path)) from None

    return read
