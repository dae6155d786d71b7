"""A rename that replaces nothing, for filesystems without hard links, such as many network mounts."""

from __future__ import annotations

import ctypes
import errno
import os

#: Of linux/fs.h.
_RENAME_NOREPLACE = 1


def rename_exclusively(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
    """Rename a file in one step that fails where the new name is taken (renameat2 of Linux).

    Raises FileExistsError, or OSError with ENOSYS, ENOTSUP or EINVAL where kernel or filesystem cannot.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target) from None
    done = rename(src_dir_fd, os.fsencode(source), dst_dir_fd, os.fsencode(target), _RENAME_NOREPLACE)
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)
