"""The one command for a GPU machine: each of its sections runs dry, and what it finds is in the table."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.bench.gpu import __main__ as gpu
from ops.bench.gpu.sections import Section, sections
from ops.bench.gpu.summary import summarize
from tests.engine.interpreter import patch_language_once_a_launch

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
#: What the table has of a section, as parts of its rows' names.
SUMMARIZED = {
    "run": ("graphs, overlap, temperature 0.6", "greedy", "top_p 0.95"),
    "profile": ("a step of prefill", "a step of decode"),
    "scoring": ("256, one with a grammar, graphs for prompts", "256 sequences, without"),
    "fp8": ("FP8 KV cache ÷ the model's dtype",),
    "products": ("LM head, 2 rows",),
    "sampler": ("top_p 0.95",),
    "graphs and overlap": ("graphs ÷ eager, overlap", "overlap ÷ none, graphs"),
}


def dry_run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The shell script, as on a GPU machine but for its arguments."""
    return subprocess.run(
        ["bash", str(ROOT / "ops/bench/gpu.sh"), "--dry-run", "--out", str(folder), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=290,
    )


def statuses(folder: Path) -> dict[str, str]:
    """Of each section, by gpu.json."""
    found = json.loads((folder / "gpu.json").read_text())["sections"]
    return {name: each["status"] for name, each in found.items()}


def test_the_dry_run_writes_a_table_and_files(tmp_path: Path) -> None:
    """Through the shell script, two sections of it; the others run in this process below."""
    done = dry_run(tmp_path, "--only", "kernels", "tests")
    assert done.returncode == 0, done.stdout
    assert statuses(tmp_path) == {"kernels": "ok", "tests": "ok"}
    assert len(json.loads((tmp_path / "kernels.json").read_text())["kernels"]) > 4
    summary = dict(json.loads((tmp_path / "gpu.json").read_text())["summary"])
    assert summary["GPU tests"] == "1 passed"
    assert "GB/s" in summary["copies"]
    assert "| section kernels" in done.stdout
    assert "\nok: tests, kernels\nfailed or not run: none\n" in done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "compile",
        "run",
        "scoring",
        "fp8",
        "profile",
        "products",
        "sampler",
        "graphs and overlap",
        "accuracy",
        "host time",
    ],
)
def test_each_other_section_runs_dry(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the very arguments of the dry run; all that it finds is in the table."""
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")
    patch_language_once_a_launch(monkeypatch)
    section = next(each for each in sections(tmp_path, tmp_path) if each.name == name)
    module, *arguments = section.dry_run
    if module == "ops.bench.kernels":
        module += ".__main__"
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    assert not importlib.import_module(module).main()
    assert "\n| " in capsys.readouterr().out
    rows = dict(summarize(tmp_path, {}))
    for wanted in SUMMARIZED.get(name, ()):
        assert any(wanted in row for row in rows), (wanted, rows)


def test_kernels_are_compiled_first_and_apart(tmp_path: Path) -> None:
    """The run's time is its own; what is cut off at the end is what is wanted least."""
    compiled, tests, run, *_ = sections(tmp_path, tmp_path)
    assert (compiled.name, tests.name, run.name) == ("compile", "tests", "run")
    assert compiled.limit_s + tests.limit_s + run.limit_s < gpu.TOTAL_S < 600


def test_a_section_that_fails_or_hangs_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the hanging one wrote before its time was up is kept."""
    kernel = {"name": "a kernel", "seconds": 2.0, "floor_s": 1.0, "bandwidth": 1.0}
    rates = {"bandwidth": 1e9, "flops": 1e12}
    text = json.dumps({"ceilings": rates, "kernels": [kernel]})
    write = f"open({str(tmp_path / 'kernels.json')!r}, 'w').write({text!r})"
    hang = f"exec({write + '; import signal; signal.pause()'!r})"
    (tmp_path / "hang.py").write_text(hang)
    (tmp_path / "crash.py").write_text("import os; os.abort()")
    (tmp_path / "well.py").write_text("print('well')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = [
        Section("fails", 60, ("no_such_module",), ()),
        Section("hangs", 1, ("hang",), ()),
        Section("crashes", 60, ("crash",), ()),
        Section("well", 60, ("well",), ()),
    ]
    monkeypatch.setattr(gpu, "sections", lambda out, models: made)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    assert gpu.main() == 1
    assert list(statuses(tmp_path).values()) == ["failed (1)", "failed (-9)", "failed (-6)", "ok"]
    summary = dict(json.loads((tmp_path / "gpu.json").read_text())["summary"])
    assert summary["a kernel"].endswith("50% of its floor's speed")
    printed = capsys.readouterr().out
    assert "No module named no_such_module" in printed
    assert "\nok: well\nfailed or not run: fails, hangs, crashes\n" in printed
