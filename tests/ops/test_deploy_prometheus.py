"""The alert rules, their tests and the configuration, as Prometheus' own tool reads them."""

import shutil
import subprocess

import pytest

from tests.rq_workers import ROOT

pytestmark = pytest.mark.processes

FOLDER = ROOT / "ops" / "deploy" / "prometheus"


@pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is not installed (Debian: prometheus)"
)
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "tokenmill.rules.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "tokenmill.rules.test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_takes_it(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
