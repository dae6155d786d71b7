"""The names that Tokenmill offers to Python programs: the engine, runs over files, the worker's class, and errors.

    import tokenmill

    run = tokenmill.submit(frame, "scored", template="Is this review positive? {text}", max_tokens=4)

Each name is imported from its package when it is used. So `import tokenmill` alone loads no torch, pyarrow or rq.
In queues, jobs keep the names of their functions in the package `jobs`, such as "jobs.complete".
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine import Completion, Engine, EngineConfig, EngineError, SamplingParams
    from jobs import JobsError, Run, response_format, run, submit
    from worker import BatchWorker, WorkerError

__all__ = [
    "BatchWorker",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineError",
    "JobsError",
    "Run",
    "SamplingParams",
    "WorkerError",
    "response_format",
    "run",
    "submit",
]

#: By name: the package from which the name is imported.
_PACKAGES = {
    "BatchWorker": "worker",
    "Completion": "engine",
    "Engine": "engine",
    "EngineConfig": "engine",
    "EngineError": "engine",
    "JobsError": "jobs",
    "Run": "jobs",
    "SamplingParams": "engine",
    "WorkerError": "worker",
    "response_format": "jobs",
    "run": "jobs",
    "submit": "jobs",
}


if not TYPE_CHECKING:  # a type checker that sees `__getattr__` lets misspelled names pass

    def __getattr__(name: str) -> object:
        """Import a public name from its package. Raises AttributeError for any other name."""
        if name not in _PACKAGES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        package = importlib.import_module(_PACKAGES[name])
        return getattr(package, name)


def __dir__() -> list[str]:
    """Return the module's names, with the public names that have not been imported yet."""
    return sorted({*globals(), *__all__})
