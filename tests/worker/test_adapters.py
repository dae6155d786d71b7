"""Files of an adapter change while jobs need them: a run waits for its own, a prompt takes those that are there."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from engine import AdapterFolder
from jobs.cli import main
from tests.rq_workers import Workers, wait_until


def write_adapter(folder: Path, alpha: int) -> str:
    """Write an adapter that the fake engine takes; return its fingerprint."""
    folder.mkdir()
    header = b"{}"
    weights = len(header).to_bytes(8, "little") + header
    (folder / "adapter_model.safetensors").write_bytes(weights)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": alpha}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return AdapterFolder(str(folder.parent)).find(folder.name).fingerprint


def test_jobs_whose_adapter_changes_are_given_back_and_go_on_with_the_files_that_they_need(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have begun, and most of their prompts have not reached the engine yet."""
    monkeypatch.setenv("RQ_REDIS_URL", workers.url)
    folder = tmp_path / "adapters"
    folder.mkdir()
    old = write_adapter(folder / "sql", alpha=1)
    workers.start(
        "--name", "w", queues=("prompts", "bulk"), TOKENMILL_DATA_ROOTS=str(tmp_path),
        TOKENMILL_ADAPTERS=str(folder), TOKENMILL_MAX_NUM_SEQS="2", TOKENMILL_PREFETCH="1",
    )  # fmt: skip
    gates = [tmp_path / f"gate-{number}" for number in range(30)]
    prompts = [f"file:{gate}" for gate in gates]

    def invoke(*arguments: str) -> str:
        done = CliRunner().invoke(main, list(arguments))
        assert done.exit_code == 0, done.output
        return done.output

    source, output = tmp_path / "in.parquet", tmp_path / "out"
    pq.write_table(pa.table({"prompt": prompts}), source)
    run = invoke(
        "submit", str(source), str(output), "--adapter", "sql", "--max-tokens", "1",
        "--rows-per-shard", "20",
    ).split()[0]  # fmt: skip
    wait_until(lambda: "1 started" in invoke("status", run))

    queue = workers.queue("prompts")
    by_name = queue.enqueue("jobs.complete", prompts, model="sql", max_tokens=1)
    wait_until(lambda: len(queue) == 0)

    (folder / "sql").rename(tmp_path / "old")
    new = write_adapter(folder / "sql", alpha=2)
    for gate in gates:
        gate.touch()
    answers = workers.result(by_name).return_value
    assert answers["system_fingerprint"].endswith(f"/{new}")
    assert [choice["text"] for choice in answers["choices"]] == [f"echo:{it}" for it in prompts]
    awaited = f"no worker on queue 'bulk' has the files of adapters sql ({old[:8]})"
    wait_until(lambda: awaited in invoke("status", run))
    assert "2 queued, 0 failed" in invoke("status", run)
    assert not list(output.glob("_parts/*.parquet"))

    other = tmp_path / "with-the-new-files"
    invoke(
        "submit", str(source), str(other), "--adapter", "sql", "--max-tokens", "1", "--reuse",
        str(output),
    )  # fmt: skip
    wait_until((other / "_SUCCESS").exists)

    (folder / "sql").rename(tmp_path / "new")
    (tmp_path / "old").rename(folder / "sql")
    wait_until((output / "_SUCCESS").exists)
    rows = pq.read_table(output).to_pylist()
    assert [row["completion"] for row in rows] == [f"echo:{prompt}" for prompt in prompts]
    assert awaited not in invoke("status", run)
