"""Reads a run's identity and state from its output folder, without Redis. Needs no pyarrow."""

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
    """The output folder of a planned run.

    parts: how many parts there are.
    state: "finished"; "incomplete" if parts of a finished run are gone; "forgotten" if the folder does not say that the
    run has finished. In the last case, only Redis may know more.
    errors: the number of rows with an error; None if no manifest could be read.
    expired: how many of these rows were not begun before the run's deadline.
    """

    plan: Plan
    folder: str
    parts: int
    state: str
    errors: int | None
    expired: int = 0

    @property
    def num_gone_parts(self) -> int:
        """Return how many parts of a finished run are gone."""
        if self.state != "incomplete":
            return 0
        return len(self.plan.shards) - self.parts


def named_run(connection: Redis, name: str) -> tuple[str, RunOutput | None]:
    """Return a run's id and its output. Raises UnknownRun, PlanDamaged.

    name: the run's id, or the path of its folder. The output is None for an id, and for a folder that this machine
    cannot read.
    """
    if is_run_id(name):
        return name, None
    output = read_output(name)
    if output is not None:
        return output.plan.run, output

    folder = real_path(run_path(name))
    run_bytes: Any = connection.get(run_folder_key(folder))
    run = stored.text(run_bytes or b"")
    if not is_run_id(run):
        raise UnknownRun(name)
    return run, None


def output_here(folder: str, run: str) -> RunOutput | None:
    """Return the output of this run in a folder; None if the folder is on another machine or belongs to another run."""
    with suppress(JobsError):
        # Redis names the folder, and anybody who may write to Redis may name a wrong one.
        output = read_output(folder)
        if output is not None and output.plan.run == run:
            return output
    return None


def read_output(path: str) -> RunOutput | None:
    """Return the output in the folder at `path`; None if this machine finds no plan there. Raises PlanDamaged."""
    folder = run_path(path)
    plan_path = os.path.join(folder, PLAN)
    if is_stored(folder) or not os.path.isfile(plan_path):
        return None
    try:
        plan = Plan.from_text(Path(plan_path).read_text("utf-8"))
        # `folder` is a path on this machine. The path in the plan may be another machine's.
        parts_folder = os.path.join(folder, PARTS) if plan.spec.single_file else folder
        names = os.listdir(parts_folder) if os.path.isdir(parts_folder) else []
    except ValueError as error:
        raise PlanDamaged(plan_path, str(error)) from error
    except OSError:
        return None

    num_parts = len(part_shards(names))
    state = "forgotten"  # nothing in the folder says that the run has finished
    if os.path.isfile(os.path.join(folder, SUCCESS)):
        state = "incomplete" if num_parts < len(plan.shards) else "finished"
    errors = None
    expired = 0
    # There may be no manifest yet, or a damaged one.
    with suppress(OSError, ValueError, KeyError, TypeError):
        manifest = json.loads(Path(folder, MANIFEST).read_text("utf-8"))
        errors = int(manifest["errors"])
        expired = int(manifest.get("expired", 0))
    return RunOutput(plan, folder, num_parts, state, errors, expired)
