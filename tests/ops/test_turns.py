"""Engines that take turns: rounds that rotate, other tokens in each, ratios within rounds."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import ExitStack
from io import StringIO
from pathlib import Path

import psutil
import pytest

from ops.bench import turns
from ops.bench.turns import OURS, started, summarize, take_turns
from ops.bench.workload import Workload
from ops.bench.workload import take_turns as be_a_peer

PEER = """
import json, sys
print("READY", flush=True)
for number, line in enumerate(sys.stdin):
    if number == {last}:
        sys.exit(3)
    turn = json.loads(line)
    result = {{"tok_s": {speed} * (number + 1), "outputs": [[turn["shift"]]]}}
    print("RESULT " + json.dumps(result), flush=True)
"""


def command(folder: Path, name: str, *, speed: int, last: int = -1) -> str:
    """A peer whose speed grows from turn to turn, and which fails at one of them."""
    script = folder / f"{name}.py"
    script.write_text(PEER.format(speed=speed, last=last))
    return shlex.join((sys.executable, str(script)))


def test_all_run_in_each_round_and_ratios_are_of_a_round(tmp_path: Path) -> None:
    """Each is started once; the speeds of the first and of the second round differ twice, their ratio not."""
    path = tmp_path / "W.json"
    Workload("W", "tiny", [[1, 2]], [1]).write(path)
    with ExitStack() as stack:
        peers = []
        for name, speed in (("other", 100), (f"{OURS} float32", 150)):
            one = started(name, command(tmp_path, name.split()[0], speed=speed), tmp_path / "log")
            peers.append(stack.enter_context(one))
            peers[-1].wait_until_ready()
        records = take_turns(peers, path, rounds=2, threads=1)
        peaks = {peer.name: peer.peak_mib for peer in peers}
    names = [record["name"] for record in records]
    assert names == ["other", f"{OURS} float32", f"{OURS} float32", "other"]
    assert [record["outputs"] for record in records] == [[[101]], [[101]], [[202]], [[202]]]
    (row,) = summarize(records, peaks)
    assert row[:4] == [
        f"{OURS} float32 / other",
        "225 (150..300)",
        "150 (100..200)",
        "1.50 (1.50..1.50)",
    ]
    assert row[5] == "100%"


def test_a_peer_that_ends_early_is_named(tmp_path: Path) -> None:
    path = tmp_path / "W.json"
    Workload("W", "tiny", [[1, 2]], [1]).write(path)
    with started("broken", command(tmp_path, "broken", speed=1, last=0), tmp_path / "log") as peer:
        peer.wait_until_ready()
        with pytest.raises(RuntimeError, match="broken ended with status 3"):
            peer.run(path, 0)


def test_a_peers_turn_has_its_own_token_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `--turns` does in our runners; the ids stay within those that the workload has."""
    path = tmp_path / "W.json"
    Workload("W", "tiny", [[0, 9], [5]], [2, 1]).write(path)
    turn = json.dumps({"workload": str(path), "shift": 3})
    monkeypatch.setattr(sys, "stdin", StringIO(turn + "\n"))
    be_a_peer(lambda prompts, lengths: [prompt * n for prompt, n in zip(prompts, lengths, strict=True)])
    ready, result = capsys.readouterr().out.splitlines()
    assert ready == "READY"
    assert json.loads(result.removeprefix("RESULT "))["outputs"] == [[3, 2, 3, 2], [8]]


def test_a_peer_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the shell that started it, and what that waits for."""
    monkeypatch.setattr(turns, "END_S", 0.1)
    script = "import time; print('READY', flush=True); time.sleep(60)"
    command = shlex.join((sys.executable, "-c", script)) + "; true"
    with started("endless", command, tmp_path / "log") as peer:
        peer.wait_until_ready()
        processes = psutil.Process(peer.pid).children(recursive=True)
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert processes
    assert not alive
