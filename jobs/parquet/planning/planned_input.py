"""Whether a run's input is still the one that was planned."""

from jobs.errors import InputChanged
from jobs.parquet.files.storage import Storage
from jobs.parquet.planning.inputs import Inputs
from jobs.runs.plans.plan import Plan, PlannedFile


def check_as_planned(storage: Storage, plan: Plan, inputs: Inputs) -> None:
    """Raise InputChanged for the first file that is not as planned."""
    planned, found = ({file.path: file for file in files} for files in (plan.files, inputs.files))
    for path in [*found, *planned]:
        if path not in planned:
            raise InputChanged(path, "it is new")
        if path not in found:
            raise InputChanged(path, storage.what_is_there(path))
        if planned[path] != found[path]:
            raise InputChanged(path, _difference(planned[path], found[path]))
    if list(planned) != list(found):
        raise InputChanged(plan.spec.input[0], "its files come in another order")


def _difference(planned: PlannedFile, found: PlannedFile) -> str:
    for name in ("size", "rows", "values"):
        if getattr(planned, name) != getattr(found, name):
            return f"{name}: planned {getattr(planned, name)}, found {getattr(found, name)}"
    return f"it has the same {found.size} bytes, but other contents"
