"""The files of a cancelled batch: the lines that were answered before, in the input's order."""

import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.runs.plans.names import OPENAI_BATCH, PLAN, output_names
from tokenmill.server.batches.file_store import ANSWERED

if TYPE_CHECKING:
    from jobs.parquet.outputs.read_back import FolderReader


def write_answered_lines(folder: Path) -> set[str]:
    """Write the output and the errors of a cancelled batch, unless they are there; return the names of the files.

    A file without lines is left out. The run's parts no longer change, so two servers would write the same. folder: the
    batch's. Raises OSError, or PartDamaged.
    """
    # Not before: it loads Arrow, which doubles a server's memory.
    from jobs.parquet.outputs.read_back import FolderReader

    answered = folder / ANSWERED
    if not (folder / "run" / PLAN).is_file():
        return set()
    if not answered.is_dir():
        draft = folder / f".{ANSWERED}-{secrets.token_hex(8)}"
        draft.mkdir()
        try:
            _write(FolderReader(str(folder / "run")), draft)
            draft.rename(answered)
        except OSError:
            if not answered.is_dir():
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return {path.name for path in answered.iterdir()}


def _write(run: "FolderReader", folder: Path) -> None:
    for name in output_names(OPENAI_BATCH):
        path = folder / name
        with path.open("wb") as sink:
            num_bytes = run.write_batch_lines(name, sink)
        if not num_bytes:
            path.unlink()
