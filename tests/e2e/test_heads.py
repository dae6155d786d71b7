"""Encoders and heads behind a real worker: jobs and runs give what transformers has for each text alone."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rq import Queue

from tests.e2e.conftest import RealWorkers
from tests.engine.encoders import Alone, words, write_encoder
from tests.rq_workers import wait_until

TEXTS = [words(length) for length in (3, 40, 7, 90)]


def answer_of(queue: Queue, name: str, *args: Any) -> Any:
    job = queue.enqueue(name, *args)
    wait_until(lambda: job.get_status(refresh=True) in ("finished", "failed"))
    return job.latest_result().return_value


def scored(workers: RealWorkers, tmp_path: Path, **arguments: Any) -> list[dict[str, Any]]:
    workers.queue("bulk").enqueue(
        "jobs.score_parquet", str(tmp_path / "in.parquet"), str(tmp_path / "out"), **arguments
    )
    wait_until((tmp_path / "out" / "_SUCCESS").exists)
    rows: list[dict[str, Any]] = pq.read_table(tmp_path / "out").to_pylist()
    return rows


def test_texts_are_classified_in_a_job_and_in_a_run(workers: RealWorkers, tmp_path: Path) -> None:
    model = write_encoder(tmp_path / "model", "bert", 3)
    workers.start(queues=("bulk",), TOKENMILL_MODEL=str(model))
    expected = [Alone(model)(text).softmax(0).tolist() for text in TEXTS]
    found = answer_of(workers.queue("bulk"), "jobs.classify_text", TEXTS)
    assert [list(each["probabilities"].values()) for each in found["data"]] == [
        pytest.approx(each, abs=1e-5) for each in expected
    ]
    pq.write_table(pa.table({"prompt": [*TEXTS, None]}), tmp_path / "in.parquet")
    *rows, null = scored(workers, tmp_path, task="classify", rows_per_shard=2)
    assert [dict(row["probabilities"]) for row in rows] == [
        each["probabilities"] for each in found["data"]
    ]
    assert [(row["label"], row["score"]) for row in rows] == [
        (each["label"], each["score"]) for each in found["data"]
    ]
    assert (null["label"], null["score"]) == (None, None)


@pytest.mark.long  # another head on the way of the test above; tests/jobs/parquet/test_text_tasks.py has its rows
def test_documents_are_ranked_by_a_cross_encoder_in_a_job_and_in_a_run(
    workers: RealWorkers, tmp_path: Path
) -> None:
    model = write_encoder(tmp_path / "model", "xlm-roberta", 1)
    workers.start(queues=("bulk",), TOKENMILL_MODEL=str(model))
    query = words(5, seed=1)
    expected = [Alone(model)(query, text).sigmoid().item() for text in TEXTS]
    found = answer_of(workers.queue("bulk"), "jobs.rerank", query, TEXTS)
    by_index = {each["index"]: each["relevance_score"] for each in found["results"]}
    assert [by_index[place] for place in range(len(TEXTS))] == pytest.approx(expected, abs=1e-5)
    assert found["results"][0]["relevance_score"] == max(by_index.values())
    pq.write_table(
        pa.table({"query": [query] * len(TEXTS), "text": TEXTS}), tmp_path / "in.parquet"
    )
    rows = scored(workers, tmp_path, task="rerank", document_column="text", rows_per_shard=2)
    assert [row["score"] for row in rows] == pytest.approx(expected, abs=1e-5)


def test_texts_are_embedded_by_an_encoder(workers: RealWorkers, tmp_path: Path) -> None:
    model = write_encoder(tmp_path / "model", "modernbert")
    workers.start(queues=("bulk",), TOKENMILL_MODEL=str(model))
    found = answer_of(workers.queue("bulk"), "jobs.embed", TEXTS)
    for text, entry in zip(TEXTS, found["data"], strict=True):
        assert entry["embedding"] == pytest.approx(Alone(model)(text).tolist(), abs=1e-5)
