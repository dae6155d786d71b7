"""The version and the commit that workers, manifests and tables tell."""

import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from jobs.common import release


@pytest.mark.processes
def test_a_checkout_tells_its_commit(tmp_path: Path) -> None:
    someone = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], [*someone, "commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    expected = subprocess.run(
        ["git", "-C", str(tmp_path), "rev-parse", "HEAD"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    assert release._checked_out_commit(tmp_path) == expected
    (inner := tmp_path / "site-packages").mkdir()
    assert release._checked_out_commit(inner) == "", "the checkout around it is another project's"


def test_an_installed_package_tells_what_pip_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            return '{"url": "u", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}'

    monkeypatch.setattr(release, "distribution", lambda name: Distribution())
    assert release._installed_commit() == "c0ffee"
    monkeypatch.setattr(Distribution, "read_text", lambda self, name: None)
    assert release._installed_commit() == ""


def test_it_is_shown_behind_the_version() -> None:
    assert release.release_text("0.1.0", "c0ffee00112233") == "0.1.0 (c0ffee00)"
    assert release.release_text(version("tokenmill"), "") == version("tokenmill")
