"""Which files of a folder are opened, by whatever library: the kernel tells, for Rust tells Python nothing."""

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_IN_OPEN, _IN_ISDIR = 0x20, 0x40000000
_EVENT = struct.Struct("iIII")


@contextmanager
def opened_files(folder: Path) -> Iterator[set[str]]:
    """Give a set that holds, once the body is through, the files that were opened, by their paths in the folder."""
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = library.inotify_init1(os.O_NONBLOCK)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    found = set[str]()
    try:
        folders = {}
        for each in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            number = library.inotify_add_watch(descriptor, os.fsencode(each), _IN_OPEN)
            assert number >= 0, os.strerror(ctypes.get_errno())
            folders[number] = each
        yield found
        found |= {
            str((folders[number] / name).relative_to(folder))
            for number, name in _events(descriptor)
        }
    finally:
        os.close(descriptor)


def _events(descriptor: int) -> Iterator[tuple[int, str]]:
    while True:
        try:
            written = os.read(descriptor, 1 << 20)
        except BlockingIOError:
            return
        start = 0
        while start < len(written):
            number, mask, _, length = _EVENT.unpack_from(written, start)
            start += _EVENT.size
            name = written[start : start + length].rstrip(b"\0").decode()
            start += length
            if name and not mask & _IN_ISDIR:
                yield number, name
