"""Recognizes the errors of a machine that has run out of something. No row and no job is to blame for them.

A child's task that reaches its own limits is another matter: only that task is to blame.
"""

import errno

#: Error numbers: no room left on the disk, or in the user's quota.
DISK_FULL = frozenset([errno.ENOSPC, errno.EDQUOT])

#: Error numbers: no descriptors, memory, processes or local disk left.
_NUMBERS = DISK_FULL | {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}

_NO_THREAD = "can't start new thread"
"""The message of Python's RuntimeError when a thread cannot be started."""


def is_exhausted(error: BaseException | None) -> bool:
    """Return whether an error says that memory, descriptors, processes, threads or local disk ran out."""
    if isinstance(error, OSError):
        return error.errno in _NUMBERS
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and str(error) == _NO_THREAD
    )
