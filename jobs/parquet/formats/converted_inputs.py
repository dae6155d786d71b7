"""A run's inputs that are no Parquet: what they hold, and the Parquet files that planning makes of them.

Those lie in `_input/` beside the plan until the run ends. Each has a name that tells its contents: planners
that meet write the same, and one that was made stays.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jobs.errors import NewRowsGone
from jobs.parquet.files.fingerprint import check_unchanged
from jobs.parquet.files.storage import Storage, writing
from jobs.parquet.tables.table_reading import Contents, asked_again, look_at, open_table
from jobs.runs.plans.names import JOURNAL, PARQUET, REUSED
from jobs.runs.plans.plan import Plan, PlannedFile

_TASKS = "jobs.parquet.formats.converter"


def scan(
    storage: Storage,
    path: str,
    input_format: str,
    rows: int | None = None,
    dialect: Mapping[str, str] = MappingProxyType({}),
) -> Contents:
    """Look at a file; if it is no Parquet, through its first `rows`.

    dialect: how its text is written, see RunSpec.dialect. Raises OtherEncoding, OtherDelimiter or TooManyBadLines if
    the text is written otherwise, SchemaMismatch, or an error of look_at.
    """
    if input_format == PARQUET:
        return look_at(storage, path)
    return look_at(storage, path, input_format, f"{_TASKS}:scan", rows=rows, dialect=dict(dialect))


def convert_inputs(storage: Storage, plan: Plan, files: Iterable[int], execution_id: str) -> int:
    """Make the Parquet files of inputs that have none; return their bytes. Raises InputError or OutputError."""
    wanted = {plan.rows_path(plan.files[number]): plan.files[number] for number in files}
    wanted = {path: file for path, file in wanted.items() if path != file.path}
    for path, file in wanted.items():
        if storage.stat(path) is None:
            if file.kept:
                raise NewRowsGone(path, file.path, plan.spec.output)
            _convert(storage, plan, file, execution_id)
    return sum(stat.size for stat in map(storage.stat, wanted) if stat is not None)


def _convert(storage: Storage, plan: Plan, file: PlannedFile, execution_id: str) -> None:
    source, target = replace(file, path=storage.resolve(file.path)), plan.rows_path(file)

    def write(sink: Any) -> None:
        with open_table(storage, source.path, plan.input_format) as ask:
            question = {"kinds": plan.columns, "rows": file.rows, "as_json": plan.as_json}
            question["dialect"] = plan.spec.dialect
            for _, body in ask(f"{_TASKS}:convert", question):
                sink.write(body)
        check_unchanged(storage, source, plan.input_format)

    storage.make_folder(os.path.dirname(target))
    check_unchanged(storage, source, plan.input_format)
    asked_again(source.path, lambda: storage.put(target, execution_id, write))


@contextmanager
def converted_for_now(storage: Storage, plan: Plan, files: Iterable[int]) -> Iterator[tuple[Storage, Plan]]:
    """Lend a plan whose files can be read, with storage in a folder of this machine.

    The output is not searched: a preview has none, and after a run's end it keeps no inputs.
    """
    if plan.input_format == PARQUET:
        yield storage, plan
        return
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:
        folder = os.path.realpath(folder)
        wider, own = storage.with_root(folder), replace(plan, input_folder=folder)
        convert_inputs(wider, own, files, "own")
        yield wider, own


def remove_converted(storage: Storage, plan: Plan) -> None:
    """Remove what planning has put beside a run's plan, and the journals. Raises OutputNotWritable."""
    for folder in (plan.converted_folder, *(os.path.join(plan.spec.output, name) for name in (REUSED, JOURNAL))):
        with writing(folder):
            for name in storage.names(folder):
                storage.remove(os.path.join(folder, name))
            storage.remove(folder)
