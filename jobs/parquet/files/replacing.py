"""Puts a file over another one, where others may be about to do so, and frozen since they looked."""

from __future__ import annotations

import os
from collections.abc import Callable

from jobs.parquet.files.storage import Storage, writing
from jobs.runs.plans.names import is_temporary


def replace_file(storage: Storage, temporary: str, path: str, of: str, may: Callable[[], bool]) -> bool:
    """Put a written file over the one that is there, where that is as it was when the other was written.

    temporary: this execution's file, in the same folder. of: what each execution calls such a file
    (temporary_name of jobs/runs/plans/names.py). may: looks whether what is there is as it was. Returns False
    where it is not, or where somebody has removed the file. Of two at once, one has written its file before
    the other removed all others': that one's rename fails, or the other's look finds what it has put there.
    Raises OutputNotWritable.
    """
    with writing(path):
        remove_replacements(storage, os.path.dirname(path), of, temporary)
        return may() and storage.replace(temporary, path)


def remove_replacements(storage: Storage, folder: str, of: str, but: str = "") -> None:
    """Remove what executions have written to replace a file, so that none of them does. but: this one's."""
    for name in storage.names(folder):
        if is_temporary(name, of) and name != os.path.basename(but):
            storage.delete(os.path.join(folder, name))
