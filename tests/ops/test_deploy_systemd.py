"""systemd's units: systemd-analyze takes them, and they start what is there and give it time to stop."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.deployed import (
    DASHBOARD_SETTINGS,
    DEPLOY,
    DRAINED_S,
    LEAVING_S,
    SETTINGS,
    assert_is_a_command,
    assert_settings_exist,
    env_file,
    option,
)

pytestmark = pytest.mark.processes

UNITS = DEPLOY / "systemd"
KNOWN = {"worker": SETTINGS, "dashboard": DASHBOARD_SETTINGS, "api": set[str]()}
BIN = "/opt/tokenmill/bin"

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="not installed: systemd-analyze (Debian: systemd)",
)


def analyzed(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """systemd-analyze, with our units in this folder beside the system's."""
    return subprocess.run(
        ["systemd-analyze", *command],
        env={"SYSTEMD_UNIT_PATH": f"{folder}:", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units in a folder, with the programs of this environment."""
    for unit in UNITS.glob("tokenmill*"):
        (tmp_path / unit.name).write_text(
            unit.read_text().replace(BIN, str(Path(sys.executable).parent))
        )
    return tmp_path


def values(unit: Path, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", unit.read_text(), re.MULTILINE)


@needs_systemd
def test_systemd_finds_nothing_to_say_against_the_units(installed: Path) -> None:
    units = sorted(map(str, installed.iterdir()))
    assert len(units) == 5
    done = analyzed(installed, "verify", "--man=no", *units)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize(
    ("unit", "most"),
    [("tokenmill-worker@", 35), ("tokenmill-dashboard", 15), ("tokenmill-api@", 20)],
)
def test_the_units_stay_as_closed_as_they_are(installed: Path, unit: str, most: int) -> None:
    """systemd's own measure, in tenths: 0 is closed, 100 open; without any hardening it is 96."""
    path = str(installed / f"{unit}.service")
    done = analyzed(
        installed, "security", "--offline=true", "--no-pager", f"--threshold={most}", path
    )
    assert done.returncode == 0, done.stdout


def test_a_worker_has_time_to_give_back_what_runs() -> None:
    unit = UNITS / "tokenmill-worker@.service"
    (drain_s,) = re.findall(r"TOKENMILL_DRAIN_S=(\d+)", unit.read_text())
    assert int(values(unit, "TimeoutStopSec")[0]) >= int(drain_s) + LEAVING_S
    assert values(unit, "KillMode") == ["mixed"], "its children hear of it from the worker"


def test_all_share_the_limit_of_one_slice_and_tell_their_numbers_to_this_machine_alone() -> None:
    for unit in UNITS.glob("tokenmill-*.service"):
        assert values(unit, "Slice") == ["tokenmill.slice"]
        assert values(unit, "TasksMax")
    assert values(UNITS / "tokenmill.slice", "MemoryMax") == ["90%"]
    assert env_file(UNITS / "worker.env")["TOKENMILL_METRICS_HOST"] == "127.0.0.1"


def test_an_api_server_has_time_to_drain_and_writes_where_workers_read() -> None:
    unit = UNITS / "tokenmill-api@.service"
    options = env_file(UNITS / "api.env")["OPTIONS"].split()
    assert int(values(unit, "TimeoutStopSec")[0]) >= int(option(options, "--drain")) + DRAINED_S
    roots = env_file(UNITS / "worker.env")["TOKENMILL_DATA_ROOTS"].split(":")
    assert any(option(options, "--folder").startswith(f"{root}/") for root in roots)
    assert values(unit, "User") == values(UNITS / "tokenmill-worker@.service", "User")


@pytest.mark.parametrize("name", ["worker", "dashboard", "api"])
def test_what_is_started_takes_its_arguments_and_its_settings(name: str) -> None:
    (unit,) = UNITS.glob(f"tokenmill-{name}*")
    environment = env_file(UNITS / f"{name}.env")
    (line,) = values(unit, "ExecStart")
    words = re.sub(r"\$(\w+)", lambda found: environment[found[1]], line).replace("%i", "8080")
    assert_is_a_command(shlex.split(words))
    assert_settings_exist(environment, KNOWN[name])
