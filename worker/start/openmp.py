"""How the threads of torch's OpenMP wait for their next part of a product."""

from __future__ import annotations

from collections.abc import MutableMapping

_SPIN_COUNT = 10_000
"""Looks at the flag before a thread sleeps, 0.1 ms by libgomp's own estimate."""


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Have idle threads spin for a moment and then sleep; call it before torch is loaded, which reads this.

    libgomp spins 30 times as long by default: where others use the processors too, a waiting thread then
    holds the one that the thread it waits for needs. Without any spinning each product wakes its threads
    anew, which costs a quarter of the speed where the machine is ours.
    What the operator has set (OMP_WAIT_POLICY, GOMP_SPINCOUNT) stays.
    Source: libgomp's manual, GOMP_SPINCOUNT.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))
