"""Which run a folder is the output of, and what it tells without Redis. Needs no pyarrow."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis

from jobs.common import stored
from jobs.common.keys import run_folder_key
from jobs.errors import JobsError, PlanDamaged, UnknownRun
from jobs.runs.plans.names import MANIFEST, PARTS, PLAN, SUCCESS, is_run_id, part_shards
from jobs.runs.plans.paths import is_stored, real_path, run_path
from jobs.runs.plans.plan import Plan


@dataclass(frozen=True)
class RunOutput:
    """A planned run's folder. state: "finished", "incomplete" where parts are gone since, or "forgotten" by Redis.
    errors: rows with one, None until the end."""

    plan: Plan
    folder: str
    parts: int
    state: str
    errors: int | None

    @property
    def num_gone(self) -> int:
        return len(self.plan.shards) - self.parts if self.state == "incomplete" else 0


def named_run(connection: Redis, name: str) -> tuple[str, RunOutput | None]:
    """Return the run that an id or a folder names, and what the folder holds. Raises UnknownRun, PlanDamaged."""
    if is_run_id(name):
        return name, None
    if (output := _read_output(name)) is not None:
        return output.plan.run, output
    found: Any = connection.get(run_folder_key(real_path(run_path(name))))
    run = stored.text(found or b"")
    if not is_run_id(run):
        raise UnknownRun(name)
    return run, None


def output_here(folder: str, run: str) -> RunOutput | None:
    """Return a run's output as this machine sees it; None if the folder is elsewhere or another run's."""
    with suppress(JobsError):  # Redis' writers name it
        output = _read_output(folder)
        return output if output is not None and output.plan.run == run else None
    return None


def _read_output(name: str) -> RunOutput | None:
    folder = run_path(name)
    path = os.path.join(folder, PLAN)
    if is_stored(folder) or not os.path.isfile(path):
        return None
    try:
        plan = Plan.from_text(Path(path).read_text("utf-8"))
        parts = os.path.join(folder, PARTS if plan.spec.single_file else "")  # it may lie elsewhere on this machine
        names = os.listdir(parts) if os.path.isdir(parts) else []
    except ValueError as error:
        raise PlanDamaged(path, str(error)) from error
    except OSError:
        return None
    num_parts, state = len(part_shards(names)), "forgotten"
    if os.path.isfile(os.path.join(folder, SUCCESS)):
        state = "incomplete" if num_parts < len(plan.shards) else "finished"
    errors = None
    with suppress(OSError, ValueError, KeyError, TypeError):  # it may be none, or not there yet
        errors = int(json.loads(Path(folder, MANIFEST).read_text("utf-8"))["errors"])
    return RunOutput(plan, folder, num_parts, state, errors)
