"""The checks of a worker's machine, in their order."""

import os
from collections.abc import Iterator

from engine import ConfigError, EngineConfig, check_up
from jobs.doctor.findings import Examination, Finding, Level, check_places, missing, ok, told
from jobs.runs.plans.paths import split_roots
from worker.errors import StartupError
from worker.settings import WorkerSettings, read_variable, with_variables
from worker.start import load_functions


def checks() -> list[Examination]:
    """Return the checks of a worker's machine."""
    return [
        Examination("settings", _check_settings, 60),
        Examination("installation", lambda: missing("worker")),
        Examination("model", _check_model, 300),  # torch and transformers are imported
        Examination("files", _check_files, 90),  # a network mount or a store may hang
    ]


def _check_settings() -> Iterator[Finding]:
    try:
        settings = WorkerSettings.load()
        settings.engine_config()
        load_functions(settings.allowed_functions)
    except (StartupError, ConfigError) as error:
        yield told("settings", with_variables(str(error)))
        return
    yield ok("settings", "every TOKENMILL_ variable is known and has a value that can be used")


def _check_model() -> Iterator[Finding]:
    try:
        config = WorkerSettings.load().engine_config()
    except (StartupError, ConfigError):
        model = read_variable("TOKENMILL_MODEL")
        if not model:
            return  # of which the settings' finding speaks
        config = EngineConfig(model)
    for each in check_up(config):
        yield Finding(Level(each.grade), each.subject, with_variables(each.found), with_variables(each.mend))


def _check_files() -> Iterator[Finding]:
    return check_places(split_roots(read_variable("TOKENMILL_DATA_ROOTS") or os.getcwd()))
