"""Writes the output files of a cancelled batch: the lines that were answered before the cancel, in input order."""

from typing import TYPE_CHECKING

from jobs.runs.plans.names import OPENAI_BATCH, PLAN, output_names
from tokenmill.server.batches.file_store import ANSWERED
from tokenmill.server.batches.folders import Folder, read_json, write_json

if TYPE_CHECKING:
    from jobs.parquet.outputs.read_back import FolderReader


def write_answered_lines(folder: Folder, batch: str) -> set[str]:
    """Write the files of a cancelled batch, unless they are there already. Return the names of the files.

    A file that would have no lines is not written. batch: the name of the batch's folder. Raises OSError, StoreError or
    PartDamaged.
    """
    # Imported here because it loads Arrow, which doubles a server's memory.
    from jobs.parquet.outputs.read_back import FolderReader

    if folder.stat(f"{batch}/run/{PLAN}") is None:
        return set()
    # The record is written last: once it is there, so are the files.
    record_name = f"{batch}/{ANSWERED}/files.json"
    record = read_json(folder, record_name)
    if record is not None:
        return set(record["files"])

    # The parts of a stopped run no longer change. So two servers that do this at once write the same files.
    run = FolderReader(folder.path(f"{batch}/run"))
    written_names = []
    for name in output_names(OPENAI_BATCH):
        if _write_file(run, name, folder, f"{batch}/{ANSWERED}/{name}"):
            written_names.append(name)
    write_json(folder, record_name, {"files": written_names})
    return set(written_names)


def _write_file(run: "FolderReader", name: str, folder: Folder, target: str) -> bool:
    """Write one file of a batch, unless it would have no lines. Return whether it was written.

    name: the file's name in the run's output. target: its name in the server's folder.
    """
    draft = folder.create(target)
    try:
        has_lines = run.write_batch_lines(name, draft) > 0
        if has_lines:
            draft.finish()
        return has_lines
    finally:
        draft.drop()
