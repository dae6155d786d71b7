"""Checks a run's columns where it is submitted, if its files and pyarrow are there."""

from contextlib import suppress

from jobs.errors import ColumnConflict, InputError, MissingColumn, MixedFormats, SearchTooLong, WrongColumnType
from jobs.runs.plans.spec import RunSpec


def check_columns_here(spec: RunSpec) -> None:
    """Raise what planning would, as far as the input's first file is on this machine and shows it."""
    try:
        from jobs.parquet.files.storage import Storage
        from jobs.parquet.planning.find_files import find_files
        from jobs.parquet.planning.inputs import read_columns
        from jobs.parquet.planning.planner import check_columns
    except ImportError:  # no pyarrow: a producer's install has none
        return
    with suppress(OSError):
        try:
            storage = Storage(("/",))
            found = find_files(storage, spec.input, spec.output, spec.input_format)
            schema = read_columns(storage, found, spec.filename_column, input_format=spec.input_format)
            if schema is not None:
                check_columns(spec, schema, found[0].path)
        except (ColumnConflict, MissingColumn, MixedFormats, SearchTooLong, WrongColumnType):
            raise
        except InputError:  # the planning says so, if it finds the same
            return
