"""Whether the data roots can take a run: folders on disks, prefixes of object stores."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..errors import DiskFull, JobsError, OutputNotWritable
from ..runs.names import temporary_name
from ..runs.paths import is_stored, real_path, run_path
from .findings import Finding, fault, ok, told, warning

#: Free space and free names (inodes): with less than the first no run fits, with less than the second few do.
MIN_BYTES, FEW_BYTES = 64 << 20, 2 << 30
MIN_NAMES, FEW_NAMES = 100, 10_000

#: A store has a quarter of it for each request.
STORE_TIMEOUT_S = 20.0

GIB = 1 << 30


def check_places(
    roots: Sequence[str], look: Callable[[str], os.statvfs_result] = os.statvfs
) -> Iterator[Finding]:
    """Try in each root what a run does there. look: a parameter for tests."""
    try:
        from ..parquet.storage import Storage
    except ImportError as error:
        yield fault("files", f"runs cannot be read or written ({error})", "pip install 'tokenmill[worker]'")
        return
    problems: list[Finding | None] = []
    for given in roots:
        try:
            root = real_path(run_path(os.path.expanduser(given)))
        except JobsError as error:
            problems.append(told("files", error))
            continue
        if is_stored(root):
            problems.append(_problem(Storage((root,), timeout_s=STORE_TIMEOUT_S), root, probes=False))
        elif not os.path.isdir(root):
            mend = f"create it, or correct TOKENMILL_DATA_ROOTS: mkdir -p {root}"
            problems.append(fault("files", f"{root} is no folder", mend))
        else:
            yield from _room(root, look)
            problems.append(_problem(Storage((root,)), root, probes=True))
        if problems[-1] is None:
            yield ok("files", f"{root} can be written to, and parts are put in place without replacing any")
    found = [each for each in problems if each is not None]
    if len(found) == len(roots):
        yield from found
    else:  # one that only holds inputs may be closed to a worker
        yield from (warning(each.subject, each.found, each.mend) for each in found)


def _problem(storage: Any, root: str, *, probes: bool) -> Finding | None:
    """Put a file in place twice, which must fail the second time, and remove it.

    probes: a store does so itself where a run's folder is made.
    """
    from ..parquet.storage import writing

    token = secrets.token_hex(8)
    first, second, target = (os.path.join(root, temporary_name(token, f"_doctor{n}")) for n in range(3))
    try:
        with writing(root):
            storage.make_folder(root)
            if not probes:
                return None
            try:
                for path in (first, second):
                    with storage.open_output(path) as file:
                        file.write(b"probe")
                is_put = storage.publish(first, target)
                replaces = storage.publish(second, target)
            finally:
                for path in (first, second, target):
                    storage.remove(path)
    except (DiskFull, OutputNotWritable) as error:
        mend = "give this user the right to write there (chown, chmod, no `ro` mount), or free space"
        return fault("files", f"{root} cannot be written to ({error.args[1]})", mend)
    except JobsError as error:
        return told("files", error)
    if not is_put or replaces:
        mend = "put runs onto a filesystem that keeps what is there"
        return fault("files", f"{root}: a file in its place is overwritten by another", mend)
    return None


def _room(root: str, look: Callable[[str], os.statvfs_result]) -> Iterator[Finding]:
    found = look(root)
    num_bytes, names = found.f_bavail * found.f_frsize, found.f_favail
    space = f"{root}: {num_bytes / GIB:.1f} GiB are free"
    mend = "remove what is not needed there, or let runs write elsewhere (TOKENMILL_DATA_ROOTS)"
    if num_bytes < MIN_BYTES:
        yield fault("files", f"{space}: no part of a run fits", mend)
    elif num_bytes < FEW_BYTES:
        yield warning("files", space, mend)
    else:
        yield ok("files", space)
    if found.f_files and names < FEW_NAMES:  # some filesystems do not count them
        make = fault if names < MIN_NAMES else warning
        yield make("files", f"{root}: only {names} more files can be made", mend)
