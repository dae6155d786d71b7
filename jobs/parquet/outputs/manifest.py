"""The manifest of a finished run: what its parts hold together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from jobs.runs.plans.names import output_names, part_name
from jobs.runs.plans.plan import Plan
from jobs.runs.statistics.part_stats import COUNTED, PartStats
from jobs.runs.statistics.reasons import Reasons
from jobs.runs.statistics.run_statistics import RunStatistics

#: What a manifest says of the workers that answered; where they differed, all of it.
_SERVED = ("model", "fingerprint", "dtype", "attention_backend", "version")


def manifest_of(plan: Plan, parts: Iterable[PartStats], reasons: Reasons) -> tuple[dict[str, Any], str]:
    """Sum up a finished run; return the manifest without its list of parts, and all of its text, JSON.

    Times are Unix seconds; `seconds` runs from the first shard's start to the last's end, a pause between
    them included, which `statistics.working_seconds` has not. parts: taken one by one, so that a run of ten
    thousand parts needs no more memory than their names. reasons: why rows have an error, as far as that is
    kept.
    """
    counts = dict.fromkeys(COUNTED, 0)
    started_at, ended_at = math.inf, -math.inf
    served: dict[str, set[str]] = {name: set() for name in _SERVED}
    lines, statistics = [], RunStatistics()
    for each in parts:
        statistics.add(each)
        for name in COUNTED:
            counts[name] += getattr(each, name)
        started_at, ended_at = min(started_at, each.started_at), max(ended_at, each.ended_at)
        for name in _SERVED:
            served[name].add(getattr(each, name))
        part = {"name": part_name(each.shard), "rows": each.rows, "errors": each.errors}
        lines.append(f"    {json.dumps(part)}")
    content = {
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
        "inputs": [file.to_json() for file in plan.files],
        **({"extensions": [asdict(each) for each in plan.extensions]} if plan.extensions else {}),
    }
    summary = json.dumps(content, indent=2)
    head = summary.removesuffix("\n}")
    text = "\n".join([f'{head},\n  "parts": [', ",\n".join(lines), "  ]\n}\n"])
    return json.loads(summary), text
