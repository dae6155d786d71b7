"""Two versions at work on the same queues and runs: `python -m ops.upgrade [--from COMMIT]`.

Exports an older commit of this repository (git archive) and starts its workers and those of the working
tree, with the demo model, against one Redis. Both run in this environment, an older one with RQ 2.12. While
prompts come in and two Parquet runs go on, one submitted by each version, workers are replaced one at a time:
by SIGTERM, as systemd and Kubernetes stop them, and by SIGKILL. First the new version takes the old one's
place, then, with new runs, the old one the new one's (a rollback). In the end every prompt must have one
answer, every row stand once in its run, and both versions have worked. Exit status 1 where something is
amiss; the logs are kept then.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ops.upgrade.fleet import ROOT, Fleet, Version
from ops.upgrade.passage import Passage
from tests.redis_server import running_redis_server

#: The oldest commit with which the working tree shares queues and runs.
OLDEST = "e40f4af"


def export(commit: str) -> Path:
    """Write a commit's files into the user's cache, where compiled kernels find them again; return where.

    Raises CalledProcessError for an unknown one.
    """
    tree = Path.home() / ".cache" / "tokenmill" / "upgrade" / commit
    tree.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "x", "-C", tree], input=archive.stdout, check=True)
    return tree


def main() -> int:
    """Pass from the old version to the new one, and back; say what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="commit", default=OLDEST, help=f"default: {OLDEST}")
    parser.add_argument("--rows", type=int, default=3000, help="of each run; default: %(default)s")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="u"))
    try:
        old, new = Version("old", export(options.commit)), Version("new", ROOT)
        problems = []
        for before, after in ((old, new), (new, old)):
            with running_redis_server() as url, Fleet(url, folder) as fleet:
                passage = Passage(fleet, before, after, new, options.rows)
                found = passage.go()
            print(passage.told(), *found or ["nothing is amiss"], sep="\n  ", flush=True)
            problems += found
    except BaseException:
        print(f"logs are in {folder}", flush=True)
        raise
    if problems:
        print(f"logs are in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
