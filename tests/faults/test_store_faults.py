"""A seeded sample of what hits runs in an object store."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytest.importorskip("obstore", reason="the extra `cloud` is not installed")
pytest.importorskip("moto", reason="moto, a server of the S3 protocol for tests, is not installed")

from tests.faults.harness import harness
from tests.faults.store_faults import Moments, kills_in_a_store
from tests.jobs.s3_server import FaultyProxy, running_s3

pytestmark = pytest.mark.long


def test_kills_and_a_failing_store_lose_and_double_nothing(tmp_path: Path) -> None:
    with (
        TemporaryDirectory(prefix="f") as folder,  # a socket's path must stay short
        harness(Path(folder), seed=3, evidence=tmp_path) as faults,
        running_s3() as s3,
    ):
        proxy = FaultyProxy(s3.url)
        moments = Moments(random.Random(3))
        found = kills_in_a_store(faults, s3, proxy, moments, kills=1, rows=48, outages=False)
        proxy.close()
        assert found.is_clean, found
        assert found.delivered == found.asked >= 48
        assert moments.seen
