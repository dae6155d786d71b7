"""Converts inputs that are not Parquet: planning makes a Parquet file of each.

The Parquet files are in `_input/` beside the plan until the run ends. Their names depend on their contents. So if two
planners write a file of the same name, both files are equal, and the first one stays.
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
from jobs.parquet.tables.table_reading import Contents, look_at, open_table, with_second_try
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
    """Return what a file holds.

    rows: how many rows to look at; None for all. If the file is Parquet, only its footer is looked at.
    dialect: how the file's text is written, see RunSpec.dialect.
    Raises OtherEncoding, OtherDelimiter or TooManyBadLines if the text is not written as the dialect says. Raises
    SchemaMismatch, or an error of look_at.
    """
    if input_format == PARQUET:
        return look_at(storage, path)
    return look_at(storage, path, input_format, f"{_TASKS}:scan", rows=rows, dialect=dict(dialect))


def convert_inputs(storage: Storage, plan: Plan, files: Iterable[int], execution_id: str) -> int:
    """Make the Parquet files of inputs that are not Parquet. Return how many bytes these Parquet files have.

    files: numbers of the plan's files. Raises InputError or OutputError.
    """
    num_bytes = 0
    converted_paths = set()
    for number in files:
        file = plan.files[number]
        path = plan.rows_path(file)
        if path == file.path or path in converted_paths:
            continue
        converted_paths.add(path)
        if storage.stat(path) is None:
            # The missing file held the rows that planning chose. Only planning can choose them again.
            if file.num_chosen:
                raise NewRowsGone(path, file.path, plan.spec.output)
            _convert(storage, plan, file, execution_id)
    for path in converted_paths:
        stat = storage.stat(path)
        if stat is not None:
            num_bytes += stat.size
    return num_bytes


def _convert(storage: Storage, plan: Plan, file: PlannedFile, execution_id: str) -> None:
    """Make the Parquet file of one input. Raises InputChanged if the input is not the planned one."""
    source = replace(file, path=storage.resolve(file.path))
    target = plan.rows_path(file)

    def write(sink: Any) -> None:
        """Have a child process convert the input, and write the result. Raises InputChanged if the input changes."""
        question = {
            "kinds": plan.columns,
            "rows": file.rows,
            "as_json": plan.as_json,
            "dialect": plan.spec.dialect,
        }
        with open_table(storage, source.path, plan.input_format) as ask:
            for _, body in ask(f"{_TASKS}:convert", question):
                sink.write(body)
        check_unchanged(storage, source, plan.input_format)

    storage.make_folder(os.path.dirname(target))
    check_unchanged(storage, source, plan.input_format)
    with_second_try(source.path, lambda: storage.put(target, execution_id, write))


@contextmanager
def converted_for_now(
    storage: Storage, plan: Plan, files: Iterable[int]
) -> Iterator[tuple[Storage, Plan]]:
    """Lend a storage and a plan with which the run's rows can be read. Converted files are in a temporary folder.

    Converted files in the output are not used, because a preview has no output, and a finished run has
    removed its converted files.
    """
    if plan.input_format == PARQUET:
        yield storage, plan
        return
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:
        folder = os.path.realpath(folder)
        storage_with_folder = storage.with_root(folder)
        plan_with_folder = replace(plan, input_folder=folder)
        # The id would keep the temporary files of several executions apart, but only this execution writes here.
        convert_inputs(storage_with_folder, plan_with_folder, files, execution_id="own")
        yield storage_with_folder, plan_with_folder


def remove_working_folders(storage: Storage, plan: Plan) -> None:
    """Remove the folders that a run needs only until its end. Raises OutputNotWritable.

    These folders hold converted inputs, answers of earlier runs, and journals.
    """
    output = plan.spec.output
    for folder in (
        plan.converted_folder,
        os.path.join(output, REUSED),
        os.path.join(output, JOURNAL),
    ):
        with writing(folder):
            for name in storage.names(folder):
                storage.remove(os.path.join(folder, name))
            storage.remove(folder)
