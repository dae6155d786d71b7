"""What a run's output folder tells without Redis. Needs no pyarrow: the command line uses it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from .errors import PlanDamaged, UnknownRun
from .parquet.names import MANIFEST, PLAN, SUCCESS, is_run_id, part_shard
from .parquet.paths import local_path
from .parquet.plan import Plan


@dataclass(frozen=True)
class RunOutput:
    """A planned run's folder. errors: rows with an error, None until the run has finished."""

    run: str
    folder: str
    rows: int
    shards: int
    parts: int
    finished: bool
    errors: int | None


def named_run(name: str) -> tuple[str, RunOutput | None]:
    """Return the run that an id, or the path of a run's output folder, names; for a folder what it holds.

    Raises UnknownRun when there is no run at the path, PlanDamaged when its plan is unreadable.
    """
    if is_run_id(name):
        return name, None
    output = _read_output(name)
    return output.run, output


def _read_output(name: str) -> RunOutput:
    folder = local_path(name)
    path = os.path.join(folder, PLAN)
    try:
        with open(path, encoding="utf-8") as file:
            plan = Plan.from_text(file.read())
        names = os.listdir(folder)
    except ValueError as error:
        raise PlanDamaged(path, str(error)) from error
    except OSError:
        raise UnknownRun(name) from None
    finished = SUCCESS in names
    return RunOutput(
        run=plan.run,
        folder=folder,
        rows=plan.rows,
        shards=len(plan.shards),
        parts=sum(part_shard(name) is not None for name in names),
        finished=finished,
        errors=_errors(os.path.join(folder, MANIFEST)) if finished else None,
    )


def _errors(manifest: str) -> int | None:
    try:
        with open(manifest, encoding="utf-8") as file:
            return int(json.load(file)["errors"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
