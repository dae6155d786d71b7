"""The release that runs: its version, and the commit of its code."""

import json
import subprocess
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_PACKAGE = "tokenmill"
_GIT_LIMIT_S = 10.0


@lru_cache(maxsize=1)
def commit() -> str:
    """Return the commit that was installed, or that is checked out; "" if neither is known."""
    return _installed_commit() or _checked_out_commit(Path(__file__).parents[2])


def release_text(version: str, commit_id: str) -> str:
    """Return a version and its commit as one text for people."""
    return f"{version} ({commit_id[:8]})" if commit_id else version


def _installed_commit() -> str:
    """Return the commit that pip noted when it installed from a repository (PEP 610); "" if it noted none."""
    with suppress(PackageNotFoundError, OSError, ValueError, AttributeError):
        stored_note = distribution(_PACKAGE).read_text("direct_url.json") or "{}"
        note = json.loads(stored_note)
        return str(note.get("vcs_info", {}).get("commit_id", ""))
    return ""


def _checked_out_commit(folder: Path) -> str:
    """Return the commit that is checked out in a folder; "" if the folder is no checkout."""
    if not (folder / ".git").exists():  # a folder above may be another project's checkout
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=True
        )
        return completed.stdout.strip()
    return ""
