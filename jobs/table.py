"""The names of the functions that may be enqueued, and what makes the task of each.

Names are compared exactly. A pattern such as `jobs.*` would allow `jobs.os.system`, because RQ resolves a name
attribute by attribute.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

from jobs.context import JobContext
from jobs.errors import InvalidJob
from jobs.prompts.prompt_jobs import chat_task, complete_task
from jobs.prompts.scoring.table import SCORING_JOBS
from jobs.tasks import OpenTask, Task, TimedTask


class FileTask(Task):
    """A task over files. Opening the task calls the function that _FILE_JOBS names for the job.

    args, kwargs: the arguments of that function, after the job's context.
    """

    blocking = True
    reads_rows = True

    def __init__(self, function_name: str, /, *args: Any, **kwargs: Any) -> None:
        self._function_name = function_name
        self._args = args
        self._kwargs = kwargs

    def open(self, context: JobContext) -> OpenTask:
        """Call the function, which opens the files."""
        open_task = _call(self._function_name, context, *self._args, **self._kwargs)
        assert isinstance(open_task, OpenTask)
        return open_task


#: Functions that open the tasks of jobs over files. They are imported when they are called, because they need pyarrow.
_FILE_JOBS: Mapping[str, str] = {
    "jobs.score_shard": "jobs.parquet.shards.shard_work.ShardWork.open",
    "jobs.survey_parquet": "jobs.parquet.planning.survey.SurveyWork",
    "jobs.verify_rows": "jobs.parquet.shards.verify_work.VerifyWork",
}

#: Functions of jobs that need no engine.
_OWN_FUNCTIONS: Mapping[str, str] = {
    "jobs.score_parquet": "jobs.parquet.planning.planner.score_parquet",
    "jobs.post_run_end": "jobs.runs.end_notices.post_run_end",
}

#: The functions that make the tasks of jobs that need the engine, by the names of the jobs.
_ENGINE_JOBS: Mapping[str, Callable[..., Task]] = {
    "jobs.complete": complete_task,
    "jobs.chat": chat_task,
    **{job.name: job.make_task for job in SCORING_JOBS},
    **{name: partial(FileTask, name) for name in _FILE_JOBS},
}


def task_of(
    function_name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Task | None:
    """Return the task of a job that needs the engine; None for any other job. Loads no pyarrow. Raises InvalidJob."""
    factory = _ENGINE_JOBS.get(function_name)
    if factory is None:
        return None
    task_arguments: Mapping[str, Any] = kwargs or {}
    if not isinstance(args, (list, tuple)) or not isinstance(task_arguments, dict):
        raise InvalidJob(
            f"{function_name}: the job must hold a list of arguments and a mapping of keyword arguments"
        )
    deadline = None
    # Jobs over files take no deadline, because their run has one.
    if "deadline" in task_arguments and function_name not in _FILE_JOBS:
        task_arguments = dict(task_arguments)
        deadline = task_arguments.pop("deadline")
    try:
        task = factory(*args, **task_arguments)
    except TypeError:
        # The arguments are checked only after a TypeError, because the check takes longer than all the rest.
        _check_binding(function_name, factory, args, task_arguments)
        raise
    return task if deadline is None else TimedTask(task, deadline)


def own_function(function_name: str) -> Callable[..., Any] | None:
    """Return the function of a job that needs no engine; None for any other job.

    The function takes the job's context, and then the job's own arguments.
    """
    if function_name not in _OWN_FUNCTIONS:
        return None
    return partial(_call, function_name)


def _call(name: str, context: JobContext, /, *args: Any, **kwargs: Any) -> Any:
    """Import and call the function of a job. Raises InvalidJob for arguments that the function does not take."""
    dotted_name = _FILE_JOBS[name] if name in _FILE_JOBS else _OWN_FUNCTIONS[name]
    function = resolve_name(dotted_name)
    _check_binding(name, function, (context, *args), kwargs)
    return function(context, *args, **kwargs)


def _check_binding(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> None:
    """Raise InvalidJob if a function does not take these arguments. name: the job's function, for the error."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **(kwargs or {}))
    except TypeError as error:
        parameter_names = []
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                parameter_names.append("...")
            elif parameter.name != "context":
                parameter_names.append(parameter.name)
        problem = str(error)[:200]
        raise InvalidJob(f"{name}: {problem}; it takes {', '.join(parameter_names)}") from None


#: The functions that a worker runs.
ALLOWED_FUNCTIONS: frozenset[str] = frozenset(_ENGINE_JOBS) | frozenset(_OWN_FUNCTIONS)
