"""Runs the sections of gpu.sh one after the other and gathers what they found in one table and one file.

A section is a command of its own with its own time limit: one that fails or hangs does not stop the next, and
what it wrote before it ended is kept. The exit status is 1 if any failed, 2 if packages are missing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ops.bench.gpu.sections import OUT, Section, sections
from ops.bench.gpu.summary import summarize
from ops.bench.report import print_table

TOTAL_S = 570  # under ten minutes, with what starting and gathering take
LEAST_S = 5  # with less left no section is begun
PACKAGES = (
    "torch", "triton", "numpy", "xxhash", "transformers", "tokenizers", "safetensors", "jinja2", "pyarrow",
    "pytest", "hypothesis", "psutil",
)  # fmt: skip
DRY_RUN_PATIENCE = 4  # times as long: a CPU may be any, and busy


def run_section(section: Section, out: Path, limit_s: float, *, dry_run: bool) -> dict[str, Any]:
    """Run one section; return its status and seconds. Its output goes to a log and to the terminal."""
    log = out / f"{section.file_name}.log"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if dry_run:
        environment |= {"TRITON_INTERPRET": "1", **section.environment}
    print(f"\n== {section.name} (at most {limit_s:.0f} s)", flush=True)
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *(section.dry_run if dry_run else section.command)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the test processes it started
                process.wait()
    seconds = time.monotonic() - started
    print(log.read_text(errors="replace"), flush=True)
    status = process.returncode
    return {"status": "ok" if status == 0 else f"failed ({status})", "seconds": round(seconds, 1)}


def main() -> int:
    """Run the sections; print the table. Returns 1 unless all are ok, 2 if packages are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    names = [section.name for section in sections(OUT, OUT)]
    parser.add_argument("--only", nargs="+", choices=names, help="sections to run")
    parser.add_argument(
        "--budget", type=float, help=f"seconds for all of them; {TOTAL_S}, more in a dry run"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on a CPU, Triton's interpreter"
    )
    options = parser.parse_args()
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        print(
            f"{sys.executable} lacks the packages {', '.join(missing)}: "
            "pip install '.[worker]' '.[dev]' triton, or set PYTHON to one that has them"
        )
        return 2
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for stale in (*out.glob("*.json"), *out.glob("*.log")):
        stale.unlink()
    started, patience = time.monotonic(), DRY_RUN_PATIENCE if options.dry_run else 1
    budget_s = options.budget or patience * TOTAL_S
    ran: dict[str, dict[str, Any]] = {}
    rows: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as models:
        for section in sections(out, Path(models)):
            if options.only and section.name not in options.only:
                continue
            left_s = budget_s - (time.monotonic() - started)
            if left_s < LEAST_S:
                ran[section.name] = {"status": "not run: the time is up", "seconds": 0.0}
            else:
                limit_s = min(patience * section.limit_s, left_s)
                ran[section.name] = run_section(section, out, limit_s, dry_run=options.dry_run)
            rows = list(summarize(out, ran))
            (out / "gpu.json").write_text(json.dumps({"sections": ran, "summary": rows}, indent=1))
    print()
    print_table(["", "found"], rows)
    print(
        f"{time.monotonic() - started:.0f} s in all; logs and what each section wrote are in {options.out}"
    )
    failed = [name for name, found in ran.items() if found["status"] != "ok"]
    print(f"ok: {', '.join(name for name in ran if name not in failed) or 'none'}")
    print(f"failed or not run: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
