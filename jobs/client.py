"""Submits, watches and reads runs from Python, as the command line does.

    run = jobs.submit(frame, "scored", template="Is this positive? {text}", max_tokens=4)
    run.wait()
    table = run.table()

A program calls these functions itself. They are not enqueued as jobs.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Unpack

from redis import Redis

from jobs.common.display import brief
from jobs.context.adapters import ADAPTER
from jobs.errors import (
    InvalidJob,
    InvalidValue,
    RunFailed,
    RunNotHere,
    UnknownRun,
    wrong_value_error,
)
from jobs.installed import check_sampling, json_schema_of
from jobs.prompts.arguments import SAMPLING_NAMES
from jobs.runs.control import DEFAULT_QUEUE, Cancelled, cancel_run, retry_run, submit_run
from jobs.runs.output import named_run
from jobs.runs.plans.names import SUCCESS
from jobs.runs.plans.paths import is_stored, real_path, run_path
from jobs.runs.plans.spec import RunSpec
from jobs.runs.run_options import RunOptions
from jobs.runs.watching.failures import failure_text
from jobs.runs.watching.follow import End, Followed, Watch, follow
from jobs.runs.watching.reading import read_planned
from jobs.runs.watching.snapshot import RunSnapshot

if TYPE_CHECKING:
    from jobs.parquet.outputs.read_back import FailedRow, FolderReader

#: The ending of the folder beside the output into which an input table is written.
INPUT_SUFFIX = ".input"
#: The options of the command line whose names differ from the arguments of jobs.score_parquet, with these arguments.
_ARGUMENT_OF = {
    "messages_template": "template",
    "column": "sampling_columns",
    "default": "defaults",
    "output_format": "single_file",
}
#: The options of the command line that describe a check, with the kind of check of each.
_CHECK_KINDS = {"check_schema": "json", "check_regex": "regex", "check_function": "function"}


def submit(
    input: Any,
    output: str | os.PathLike[str],
    *,
    queue: str = DEFAULT_QUEUE,
    connection: Redis | None = None,
    input_folder: str | os.PathLike[str] | None = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Submit a run of a file, a folder, a glob, a list of these, or a table, and return the run.

    Submitting the same again resumes the run. Raises InvalidJob or InputError before anything is enqueued, for mistakes
    that this machine can find.

    input: paths, or a table: a DataFrame, or any object with an Arrow stream. A table is written into input_folder, and
    stays there.
    input_folder: by default `<output>.input`. connection: by default a connection to RQ_REDIS_URL.
    options: the options of `tokenmill submit`, by the same names; `tokenmill submit --help` explains each. An option
    that is None is left out.
    """
    client = _connection(connection)
    _check_names(options)
    named_arguments = run_arguments(options)
    output_path = os.fspath(output)
    paths = _paths(input)
    if paths is None:
        folder = f"{run_path(output_path)}{INPUT_SUFFIX}"
        if input_folder is not None:
            folder = os.fspath(input_folder)
        if is_stored(run_path(folder)):
            raise InvalidJob(
                "a table is written by this program, which has no keys of the object store: name an "
                "input_folder on a disk that the workers see, or put the table into the store yourself"
            )
        with _needs_pyarrow("a table as input"):
            from jobs.parquet.tables.given_table import write_table_file
        paths = [write_table_file(input, run_path(folder))]
    elif input_folder is not None:
        raise InvalidJob(
            "input_folder is where a table is written, and the input names files: leave it out"
        )
    run = submit_run(
        client, queue, check_run=check_here, input=paths, output=output_path, **named_arguments
    )
    return Run(run, client, run_path(output_path))


def run(name: str | os.PathLike[str], *, connection: Redis | None = None) -> Run:
    """Return the run of this id, or of this output folder. Raises UnknownRun."""
    client = _connection(connection)
    run_id, output = named_run(client, os.fspath(name))
    if output is not None:
        return Run(run_id, client, output.folder)
    planned = read_planned(client, run_id)
    return Run(planned.run, client, planned.output)


class Run:
    """A run that was submitted. output: the run's folder, as the submission named it."""

    def __init__(self, id: str, connection: Redis, output: str) -> None:
        self.id = id
        self.output = output
        self._connection = connection

    def __repr__(self) -> str:
        return f"<Run {self.id} in {self.output!r}>"

    def status(self) -> RunSnapshot:
        """Return the run's state, such as its `state`, `rows_done`, `rows` and `errors`. Raises UnknownRun."""
        return read_planned(self._connection, self.id)

    def wait(
        self,
        timeout: float | None = None,
        *,
        progress: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> RunSnapshot:
        """Wait until the run has finished, and return its state.

        timeout: the most seconds to wait; None for no limit. progress: whether a bar shows rows, speed and the time
        left, on stderr or in a notebook.
        Raises TimeoutError after the timeout, and RunFailed if the run ended without having finished.
        """
        deadline = None if timeout is None else clock() + timeout
        watch = Watch(lambda: read_planned(self._connection, self.id))

        def nap(seconds: float) -> None:
            """Sleep, but not beyond the timeout. Raises TimeoutError after the timeout."""
            if deadline is not None:
                left_s = deadline - clock()
                if left_s <= 0:
                    outlook = ", and goes on" if watch.waits_for is None else f": {watch.waits_for}"
                    raise TimeoutError(f"run {self.id} has not ended within {timeout} s{outlook}")
                seconds = min(seconds, left_s)
            sleep(seconds)

        if progress:
            from jobs.runs.watching.progress_bar import Bar  # loads tqdm

            with closing(Bar()) as bar:
                followed = follow(watch, nap, bar.show, bar.warn)
        else:
            followed = follow(watch, nap)
        problem = followed.problem
        if problem is None:
            return self.status()
        raise RunFailed(self.id, "; ".join([*self._failures(followed), problem]))

    def _failures(self, followed: Followed) -> list[str]:
        """Return why a run that did not finish has failed: the errors of its planning and of its first failed job."""
        snapshot = followed.snapshot
        if followed.end is End.FINISHED:
            return []
        failures = []
        if snapshot.plan_error:
            failures.append(snapshot.plan_error)
        if snapshot.failed_jobs:
            failures.append(failure_text(self._connection, snapshot.failed_jobs[0]))
        return failures

    async def wait_async(
        self, timeout: float | None = None, *, progress: bool = False
    ) -> RunSnapshot:
        """Wait like `wait`, but let other tasks of the event loop run meanwhile."""
        is_cancelled = threading.Event()

        def sleep(seconds: float) -> None:
            """Sleep. If the task that awaits this thread was cancelled, end the thread by an InterruptedError."""
            if is_cancelled.wait(seconds):
                raise InterruptedError

        try:
            return await asyncio.to_thread(self.wait, timeout, progress=progress, sleep=sleep)
        finally:
            is_cancelled.set()

    def table(self) -> Any:
        """Return the rows as a pyarrow Table, in the input's order.

        Raises RunNotHere if the run has not ended, and StoreError.
        """
        reader = self.reader("table()")
        if not reader.has_ended:
            raise RunNotHere(
                self.id, self.output, f"it has no {SUCCESS} yet, which marks the run's end"
            )
        return reader.table()

    def frame(self) -> Any:
        """Return the rows as a pandas DataFrame, with the input's types and index. Raises the errors of `table`."""
        return self.table().to_pandas()

    def polars(self) -> Any:
        """Return the rows as a polars DataFrame. Raises the errors of `table`, and ImportError without polars."""
        import polars

        return polars.from_arrow(self.table())

    def errors(self, limit: int = 1000, *, cut: bool = False) -> list[FailedRow]:
        """Return the first `limit` rows with an error, even while the run goes on. Raises RunNotHere, StoreError.

        cut: whether rows whose answer was cut at its limit of tokens are returned too.
        """
        _reasons, rows = self.reader("errors()").errors(limit, cut)
        return rows

    def retry(self, output: str | os.PathLike[str], *, max_tokens: int | None = None) -> Run:
        """Submit the run again into another output, and return the new run. Rows without an error keep their answers.

        max_tokens: a larger limit of tokens. Rows whose answer was cut at the old limit are then asked again too.
        Raises the errors of `errors`, and InvalidJob for a limit that would cut the same rows again.
        """
        plan = self.reader("retry()").plan
        run = retry_run(self._connection, plan, os.fspath(output), max_tokens)
        return Run(run, self._connection, run_path(os.fspath(output)))

    def cancel(self) -> Cancelled:
        """Take the run's waiting jobs off the queue and stop its running jobs. Finished parts stay.

        Raises UnknownRun or RunResubmitted.
        """
        return cancel_run(self._connection, self.status().run)

    def reader(self, purpose: str) -> FolderReader:
        """Return a reader of the run's folder. Raises RunNotHere if the folder is missing or holds another run.

        purpose: what needs the reader, for the error if pyarrow is missing.
        """
        with _needs_pyarrow(purpose):
            from jobs.parquet.outputs.read_back import FolderReader
        if not is_stored(self.output) and not os.path.isdir(self.output):
            raise RunNotHere(self.id, self.output, "there is no such folder on this machine")
        reader = FolderReader(real_path(self.output))
        if reader.planned_run not in (self.id, self._planned_id()):
            raise RunNotHere(
                self.id, self.output, f"there is run {reader.planned_run}, not this one"
            )
        return reader

    def _planned_id(self) -> str:
        """Return the id under which the run was planned.

        It differs from `id` if the output has another real path on the worker's machine.
        """
        with suppress(UnknownRun):
            return self.status().run
        return self.id


def check_here(spec: RunSpec) -> None:
    """Raise the errors of planning that this machine can find. Without pyarrow, some checks are left out."""
    spec.check_values(check_sampling)

    try:
        from jobs.parquet.planning.inputs import check_columns_here
    except ImportError:  # a producer may have no pyarrow
        return
    check_columns_here(spec)


def _connection(connection: Redis | None) -> Redis:
    """Return the given connection, or one to RQ_REDIS_URL. Raises InvalidJob."""
    if connection is not None:
        return connection
    try:
        return Redis.from_url(os.environ.get("RQ_REDIS_URL", "redis://localhost:6379"))
    except ValueError:  # the error's text may hold the password
        raise InvalidJob(
            "RQ_REDIS_URL is no Redis URL: expected redis://, rediss:// or unix://"
        ) from None


def run_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return submit_run's arguments for options of the command line.

    Raises InvalidJob if an argument is given under two names.
    """
    arguments = {}
    for name, value in options.items():
        if value is not None:
            arguments[name] = _as_json(name, value)

    single_values = {}
    for name in SAMPLING_NAMES:
        if name in arguments:
            single_values[name] = arguments.pop(name)
    if single_values:
        sampling = arguments.get("sampling", {})
        if not isinstance(sampling, dict):
            raise wrong_value_error("sampling", sampling, "a mapping")
        arguments["sampling"] = {**sampling, **single_values}

    adapter_column = arguments.pop("adapter_column", None)
    if adapter_column is not None:
        # `column` is the command line's name for `sampling_columns`.
        columns_name = "column" if "column" in arguments else "sampling_columns"
        columns = arguments.get(columns_name, {})
        if not isinstance(columns, dict) or ADAPTER in columns:
            raise wrong_value_error(
                columns_name,
                columns,
                "a mapping without adapter, because adapter_column names the column of adapters",
            )
        arguments[columns_name] = {**columns, ADAPTER: adapter_column}

    checks = {}
    for option, kind in _CHECK_KINDS.items():
        if option in arguments:
            checks[kind] = arguments.pop(option)
    if checks:
        _add(arguments, "check", checks)

    for option, argument_name in _ARGUMENT_OF.items():
        if option in arguments:
            value = arguments.pop(option)
            _add(arguments, argument_name, value)
    return arguments


def response_format(model: type) -> dict[str, Any]:
    """Return OpenAI's response_format for a pydantic model's class. A job takes it as an option:

    queue.enqueue("jobs.chat", messages, response_format=tokenmill.response_format(Date))
    """
    schema = json_schema_of(model)
    if schema is model:  # `json_schema_of` left it as it is, so it is not a pydantic model's class
        raise wrong_value_error("response_format", model, "the class of a pydantic model")
    return {"type": "json_schema", "json_schema": {"name": model.__name__, "schema": schema}}


def _as_json(name: str, value: Any) -> Any:
    """Return an option's value as JSON: a schema for a pydantic model's class, a text for a path."""
    if isinstance(value, type):
        return response_format(value) if name == "response_format" else json_schema_of(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, dict):
        return {key: _as_json(key, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_json(name, inner) for inner in value]
    return value


def _check_names(names: Iterable[str]) -> None:
    """Raise InvalidValue if an option has a name that `submit` does not know."""
    known = RunOptions.__optional_keys__
    for name in names:
        if name in known:
            continue
        closest = get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {closest[0]}? " if closest else ""
        known_text = ", ".join(sorted(known))
        # InvalidValue puts the name in place of {}.
        raise InvalidValue(
            "{} is no argument of submit; " + f"{hint}it has {known_text}", brief(name)
        )


def _signature() -> inspect.Signature:
    """Return the signature of `submit` with each option by name, for `help` and for shells that complete names."""
    signature = inspect.signature(submit)
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            parameters.append(parameter)
    for name, annotation in RunOptions.__annotations__.items():
        option = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )
        parameters.append(option)
    return signature.replace(parameters=parameters)


submit.__signature__ = _signature()  # type: ignore[attr-defined]


def _add(arguments: dict[str, Any], name: str, value: Any) -> None:
    """Add an argument. Raises InvalidJob if the argument was already given under another name."""
    # The option output_format adds the argument single_file. The user may give both: the format replaces a True.
    is_given_twice = name in arguments and arguments[name] is not True
    if is_given_twice:
        raise InvalidJob(f"{name} is given twice, by two of its names: give it once")
    arguments[name] = value


def _paths(source: Any) -> list[str] | None:
    """Return the paths that an input names; None if the input is a table. Raises InvalidValue for anything else."""
    sources = source if isinstance(source, list | tuple) else [source]
    if all(isinstance(path, str | os.PathLike) for path in sources):
        return [os.fspath(path) for path in sources]
    if isinstance(source, list | tuple | dict) or source is None:
        raise wrong_value_error("input", source, "paths, or a table such as a DataFrame")
    return None


@contextmanager
def _needs_pyarrow(purpose: str) -> Iterator[None]:
    """Turn an ImportError of the body into one that says what to install, and for which purpose."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{purpose} needs pyarrow ({error}): pip install pyarrow") from error
