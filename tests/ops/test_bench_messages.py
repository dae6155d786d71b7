"""Where a benchmark cannot begin it says why, without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ops.bench import accuracy, host_time, turns
from ops.bench.gpu_summary import summarize
from ops.bench.workload import Workload
from tests.faults.engine_faults import _processes_below

Call = Callable[..., str]


@pytest.fixture
def message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """What a command with these arguments ends with."""

    def call(main: Callable[[], object], *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code not in (0, None)
        return f"{capsys.readouterr().err}{ended.value.code}"

    return call


def test_turns_without_models_or_peers(message: Call, tmp_path: Path) -> None:
    peers = tmp_path / "peers.json"
    arguments = ("--folder", tmp_path, "--workloads", "W1", "--peers", peers)
    assert f"there is no {tmp_path / 'W1.json'}; run `python -m ops.bench.make`" in message(
        turns.main, *arguments
    )
    Workload("W1", "tiny", [[1]], [1]).write(tmp_path / "W1.json")
    assert f"--peers {peers}: [Errno 2] No such file" in message(turns.main, *arguments)
    for text, expected in (
        ("no json", "Expecting value"),
        ("[1]", "expected an object of names and commands"),
        ('{"a": 1}', "expected an object of names and commands"),
    ):
        peers.write_text(text)
        assert expected in message(turns.main, *arguments)


def test_a_peer_that_does_not_start_is_named_with_its_log(
    message: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PYTHON", "false")
    Workload("W1", "tiny", [[1]], [1]).write(tmp_path / "W1.json")
    (tmp_path / "peers.json").write_text("{}")
    found = message(turns.main, "--folder", tmp_path, "--workloads", "W1", "--peers", tmp_path / "peers.json")
    assert f"tokenmill float32 ended with status 1; see {tmp_path / 'turns-tokenmill-float32.log'}" in found


def test_accuracy_of_what_the_engine_refuses(message: Call) -> None:
    assert "quantization='int4' is not known" in message(accuracy.main, "--rows", 1, "--quantization", "int4")
    assert "argument --rows: '0': expected a number" in message(accuracy.main, "--rows", 0)
    assert "argument --batches: '-1': expected a number" in message(accuracy.main, "--batches=-1")


@pytest.mark.parametrize("case", ["8", "8x", "x40", "0x40", "8x15", "8x4x4"])
def test_host_time_of_what_is_no_case(message: Call, case: str) -> None:
    assert f"{case!r}: expected sequences x context" in message(host_time.main, "--cases", case)


def test_a_dry_run_is_compared_with_no_estimate(tmp_path: Path) -> None:
    """Of a tiny model on a CPU."""
    (tmp_path / "run.json").write_text(
        '{"runs": [{"variant": "graphs, overlap", "sampling": "greedy", "turn": 0, "tok_s": 5.0}],'
        ' "floor": {"seconds": 1.0}, "out_tokens": 10}'
    )
    (name, dry), (_, real) = (*summarize(tmp_path, {}, dry_run=True), *summarize(tmp_path, {}))
    assert name == "256 sequences, graphs, overlap, greedy"
    assert dry == "5 tok/s, not compared in a dry run; 50% of the floor's"
    assert "misses by more than" in real


def test_a_worker_that_is_gone_has_no_ranks() -> None:
    assert _processes_below(2**22 + 1) == []
