"""A run's plan and manifest in its folder, each written once."""

import math
import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from jobs.errors import InputNotFound, OutputHoldsForeignFiles, PlanDamaged
from jobs.parquet.files.storage import Storage, reading, writing
from jobs.runs.plans.names import INPUT, KEYS, PLAN, REUSED, TEMPORARY_PREFIX, output_names, part_name
from jobs.runs.plans.plan import Plan
from jobs.runs.statistics.run_statistics import TOLD, PartStats, Reasons, RunStatistics

MAX_PLAN_BYTES = 256 << 20


def find_plan(storage: Storage, folder: str) -> Plan | None:
    path = os.path.join(folder, PLAN)
    with writing(path):
        if storage.stat(path) is None:
            return None
    return load_plan(storage, path)


def load_plan(storage: Storage, path: str) -> Plan:
    """Read a plan. Raises PlanDamaged when there is none, or it is not one of ours."""
    try:
        with reading(path), storage.open_input(path) as source:
            written = source.read(min(source.size(), MAX_PLAN_BYTES))
        return Plan.from_text(written.decode())
    except InputNotFound:
        raise PlanDamaged(path, "there is no such file") from None
    except ValueError as error:
        raise PlanDamaged(path, str(error)) from error


def create_plan(storage: Storage, plan: Plan, execution_id: str) -> bool:
    """Write a plan; return False when another planner was first. Raises as begin_folder and Storage.put do."""
    path, text = os.path.join(plan.spec.output, PLAN), plan.to_text().encode()
    return begin_folder(storage, plan.spec.output) and storage.put(path, execution_id, lambda sink: sink.write(text))


def begin_folder(storage: Storage, folder: str) -> bool:
    with writing(folder):
        storage.make_folder(folder)
        names = storage.names(folder)
    if PLAN in names:  # and perhaps parts already, of shards that the other planner enqueued
        return False
    for name in names:
        if not name.startswith((TEMPORARY_PREFIX, INPUT, KEYS, REUSED)):
            raise OutputHoldsForeignFiles(folder, name)
    return True


#: What a manifest says of the workers that answered; where they differed, all of it.
_SERVED = ("model", "fingerprint", "dtype", "attention_backend", "version")


def manifest_of(plan: Plan, parts: Iterable[PartStats], reasons: Reasons) -> dict[str, Any]:
    """Sum up a finished run. parts: in order. `seconds` runs from the first shard's start to the last's end."""
    counts = dict.fromkeys(TOLD, 0)
    started_at, ended_at = math.inf, -math.inf
    served: dict[str, set[str]] = {name: set() for name in _SERVED}
    if plan.second is not None:  # of whose workers parts are that the first one has begun
        first = plan.model
        served |= {"model": {first.name}, "fingerprint": {first.fingerprint}, "dtype": {first.dtype}}
    listed, statistics = list[dict[str, Any]](), RunStatistics()
    for each in parts:
        statistics.add(each)
        for name in TOLD:
            counts[name] += getattr(each, name)
        started_at, ended_at = min(started_at, each.started_at), max(ended_at, each.ended_at)
        for name in _SERVED:
            served[name].add(getattr(each, name))
        listed.append({"name": part_name(each.shard), "rows": each.rows, "errors": each.errors})
    return {
        "run": plan.run,
        **counts,
        "started_at": started_at,
        "ended_at": ended_at,
        "seconds": ended_at - started_at,
        **{name: ", ".join(sorted(values)) for name, values in served.items()},
        "statistics": statistics.to_object(reasons),
        "sampling": plan.spec.sampling,
        "seed": plan.seed,
        "arguments": plan.spec.to_json(),
        **({"output": output_names(plan.spec.single_file)} if plan.spec.single_file else {}),
        **({"reused": plan.reused.runs} if plan.reused else {}),
        "inputs": [asdict(file) for file in plan.files],
        "parts": listed,
    }
