"""Errors of a machine that has run out of something. No row and no job is to blame for them.

A child's task that reaches its limits is not meant: those limits are its own.
"""

import errno

DISK_FULL = frozenset([errno.ENOSPC, errno.EDQUOT])

#: Error numbers: out of descriptors, memory, processes or local disk.
_NUMBERS = DISK_FULL | {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}


_NO_THREAD = "can't start new thread"
"""Python tells this lack by its words alone."""


def is_exhausted(error: BaseException | None) -> bool:
    """Return whether an error says that memory, descriptors, processes, threads or local disk ran out."""
    if isinstance(error, OSError):
        return error.errno in _NUMBERS
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and str(error) == _NO_THREAD)
