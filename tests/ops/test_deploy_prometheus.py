"""The alert rules, their tests and the configuration, as Prometheus' own tool reads them."""

import re
import shutil
import subprocess

import pytest
import yaml

from tests.rq_workers import ROOT

FOLDER = ROOT / "ops" / "deploy" / "prometheus"


def test_each_alert_leads_to_its_runbook_and_each_runbook_is_of_an_alert() -> None:
    rules = yaml.safe_load((FOLDER / "tokenmill.rules.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        address = f"https://docs.example.com/runbooks.html#{rule['alert'].lower()}"
        assert rule["annotations"].get("runbook_url") == address
    text = (ROOT / "docs" / "runbooks.md").read_text()
    runbooks = re.findall(r"^## (Tokenmill\w+)$", text, re.MULTILINE)
    assert sorted(runbooks) == sorted(rule["alert"] for rule in rules)
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert all("\n1. " in section for section in sections if section.startswith("Tokenmill"))


@pytest.mark.processes
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
