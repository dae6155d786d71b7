"""A real Prometheus on a real worker, where Debian's package of it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.watch_prometheus import check_files, drill, missing_tools

pytestmark = pytest.mark.skipif(
    bool(missing_tools()), reason=f"not installed: {missing_tools()} (Debian: apt-get install prometheus)"
)


def test_promtool_takes_rules_and_configuration() -> None:
    check_files()


def test_an_alert_fires_on_a_stuck_run_and_on_a_dead_worker(tmp_path: Path) -> None:
    assert len(list(drill(tmp_path))) == 4
