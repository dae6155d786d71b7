"""What a worker may import from: never from its working directory, unless the operator names it.

Jobs write their output there by default, and Python takes any folder for a package: one named like a module
that a library looks for, and does without, broke the next start.
"""

from __future__ import annotations

import os
import sys

from worker.store.rq_command import called_by_rq_command, import_path_is_chosen


def leave_out_working_directory() -> None:
    """Take from the import path what RQ's command and `python -m` have put there by themselves.

    What `--path`, PYTHONPATH or an installation names stays. Does nothing under any other program.
    """
    if not called_by_rq_command():
        return
    if "." in sys.path and not import_path_is_chosen():
        del sys.path[len(sys.path) - 1 - sys.path[::-1].index(".")]
    if _is_run_as_module() and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]


def _is_run_as_module() -> bool:
    """Whether `python -m` has started this program, which puts the working directory before all else."""
    return sys.modules["__main__"].__spec__ is not None and not sys.flags.safe_path
