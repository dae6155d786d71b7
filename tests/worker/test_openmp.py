"""How long idle threads of OpenMP spin: set before torch is loaded, unless the operator has."""

from __future__ import annotations

import pytest

from tests.rq_workers import Workers
from worker.start.openmp import spin_briefly


def test_idle_threads_spin_for_a_moment_unless_the_operator_says_otherwise() -> None:
    for told in ({"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "passive"}):
        environment = dict(told)
        spin_briefly(environment)
        assert environment == told
    environment = {}
    spin_briefly(environment)
    assert 1_000 < int(environment["GOMP_SPINCOUNT"]) < 300_000, "less than libgomp's own"


@pytest.mark.usefixtures("new_interpreters")
def test_a_worker_has_set_it_before_it_serves(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(variable, raising=False)
    job = workers.queue("bulk").enqueue("tests.worker.functions.spin_count")
    workers.burst()
    assert workers.result(job).return_value == "10000"
