"""All scenarios by name, and a round of every one."""

from collections.abc import Callable

from tests.faults import file_faults, server_faults, worker_faults
from tests.faults.harness import Harness
from tests.faults.mounts import MountRefused
from tests.rq_suite.sdist import CannotFetch

SCENARIOS: dict[str, Callable[[Harness, int], None]] = {
    "kills": worker_faults.kills,
    "two_clients": worker_faults.two_clients,
    "freezes": worker_faults.freezes,
    "shutdowns": worker_faults.shutdowns,
    "engine_errors": worker_faults.engine_errors,
    "clock_jumps": worker_faults.clock_jumps,
    "cut_connections": server_faults.cut_connections,
    "lost_replies": server_faults.lost_replies,
    "server_faults": server_faults.server_faults,
    "full_disks": file_faults.full_disks,
}
_SHARE = {"kills": 1.0, "cut_connections": 0.1}
"""Faults of a scenario for each kill of a round, but at least 3; 0.015 for those that are not named."""


def one_of_each(faults: Harness, kills: int) -> list[str]:
    """A round of every scenario, most of it kills; return what this machine does not permit."""
    refused = []
    for name, scenario in SCENARIOS.items():
        try:
            scenario(faults, max(3, int(kills * _SHARE.get(name, 0.015))))
        except (MountRefused, CannotFetch) as error:
            faults.settle(name, resume=True)
            refused.append(f"{name} left out: {error}")
    return refused
