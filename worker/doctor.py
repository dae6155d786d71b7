"""The checks that `tokenmill doctor` makes on a worker's machine."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence

from engine import ConfigError, EngineConfig, check_up
from jobs.doctor.findings import (
    Examination,
    Finding,
    Level,
    fault,
    fault_from_text,
    missing_packages,
    ok,
    warning,
)
from jobs.errors import DiskFull, JobsError, OutputNotWritable
from jobs.runs.plans.paths import is_stored, real_path, run_path
from worker.errors import StartupError
from worker.settings import WorkerSettings, read_variable, split_roots, with_variables
from worker.start import load_functions


def checks() -> list[Examination]:
    """Return the checks of a worker's machine, in their order."""
    return [
        Examination("settings", _check_settings, limit_s=60),
        Examination("installation", lambda: missing_packages("worker")),
        Examination("model", _check_model, limit_s=300),  # torch and transformers are imported
        Examination("files", _check_files, limit_s=90),  # a network mount or a store may hang
    ]


def _check_settings() -> Iterator[Finding]:
    """Yield the finding about the worker's settings: what is wrong with them, or that they can be used."""
    try:
        settings = WorkerSettings.load()
        settings.engine_config()  # raises for values that the engine refuses
        load_functions(settings.allowed_functions)
    except (StartupError, ConfigError) as error:
        yield fault_from_text("settings", with_variables(str(error)))
        return
    yield ok("settings", "every TOKENMILL_ variable is known and has a value that can be used")


def _check_model() -> Iterator[Finding]:
    """Yield what the engine finds about the model, memory and devices."""
    try:
        config = WorkerSettings.load().engine_config()
    except (StartupError, ConfigError):
        model = read_variable("TOKENMILL_MODEL")
        if not model:
            return  # the finding about the settings says that the model is not set
        # Some other setting cannot be used, but the model can be checked all the same.
        config = EngineConfig(model)
    for result in check_up(config):
        yield Finding(
            Level(result.grade),
            result.subject,
            with_variables(result.text),
            with_variables(result.mend),
        )


def _check_files() -> Iterator[Finding]:
    """Yield a finding about each data root."""
    roots_text = read_variable("TOKENMILL_DATA_ROOTS") or os.getcwd()
    return check_roots(split_roots(roots_text))


#: A run needs at least this many free bytes on a disk.
MIN_BYTES = 64 << 20

#: Seconds that the check of an object store may take. Each of its requests may take a quarter of that time.
STORE_TIMEOUT_S = 20.0


def check_roots(roots: Sequence[str]) -> Iterator[Finding]:
    """Yield for each root whether a run could write there.

    A root that only holds inputs need not be writable. So if one root is fine, a problem in another root is a warning.
    """
    findings = []
    for root in roots:
        address = run_path(os.path.expanduser(root))
        findings.append(_try_to_write(real_path(address)))
    # `mend` says how to mend a problem. It is empty in a finding without a problem.
    has_good_root = any(not finding.mend for finding in findings)
    for finding in findings:
        if finding.mend and has_good_root:
            yield warning(finding.subject, finding.text, finding.mend)
        else:
            yield finding


def _try_to_write(root: str) -> Finding:
    """Try to write below a root, and return a finding that says whether that is possible."""
    # This import needs pyarrow. If pyarrow is missing, the examination of the installation says so.
    from jobs.parquet.files.storage import Storage, writing

    if not is_stored(root) and not os.path.isdir(root):
        return fault(
            "files",
            f"{root} is no folder",
            f"create it, or correct TOKENMILL_DATA_ROOTS: mkdir -p {root}",
        )
    try:
        with writing(root):
            # For an object store, this call is the whole test.
            Storage((root,), timeout_s=STORE_TIMEOUT_S).make_folder(root)
            if not is_stored(root):
                with tempfile.TemporaryFile(dir=root) as file:
                    file.write(b"probe")
    except (DiskFull, OutputNotWritable) as error:
        reason = error.argument("reason")
        mend = (
            "give this user the right to write there (chown, chmod, no `ro` mount), or free space"
        )
        return fault("files", f"{root} cannot be written to ({reason})", mend)
    except JobsError as error:
        return fault_from_text("files", str(error))
    if not is_stored(root) and shutil.disk_usage(root).free < MIN_BYTES:
        mend = "remove what is not needed there, or let runs write elsewhere (TOKENMILL_DATA_ROOTS)"
        return fault("files", f"{root}: its disk is full, no part of a run fits", mend)
    return ok("files", f"{root} can be written to")
