"""Calls the engine and the worker, which are found by entry points.

Engine and worker import this package, so this package cannot import them. A producer's `import jobs` loads neither of
them, and a stock `rq worker` can still run our jobs.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from jobs.errors import InvalidJob, InvalidValue, JobsError


def run_job(function_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Run one of our functions as the current job of a stock worker; return its result. Raises JobsError."""
    return _load("stock_worker").run_job(function_name, args, kwargs)  # type: ignore[no-any-return]


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raise InvalidJob for sampling values that no request could use. Loads no torch."""
    engine = _load("engine")
    try:
        engine.SamplingParams.from_mapping(sampling)
    except engine.InvalidSampling as error:
        if error.got is None:
            raise InvalidJob(error.problem) from None
        message = error.problem + ", got {}"  # InvalidValue puts the value in place of {}
        raise InvalidValue(message, error.got) from None


def json_schema_of(value: Any) -> Any:
    """Return the JSON schema of a pydantic model's class, and any other value as it is. Loads no torch."""
    return _load("engine").json_schema_of(value)


def model_table() -> str:
    """Return the served architectures, and how each is served, as text for people. Loads no torch."""
    return _load("engine").model_table()  # type: ignore[no-any-return]


def describe_model(model: str) -> str:
    """Return a text on how a model is served here, and how much memory it needs. Raises JobsError.

    model: the model's folder or hub id.
    """
    engine = _load("engine")
    try:
        return engine.describe_model(model)  # type: ignore[no-any-return]
    except engine.ConfigError as error:
        raise JobsError(f"{type(error).__name__}: {error}") from None


@cache
def _load(name: str) -> Any:
    """Return what an entry point of pyproject.toml refers to. name: the entry point's name."""
    return entry_points(group="tokenmill")[name].load()
