"""The files of a cancelled batch: the lines that were answered before, in the input's order."""

from typing import TYPE_CHECKING

from jobs.runs.plans.names import OPENAI_BATCH, PLAN, output_names
from tokenmill.server.batches.file_store import ANSWERED
from tokenmill.server.batches.folders import Folder, read_json, write_json

if TYPE_CHECKING:
    from jobs.parquet.outputs.read_back import FolderReader


def write_answered_lines(folder: Folder, batch: str) -> set[str]:
    """Write the output and the errors of a cancelled batch, unless they are there; return the names of the files.

    A file without lines is left out. The run's parts no longer change, so two servers write the same. batch: the name
    of the batch's folder. Raises OSError, StoreError, or PartDamaged.
    """
    # Not before: it loads Arrow, which doubles a server's memory.
    from jobs.parquet.outputs.read_back import FolderReader

    if folder.stat(f"{batch}/run/{PLAN}") is None:
        return set()
    # Written last: with it the files are whole.
    record = f"{batch}/{ANSWERED}/files.json"
    known = read_json(folder, record)
    if known is not None:
        return set(known["files"])

    run = FolderReader(folder.path(f"{batch}/run"))
    files = [
        name
        for name in output_names(OPENAI_BATCH)
        if _write(run, name, folder, f"{batch}/{ANSWERED}/{name}")
    ]
    write_json(folder, record, {"files": files})
    return set(files)


def _write(run: "FolderReader", name: str, folder: Folder, target: str) -> bool:
    """Write the lines of one of a batch's files; return whether there are any."""
    draft = folder.create(target)
    try:
        has_lines = run.write_batch_lines(name, draft) > 0
        if has_lines:
            draft.finish()
        return has_lines
    finally:
        draft.drop()
