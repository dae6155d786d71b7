"""Prompts and Parquet files through Redis into one batch."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rq.job import JobStatus

from engine import Completion, Engine, EngineConfig, SamplingParams
from ops.demo.prompts import BARE_PROMPT, CHAT_PROMPT
from tests.e2e.conftest import DATES, MODEL, RealWorkers
from tests.rq_workers import leftovers, stats_of

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
ROWS = 300
GENERATED = [
    "completion",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "error",
]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return list(pq.read_table(DATES, columns=["text"])["text"].to_pylist()[:ROWS])


@pytest.fixture(scope="session")
def reference(texts: list[str]) -> dict[str, Completion]:
    """The engine's own answers, one prompt at a time, with nothing of a queue about."""
    prompts = [BARE_PROMPT.format(text=text) for text in texts]
    prompts += [CHAT_PROMPT.format(text=text) for text in texts]
    torch.set_num_threads(1)  # the model is too small to share out, and the tests share two cores
    with Engine(EngineConfig(str(MODEL), dtype="float32", kv_cache_bytes=64 * 2**20)) as engine:
        answers = engine.generate(prompts, SamplingParams(**GREEDY))
    return dict(zip(prompts, answers, strict=True))


def check_rows(output: Path, texts: list[str], reference: dict[str, Completion]) -> None:
    """Every row is there once, in order, with the reference's answer; the input columns are unchanged."""
    table = pq.read_table(output)
    assert table["text"].to_pylist() == texts
    assert table["id"].to_pylist() == list(range(len(texts)))
    assert table.column_names[-6:] == GENERATED
    for text, row in zip(texts, table.select(GENERATED).to_pylist(), strict=True):
        expected = reference[CHAT_PROMPT.format(text=text)]
        assert row["completion"] == expected.text
        assert row["prompt_tokens"] == expected.num_prompt_tokens
        assert row["completion_tokens"] == len(expected.token_ids)
        assert row["error"] is None
    assert (output / "_SUCCESS").exists()
    assert not list(output.glob("_tmp.*"))


def write_input(folder: Path, texts: list[str]) -> Path:
    path = folder / "in.parquet"
    messages = [[{"role": "user", "content": text}] for text in texts]
    table = pa.table({"id": list(range(ROWS)), "text": texts, "messages": messages})
    pq.write_table(table, path, row_group_size=170)
    return path


def test_hundreds_of_prompts_and_a_file_share_one_batch(
    workers: RealWorkers, texts: list[str], reference: dict[str, Completion]
) -> None:
    prompts = [BARE_PROMPT.format(text=text) for text in texts]
    source, output, half = write_input(workers.folder, texts), workers.folder / "out", ROWS // 2
    call = ["jobs.complete", f"prompt={prompts[0]}", "max_tokens:=12", "temperature:=0"]
    workers.rq("enqueue", "-S", "json", "-q", "high", "--job-id", "p0", *call)
    run = ["jobs.score_parquet", str(source), str(output), "messages_column=messages"]
    sizes = [f"sampling:={json.dumps(GREEDY)}", "rows_per_shard:=100"]
    workers.rq("enqueue", "-S", "json", "-q", "bulk", *run, *sizes)
    for i, prompt in list(enumerate(prompts))[1:]:
        queue = workers.queue("high" if i < half else "bulk")
        queue.enqueue("jobs.complete", prompt, job_id=f"p{i}", **GREEDY)

    workers.burst("--name", "w", TOKENMILL_DTYPE="float32")

    for i, prompt in enumerate(prompts):
        job = workers.job(f"p{i}")
        assert job.get_status() == JobStatus.FINISHED
        answer, expected = job.return_value(), reference[prompt]
        assert answer["choices"][0]["text"] == expected.text
        usage = answer["usage"]
        assert usage["prompt_tokens"] == expected.num_prompt_tokens
        assert usage["completion_tokens"] == len(expected.token_ids)
    check_rows(output, texts, reference)
    assert leftovers(workers.redis, "high", "bulk") == []
    assert stats_of(workers, "w")["max_running"] >= 32
    ended = [workers.job(f"p{i}").ended_at for i in range(ROWS)]
    assert max(ended[:half]) < max(ended[half:])
    info = workers.rq("info", "--raw", "-Q")
    assert f"queue high 0, 0 executing, {half} finished, 0 failed" in info
    assert f"queue bulk 0, 0 executing, {half + 4} finished, 0 failed" in info  # the plan, 3 shards
