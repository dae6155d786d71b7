"""Errors by which a machine says that it has no more of something: no row and no job is to blame for them."""

import errno

_NUMBERS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}


def is_exhausted(error: BaseException | None) -> bool:
    """Return whether memory, descriptors or local disk were lacking."""
    if isinstance(error, OSError):
        return error.errno in _NUMBERS
    return isinstance(error, MemoryError)
