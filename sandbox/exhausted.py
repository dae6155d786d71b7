"""Errors by which a machine says that it has no more of something: no row and no job is to blame for them.

What a child's task runs into is not among them: its limits are its own.
"""

import errno

DISK_FULL = frozenset([errno.ENOSPC, errno.EDQUOT])

#: No more descriptors, memory, processes or local disk.
_NUMBERS = DISK_FULL | {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}


def is_exhausted(error: BaseException | None) -> bool:
    """Return whether memory, descriptors, processes or local disk were lacking."""
    if isinstance(error, OSError):
        return error.errno in _NUMBERS
    return isinstance(error, MemoryError)
