"""Which run a folder is the output of, and what it tells without Redis. Needs no pyarrow."""

import json
import os
from dataclasses import dataclass
from typing import Any

from redis import Redis

from jobs.common import stored
from jobs.common.keys import run_folder_key
from jobs.errors import JobsError, PlanDamaged, UnknownRun
from jobs.runs.plans.names import MANIFEST, PARTS, PLAN, SUCCESS, is_run_id, part_shard
from jobs.runs.plans.paths import is_stored, real_path, run_path
from jobs.runs.plans.plan import Plan


@dataclass(frozen=True)
class RunOutput:
    """A planned run's folder. errors: rows with an error, None until the run has finished."""

    plan: Plan
    folder: str
    parts: int
    finished: bool
    errors: int | None

    @property
    def state(self) -> str:
        """One word for an operator, where Redis does not know the run."""
        return ("incomplete" if self.num_gone else "finished") if self.finished else "forgotten"

    @property
    def num_gone(self) -> int:
        """Parts that are gone of a run that had all of them."""
        return max(0, len(self.plan.shards) - self.parts) if self.finished else 0


def named_run(connection: Redis, name: str) -> tuple[str, RunOutput | None]:
    """Return the run that an id, or the path of a run's output folder, names; for a folder what it holds.

    A folder that is not planned yet, or not on this machine, is known to Redis alone. Raises UnknownRun when
    neither knows of a run there, PlanDamaged when its plan is unreadable.
    """
    if is_run_id(name):
        return name, None
    try:
        output = _read_output(name)
    except UnknownRun:
        key = run_folder_key(real_path(run_path(name)))
        found: Any = connection.get(key)
        run = stored.text(found or b"")
        if not is_run_id(run):
            raise
        return run, None
    return output.plan.run, output


def output_here(folder: str, run: str) -> RunOutput | None:
    """Return a run's output as this machine sees it; None if the folder is elsewhere or another run's."""
    try:
        path = run_path(folder)
        if is_stored(path) or not os.path.isfile(os.path.join(path, PLAN)):  # Redis' writers name it
            return None
        output = _read_output(folder)
    except JobsError:
        return None
    return output if output.plan.run == run else None


def _read_output(name: str) -> RunOutput:
    folder = run_path(name)
    if is_stored(folder):  # workers alone have a store's keys
        raise UnknownRun(name)
    path = os.path.join(folder, PLAN)
    try:
        with open(path, encoding="utf-8") as file:
            plan = Plan.from_text(file.read())
        parts = PARTS if plan.spec.single_file else ""  # the folder may lie elsewhere on this machine
        names = os.listdir(os.path.join(folder, parts)) if os.path.isdir(os.path.join(folder, parts)) else []
    except ValueError as error:
        raise PlanDamaged(path, str(error)) from error
    except OSError:
        raise UnknownRun(name) from None
    finished = os.path.isfile(os.path.join(folder, SUCCESS))
    found = sum(part_shard(name) is not None for name in names)
    return RunOutput(plan, folder, found, finished, _errors(os.path.join(folder, MANIFEST)) if finished else None)


def _errors(manifest: str) -> int | None:
    try:
        with open(manifest, encoding="utf-8") as file:
            return int(json.load(file)["errors"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
