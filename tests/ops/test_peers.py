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

from ops.bench import engine, padded
from ops.bench import peers as bench
from ops.bench.make import SHAPES, make_checkpoint, mixed, shared_prefix
from ops.bench.peers import OURS, started, summarize, take_turns
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
        records = take_turns(peers, path, rounds=2)
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


@pytest.mark.parametrize("text", ["no json", "[1]", '{"a": 1}', None])
def test_peers_that_are_no_names_and_commands_are_refused(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = tmp_path / "peers.json"
    if text is not None:
        peers.write_text(text)
    monkeypatch.setattr(sys, "argv", ["peers", "--folder", str(tmp_path), "--peers", str(peers)])
    with pytest.raises(SystemExit):
        bench.main()
    assert f"--peers {peers}: " in capsys.readouterr().err


def test_both_runners_answer_a_workload_with_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours and transformers' padded batch, on a checkpoint of the generator; in one process."""
    model, path = make_checkpoint(tmp_path / "tiny", SHAPES["tiny"]), tmp_path / "W.json"
    Workload("W", "tiny", [[5, 6, 7], [8, 9], [10] * 20], [4, 3, 5]).write(path)
    outputs = []
    for runner in (engine, padded):
        out = tmp_path / "out.json"
        arguments = ["--model", model, "--workload", path, "--threads", 1, "--out", out]
        monkeypatch.setattr(sys, "argv", ["runner", *map(str, arguments)])
        runner.main()
        assert capsys.readouterr().out.splitlines()[-1].startswith('RESULT {"peer": ')
        outputs.append(json.loads(out.read_text())["outputs"])
    assert outputs[0] == outputs[1]
    assert [len(tokens) for tokens in outputs[0]] == [4, 3, 5]


def test_the_workloads_are_those_of_the_table_and_the_same_each_time() -> None:
    assert (mixed(), shared_prefix()) == (mixed(), shared_prefix())
    assert all(32 <= n <= 256 for n in [*map(len, mixed().prompts), *mixed().lengths])
    assert len({tuple(prompt[:512]) for prompt in shared_prefix().prompts}) == 1
    assert {len(prompt) for prompt in shared_prefix().prompts} == {544}


def test_a_peer_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the shell that started it, and what that waits for."""
    monkeypatch.setattr(bench, "END_S", 0.1)
    script = "import time; print('READY', flush=True); time.sleep(60)"
    command = shlex.join((sys.executable, "-c", script)) + "; true"
    with started("endless", command, tmp_path / "log") as peer:
        peer.wait_until_ready()
        processes = psutil.Process(peer.pid).children(recursive=True)
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert processes
    assert not alive
