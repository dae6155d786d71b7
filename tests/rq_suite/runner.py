"""Runs RQ's own tests in processes of their own, and says what came out."""

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.redis_server import running_redis_server
from tests.rq_suite.table import DEPARTURES, NOT_APPLICABLE, reason

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILE_TIMEOUT_S = 600


@dataclass
class Summary:
    """What RQ's tests said of BatchWorker."""

    passed: list[str] = field(default_factory=list)
    second_try: list[str] = field(default_factory=list)
    """Those of `passed` that passed when they were run again alone: they wait for fixed times."""
    departures: dict[str, str] = field(default_factory=dict)
    not_applicable: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)
    """Tests that fail, or are departures and pass: what pytest says."""

    @property
    def applicable(self) -> int:
        """Tests in which one of our workers takes part, and that do not presuppose RQ's own."""
        return len(self.passed) + len(self.departures) + len(self.wrong)

    def text(self) -> str:
        """Everything, for a terminal."""
        lines = [
            f"{count:5d} not applicable: {why}" for why, count in self.not_applicable.most_common()
        ]
        lines += [f"{self.applicable:5d} applicable", f"{len(self.passed):5d} passed"]
        lines += [f"      at its second try: {name}" for name in self.second_try]
        lines.append(f"{len(self.departures):5d} departures")
        lines += [f"      {name}: {why}" for name, why in self.departures.items()]
        lines.append(f"{len(self.wrong):5d} differences that are not in the table")
        lines += [f"\n{name}\n{text}" for name, text in self.wrong.items()]
        return "\n".join(lines)


def worker_files(suite: Path) -> list[str]:
    """Names of RQ's test files that speak of workers."""
    files = sorted((suite / "tests").glob("test_*.py"))
    return [file.name for file in files if re.search("worker", file.read_text(), re.IGNORECASE)]


def run(suite: Path, files: Sequence[str], slow: bool, *, together: bool = False) -> Summary:
    """Run test files of the suite. slow: also what RQ itself runs on request only. together: in one process,
    which spares the start of the others."""
    summary = Summary()
    with running_redis_server() as url, TemporaryDirectory() as folder:
        environment = _environment(suite, url, Path(folder), slow)
        for some in [files] if together else [[file] for file in files]:
            wanted: list[str] = []
            for file in some:
                of_file, skipped = _sort_out(suite / "tests" / file)
                wanted += of_file
                summary.not_applicable.update(skipped)
            functions = dict.fromkeys(name for file in some for name in _functions(suite, file))
            environment["TOKENMILL_ALLOWED_FUNCTIONS"] = ",".join(functions)
            for test, result in _run_tests(suite, wanted, environment).items():
                _enter(summary, test, result, suite, environment)
    return summary


def _enter(
    summary: Summary, test: str, result: dict[str, str], suite: Path, env: dict[str, str]
) -> None:
    departs = reason(DEPARTURES, test)
    if result["outcome"] == "failed" and departs is None:
        again = _run_tests(suite, [test], env)[test]
        if again["outcome"] == "passed":
            summary.second_try.append(test)
            result = again
    if result["outcome"] == "skipped" or not result["workers"]:
        summary.not_applicable["no worker takes part, or RQ itself skips it"] += 1
    elif departs is not None and result["outcome"] == "failed":
        summary.departures[test] = departs
    elif departs is not None:
        summary.wrong[test] = (
            "in the table of departures, but it passes: take it from there, and from docs/operator.md"
        )
    elif result["outcome"] == "passed":
        summary.passed.append(test)
    else:
        summary.wrong[test] = result["text"]


def _sort_out(file: Path) -> tuple[list[str], Counter[str]]:
    """The tests of a file that apply, and how many do not for each reason."""
    wanted, skipped = [], Counter[str]()
    for cls in ast.parse(file.read_text()).body:
        if not isinstance(cls, ast.ClassDef):
            continue
        methods = [node.name for node in cls.body if isinstance(node, ast.FunctionDef)]
        for name in sorted(methods):  # unittest's own order: some of RQ's tests rely on it
            test = f"{file.name}::{cls.name}::{name}"
            if not name.startswith("test"):
                continue
            if (why := reason(NOT_APPLICABLE, test)) is None:
                wanted.append(test)
            else:
                skipped[why] += 1
    return wanted, skipped


def _run_tests(suite: Path, tests: Sequence[str], env: dict[str, str]) -> dict[str, dict[str, str]]:
    """Run tests in one process of pytest; a process that died fails all it had not reported."""
    if not tests:
        return {}
    report = Path(env["RQ_SUITE_REPORT"])
    report.unlink(missing_ok=True)
    # RQ's own configuration; ours treats warnings as errors.
    how = [
        "-p",
        "shim",
        "-c",
        "pyproject.toml",
        "--rootdir",
        ".",
        "-q",
        "--tb=short",
        "-W",
        "ignore",
    ]
    off = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *how, *off, *(f"tests/{test}" for test in tests)]
    said = subprocess.run(
        command,
        env=env,
        cwd=suite,
        capture_output=True,
        text=True,
        timeout=FILE_TIMEOUT_S,
        check=False,
    )
    reports = json.loads(report.read_text()) if report.exists() else {}
    died = {
        "outcome": "failed",
        "workers": 1,
        "text": f"not run:\n{said.stdout[-2000:]}{said.stderr[-2000:]}",
    }
    return {test: reports.get(test, died) for test in tests}


def _environment(suite: Path, url: str, folder: Path, slow: bool) -> dict[str, str]:
    """What shim.py and the workers read. RQ's tests start `rqworker` by name: it gets the shim too."""
    (folder / "sitecustomize.py").write_text("import redirect\n")
    program = folder / "rqworker"
    program.write_text(f"#!{sys.executable}\nimport shim\nimport rq.cli\n\nrq.cli.worker()\n")
    program.chmod(0o700)
    ours = ("TOKENMILL_", "RQ_", "RUN_SLOW", "PYTEST_")
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(ours)},
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (folder, suite, HERE, ROOT))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "RQ_SUITE_SOCKET": url.removeprefix("unix://"),
        "RQ_SUITE_ENGINE": str(ROOT / "tests" / "worker" / "fake_engine.py"),
        "RQ_SUITE_REPORT": str(folder / "report.json"),
        "RQ_SUITE_MADE": str(folder / "made"),
        "TOKENMILL_MODEL": "fake",
        "TOKENMILL_LOG_FORMAT": "text",
        "TOKENMILL_ALLOWED_WEBHOOK_HOSTS": "example.com",
        **({"RUN_SLOW_TESTS_TOO": "1"} if slow else {}),
    }


def _functions(suite: Path, file: str) -> list[str]:
    """Dotted names of what a test file enqueues: RQ's functions for tests, and those of the file itself."""
    found = []
    for module in ("fixtures", Path(file).stem):
        tree = ast.parse((suite / "tests" / f"{module}.py").read_text())
        functions = [
            node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        found += [f"tests.{module}.{function.name}" for function in functions]
    return found
