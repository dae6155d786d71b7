"""The checks of a worker's machine, in their order."""

import os
from collections.abc import Iterable, Iterator

from engine import ConfigError, EngineConfig, check_up
from jobs.doctor.findings import Examination, Finding, Level, fault, missing, ok, told
from jobs.doctor.places import check_places
from jobs.runs.plans.paths import split_roots
from worker.errors import StartupError
from worker.settings import WorkerSettings, read_variable, with_variables
from worker.start import load_functions

#: Seconds: torch and transformers are imported; a network mount or a store may hang.
MODEL_S, FILES_S, SETTINGS_S = 300.0, 90.0, 60.0


def checks() -> list[Examination]:
    """Return the checks of a worker's machine."""
    return [
        Examination("settings", _check_settings, SETTINGS_S),
        Examination("installation", lambda: missing("worker"), SETTINGS_S),
        Examination("model", _check_model, MODEL_S),
        Examination("files", _check_files, FILES_S),
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
        yield Finding(each.subject, Level(each.grade), with_variables(each.found), with_variables(each.mend))


def _check_files() -> Iterable[Finding]:
    given = read_variable("TOKENMILL_DATA_ROOTS")
    roots = [os.getcwd()] if given is None else split_roots(given)
    if not roots:
        return [fault("files", "TOKENMILL_DATA_ROOTS names no folder", "name one, or unset it")]
    return check_places(roots)
