"""Errors of a machine that has run out of something. No row and no job is to blame for them.

A child's task that reaches its limits is not meant: those limits are its own.
"""

import errno

DISK_FULL = frozenset([errno.ENOSPC, errno.EDQUOT])

#: Error numbers: out of descriptors, memory, processes or local disk.
_NUMBERS = DISK_FULL | {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}


def is_exhausted(error: BaseException | None) -> bool:
    """Return whether an error says that memory, descriptors, processes or local disk ran out."""
    if isinstance(error, OSError):
        return error.errno in _NUMBERS
    return isinstance(error, MemoryError)
