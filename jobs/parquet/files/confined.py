"""Folders below a root, entered so that no link is followed on the way.

A path is looked up and checked once. Whoever may write below the roots can put a link in the place of any of
its folders afterwards: so each of them is opened by its name in the one before, and a link is refused.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from jobs.errors import PathOutsideRoots, PathSwapped

#: Opens a folder that may be entered, be it readable or not; systems without it need a readable one.
_SEARCH = getattr(os, "O_PATH", os.O_RDONLY)


def root_of(path: str, roots: Sequence[str]) -> str | None:
    return next((root for root in roots if path == root or path.startswith(root.rstrip("/") + "/")), None)


@contextmanager
def entered(path: str, roots: Sequence[str], *, create: bool = False) -> Iterator[int]:
    """Lend the descriptor of a folder, for calls with `dir_fd`: it stays the same whatever its path comes to name.

    create: make what is missing. Raises PathOutsideRoots, PathSwapped where a link is met, or OSError.
    """
    path = os.path.normpath(path)
    root = root_of(path, roots)
    if root is None:
        raise PathOutsideRoots(path, ":".join(roots))
    folder = os.open(root, _SEARCH | os.O_DIRECTORY)
    try:
        for name in filter(None, path[len(root) :].split("/")):
            if create:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=folder)
            with links_refused(name, folder, path):
                inner = os.open(name, _SEARCH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


@contextmanager
def links_refused(name: str, folder: int, path: str) -> Iterator[None]:
    """Raise PathSwapped for what the body raises where `name`, in an entered folder, is a link. path: for the error."""
    try:
        yield
    except OSError:
        with suppress(OSError):
            if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise PathSwapped(path, f"{name!r} is a link now") from None
        raise
