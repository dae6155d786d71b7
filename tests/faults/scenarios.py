"""All scenarios by name, and a round of every one."""

from __future__ import annotations

from collections.abc import Callable

from tests.faults import (
    code_faults,
    engine_faults,
    file_faults,
    fleet_faults,
    format_faults,
    growth_faults,
    server_faults,
    worker_faults,
)
from tests.faults.harness import Harness
from tests.faults.mounts import MountRefused
from tests.rq_suite.sdist import CannotFetch

SCENARIOS: dict[str, Callable[[Harness, int], None]] = {
    "kills": worker_faults.kills,
    "freezes": worker_faults.freezes,
    "stragglers": worker_faults.stragglers,
    "shutdowns": worker_faults.shutdowns,
    "engine_errors": worker_faults.engine_errors,
    "clock_jumps": worker_faults.clock_jumps,
    "thaws": fleet_faults.thaws,
    "two_models": fleet_faults.two_models,
    "two_clients": fleet_faults.two_clients,
    "saving_code": code_faults.saving_code,
    "frozen_functions": code_faults.frozen_functions,
    "cut_connections": server_faults.cut_connections,
    "lost_replies": server_faults.lost_replies,
    "server_faults": server_faults.server_faults,
    "raised_disk_full": file_faults.raised_disk_full,
    "full_disks": file_faults.full_disks,
    "read_only_disks": file_faults.read_only_disks,
    "changed_inputs": file_faults.changed_inputs,
    "other_formats": format_faults.other_formats,
    "growing_inputs": growth_faults.growing_inputs,
    "kv_exhaustion": engine_faults.kv_exhaustion,
    "rank_kills": engine_faults.rank_kills,
}

_SHARE = {"kills": 1.0, "cut_connections": 0.1}
"""Faults of a scenario for each kill of a round, but at least 3; 0.015 for those that are not named."""

_SLOW = ("kv_exhaustion", "rank_kills")
"""Each worker of these loads a model."""


def one_of_each(faults: Harness, kills: int, slow: bool) -> list[str]:
    """A round of every scenario, most of it kills; return what this machine does not permit.

    slow: with those whose workers take seconds to start.
    """
    refused = []
    for name, scenario in SCENARIOS.items():
        if name in _SLOW and not slow:
            continue
        try:
            scenario(faults, max(3, int(kills * _SHARE.get(name, 0.015))))
        except (MountRefused, CannotFetch) as error:
            faults.settle(name, resume=True)
            refused.append(f"{name} left out: {error}")
    return refused
