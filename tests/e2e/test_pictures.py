"""Pictures behind a real worker: a run's rows and chats get what transformers' whole model says to them."""

import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image

from jobs.cli import main
from tests.e2e.conftest import RealWorkers
from tests.engine.picture_models import PictureReference, make_with_pictures, picture
from tests.engine.reference import TIE
from tests.picture_files import broken, data_url
from tests.rq_workers import wait_until

NUM_TOKENS = 6


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PictureReference:
    return PictureReference(
        make_with_pictures(tmp_path_factory.mktemp("model"), "qwen2_vl"), "qwen2_vl"
    )


def png(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def write_pandas(path: Path, prompts: list[str], files: list[bytes]) -> None:
    pd.DataFrame({"prompt": prompts, "image": files}).to_parquet(path)


def write_datasets(path: Path, prompts: list[str], files: list[bytes]) -> None:
    """With Hugging Face's `datasets`; without it, what that writes."""
    images = [{"bytes": file, "path": None} for file in files]
    try:
        import datasets
    except ImportError:
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        features = {"prompt": {"dtype": "string", "_type": "Value"}, "image": {"_type": "Image"}}
        table = pa.table({"prompt": prompts, "image": pa.array(images, kind)})
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        pq.write_table(table.replace_schema_metadata(metadata), path)
    else:
        kinds = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
        datasets.Dataset.from_dict({"prompt": prompts, "image": images}, features=kinds).to_parquet(
            path
        )


def said(reference: PictureReference, *parts: Any) -> str | None:
    """What transformers says to a prompt; None where another token is as likely."""
    tokens, margins = reference.answer(list(parts), NUM_TOKENS)
    text: str = reference.processor.tokenizer.decode(tokens, skip_special_tokens=True)
    return text if min(margins) > TIE else None


def start(workers: RealWorkers, reference: PictureReference) -> None:
    workers.start(
        queues=("bulk",), TOKENMILL_MODEL=str(reference.folder), TOKENMILL_DTYPE="float32"
    )
    wait_until(lambda: workers.redis.scard("rq:workers:bulk") == 1)


def run(workers: RealWorkers, *args: object) -> str:
    found = CliRunner(env={"RQ_REDIS_URL": workers.url}).invoke(main, list(map(str, args)))
    assert found.exit_code == 0, found.output
    return found.output


@pytest.mark.parametrize(
    ("write", "num_rows"),
    [
        (write_pandas, 20),
        # The same rows from another kind of column, which tests/jobs/parquet/test_pictures.py reads, too.
        pytest.param(write_datasets, 20, marks=pytest.mark.long),
        pytest.param(write_pandas, 500, marks=pytest.mark.long),
        pytest.param(write_datasets, 500, marks=pytest.mark.long),
    ],
)
def test_a_broken_picture_costs_its_row_and_no_other(
    workers: RealWorkers, reference: PictureReference, tmp_path: Path, write: Any, num_rows: int
) -> None:
    pictures = [picture(number, 40 + number % 30, 60) for number in range(num_rows)]
    files, prompts = (
        list(map(png, pictures)),
        [f"what is {number % 7}?" for number in range(num_rows)],
    )
    bad = dict(zip(range(1, num_rows, num_rows // 10), broken(), strict=True))
    write(tmp_path / "in.parquet", prompts, [bad.get(row, file) for row, file in enumerate(files)])
    start(workers, reference)
    options = ["--image-column", "image", "--temperature", 0, "--max-tokens", NUM_TOKENS]
    shown = run(workers, "preview", tmp_path / "in.parquet", "--rows", 1, *options)
    assert '[{"type": "image", "image": "' in shown
    tried = run(workers, "submit", tmp_path / "in.parquet", tmp_path / "out", "--dry-run", *options)
    assert f"{num_rows}, of which 10 would fail" in tried
    began = time.monotonic()
    run(
        workers,
        "submit",
        tmp_path / "in.parquet",
        tmp_path / "out",
        "--wait",
        "--rows-per-shard",
        100,
        *options,
    )
    print(f"{num_rows / (time.monotonic() - began):.1f} rows/s")
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert [row for row, each in enumerate(rows) if each["error"] is not None] == list(bad)
    assert all(rows[row]["error"].startswith("picture 1 ") for row in bad)
    asked = [row for row in range(num_rows) if row not in bad][:12]
    expected = {row: said(reference, pictures[row], prompts[row]) for row in asked}
    certain = {row: text for row, text in expected.items() if text is not None}
    assert {row: rows[row]["completion"] for row in certain} == certain
    assert len(certain) > 4
    assert len({row["completion"] for row in rows if row["error"] is None}) > 3


def test_chats_and_labels_see_their_pictures(
    workers: RealWorkers, reference: PictureReference, tmp_path: Path
) -> None:
    start(workers, reference)
    queue, files = workers.queue("bulk"), [png(picture(number)) for number in range(2)]
    (tmp_path / "one.png").write_bytes(files[1])
    urls = [data_url(files[0]), data_url(files[1]), str(tmp_path / "one.png")]
    chats = [
        [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": " what is it?"}]
        for url in urls
    ]
    jobs = [
        queue.enqueue(
            "jobs.chat", [{"role": "user", "content": chat}], temperature=0, max_tokens=NUM_TOKENS
        )
        for chat in chats
    ]
    answers = [workers.result(job).return_value["choices"][0]["message"]["content"] for job in jobs]
    assert answers[1] == answers[2]
    pq.write_table(pa.table({"prompt": ["is it?"] * 2, "image": files}), tmp_path / "in.parquet")
    labels = ["--labels", "yes,no", "--image-column", "image"]
    run(workers, "submit", tmp_path / "in.parquet", tmp_path / "out", "--wait", *labels)
    chat = ["--labels", "yes,no", "--image-column", "image", "--messages-template"]
    chat += [json.dumps([{"role": "user", "content": "{image} {prompt}"}])]
    run(workers, "submit", tmp_path / "in.parquet", tmp_path / "chats", "--wait", *chat)
    for output in ("out", "chats"):
        probabilities = pq.read_table(tmp_path / output)["probability"].to_pylist()
        assert None not in probabilities
        assert len(set(probabilities)) == 2
