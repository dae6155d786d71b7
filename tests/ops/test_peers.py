"""The comparison with peers: turns that rotate, ratios within rounds, failures that are counted."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from pathlib import Path

import pytest

from ops.bench.make import SHAPES, make_checkpoint, make_workloads
from ops.bench.peers import BUILT_IN, OURS, run_peer, run_rounds, summarize
from ops.bench.workload import Workload

PYTHON = shlex.quote(sys.executable)


def fake(tok_s: str, after: str = "") -> str:
    """A peer that prints what it is told."""
    result = f'RESULT {{"tok_s": {tok_s}}}'
    return f"{PYTHON} -c {shlex.quote(f'print({result!r}); {after}')}"


def test_ratios_are_taken_within_rounds_and_failures_are_counted(tmp_path: Path) -> None:
    """Ours is twice and three times as fast as one peer; another one fails each time."""
    path = tmp_path / "W.json"
    Workload("W", "tiny", [[1, 2]], [1]).write(path)
    script = tmp_path / "growing.py"
    script.write_text(
        "from pathlib import Path\n"
        "seen = Path(__file__).with_suffix('.txt')\n"
        "seen.open('a').write('x')\n"
        "print('RESULT {\"tok_s\": %d}' % (100 + 100 * seen.stat().st_size))\n"
    )
    growing = f"{PYTHON} {shlex.quote(str(script))}"
    peers = {OURS: growing, "half": fake("100"), "broken": fake("5", "raise SystemExit(3)")}
    records = run_rounds(peers, path, tmp_path, rounds=2, threads=1, timeout_s=60)
    assert [record["name"] for record in records] == [OURS, "half", "broken", "half", "broken", OURS]
    rows = {row[0]: row for row in summarize(records)}
    assert rows["half"][1:3] == ["100 (100..100)", "2.50 (2.00..3.00)"]
    assert rows["broken"][1:] == ["-", "-", "-", "-", "2"]
    assert "status 3" in records[2]["error"]


def test_a_peer_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    """The shell waits for a process of its own, which must not outlive it."""
    found = run_peer(f"{PYTHON} -c 'import time; time.sleep(60)'; true", tmp_path / "log", timeout_s=0.1)
    assert "status -9" in found["error"]


def test_both_runners_answer_a_workload_with_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands that are built in, on a checkpoint of the generator; in one process."""
    values = {"model": make_checkpoint(tmp_path / "tiny", SHAPES["tiny"]), "workload": tmp_path / "W.json"}
    Workload("W", "tiny", [[5, 6, 7], [8, 9], [10] * 20], [4, 3, 5]).write(values["workload"])
    outputs = {}
    for name, command in BUILT_IN.items():
        out = tmp_path / f"{name}.json"
        _, _, module, *arguments = shlex.split(command.format(**values, threads=1, out=out))
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        importlib.import_module(module).main()
        assert capsys.readouterr().out.splitlines()[-1].startswith(f'RESULT {{"peer": "{name}"')
        outputs[name] = json.loads(out.read_text())["outputs"]
    assert outputs["transformers"] == outputs[OURS]
    assert [len(tokens) for tokens in outputs[OURS]] == [4, 3, 5]


def test_the_workloads_are_those_of_the_table_and_the_same_each_time() -> None:
    assert make_workloads() == make_workloads()
    mixed, shared, real, short = make_workloads()
    assert all(32 <= n <= 256 for n in [*map(len, mixed.prompts), *mixed.lengths])
    assert len({tuple(prompt[:512]) for prompt in shared.prompts}) == 1
    assert {len(prompt) for prompt in shared.prompts} == {544}
    assert (len(real.prompts), real.model) == (16, "q06b")
    assert (len(short.prompts), max(short.lengths)) == (64, 127)
