"""A folder on a disk and one in a store do the same, and batches end in either."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="obstore is not installed")
pytest.importorskip("moto", reason="moto, a server of the S3 protocol for tests, is not installed")

import openai

from jobs.parquet.files.filesystem import StoreRefused
from jobs.parquet.files.object_folder import ObjectFolder
from jobs.parquet.files.object_requests import opened_store
from tests.forking import ForkedWorkers
from tests.jobs.s3_server import BUCKET, S3, FaultyProxy, running_s3, use_environment
from tests.redis_server import running_redis_server
from tests.rq_workers import wait_until
from tests.tokenmill.server.server_process import client, running_server
from tokenmill.server.batches.folders import Folder, LocalFolder, read_json, write_json, written

ROOT = f"s3://{BUCKET}/api"


@pytest.fixture(scope="module")
def store() -> Iterator[S3]:
    with running_s3() as found:
        yield found


@pytest.fixture(params=["disk", "store"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Folder]:
    if request.param == "disk":
        return LocalFolder(tmp_path / "api")
    store: S3 = request.getfixturevalue("store")
    store.empty()
    use_environment(monkeypatch, store.environment())
    return ObjectFolder(ROOT)


def test_a_file_is_there_once_it_is_finished(folder: Folder) -> None:
    draft = folder.create("p/files/a")
    draft.write(b"0123")
    draft.write(bytearray(b"456789"))
    assert folder.stat("p/files/a") is None
    draft.finish()
    draft.drop()  # does nothing now
    state = folder.stat("p/files/a")
    assert state is not None
    assert state.size == 10
    assert folder.names("p/files") == ["a"]
    assert folder.names("p") == ["files"]
    with folder.open("p/files/a") as source:
        source.seek(4)
        assert source.read(3) == b"456"
        assert source.read() == b"789"


def write_and_fail(folder: Folder, name: str) -> None:
    with written(folder, name) as draft:
        draft.write(b"x")
        raise OSError("cut")


def test_a_file_that_is_dropped_leaves_nothing(folder: Folder) -> None:
    draft = folder.create("p/files/a")
    draft.write(b"x" * (9 << 20))
    draft.drop()
    with pytest.raises(OSError, match="cut"):
        write_and_fail(folder, "p/files/b")
    assert folder.names("p/files") == []
    assert folder.stat("p/files/a") is None
    with pytest.raises(FileNotFoundError):
        folder.open("p/files/a")


def test_what_is_not_there_is_no_error(folder: Folder) -> None:
    assert folder.stat("p") is None
    assert folder.stat("p/files/a/b") is None
    assert folder.names("p/files") == []
    assert read_json(folder, "p/files/a.json") is None
    folder.remove("p/files/a")


def test_a_record_is_replaced(folder: Folder) -> None:
    write_json(folder, "p/a.json", {"n": 1})
    write_json(folder, "p/a.json", {"n": 2})
    assert read_json(folder, "p/a.json") == {"n": 2}
    folder.remove("p/a.json")
    assert read_json(folder, "p/a.json") is None


@pytest.mark.parametrize("part", [1, 6])
def test_an_upload_that_the_store_refuses_is_named_and_leaves_nothing(
    store: S3, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """obstore's errors differ: those of the last piece come when the upload is closed."""
    store.empty()
    proxy = FaultyProxy(store.url)
    use_environment(monkeypatch, store.environment(proxy.url))
    opened_store.cache_clear()
    try:
        proxy.choose = lambda method, path: "403" if f"partNumber={part}" in path else None
        with pytest.raises(StoreRefused, match="AccessDenied"):
            write_pieces(ObjectFolder(ROOT), "p/files/a")
        assert store.uploads() == []
        assert store.names() == []
    finally:
        proxy.close()
        opened_store.cache_clear()


def write_pieces(folder: Folder, name: str) -> None:
    with written(folder, name) as draft:
        for _ in range(41):  # six pieces, more than may be under way at once
            draft.write(b"x" * (1 << 20))


def line(custom_id: str, prompt: str) -> bytes:
    body = {"model": "fake", "prompt": prompt, "max_tokens": 4}
    asked = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(asked).encode() + b"\n"


@pytest.mark.long
def test_a_batch_goes_its_whole_way_through_a_store(
    redis_executable: str, tmp_path: Path, store: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.empty()
    proxy = FaultyProxy(store.url)
    use_environment(monkeypatch, store.environment(proxy.url))
    with running_redis_server(executable=redis_executable) as url:
        workers = ForkedWorkers(url, tmp_path)
        workers.start(queues=("bulk",), TOKENMILL_DATA_ROOTS=ROOT)
        try:
            with running_server(url, tmp_path / "log", "--folder", ROOT) as address:
                api = client(address)
                wait_until(lambda: workers.redis.keys("tokenmill:worker:*"))
                lines = [line("a", "one"), line("b", "refuse"), line("c", "three")]
                file = api.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
                assert api.files.retrieve(file.id).bytes == len(b"".join(lines))
                assert api.files.content(file.id).read() == b"".join(lines)

                made: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
                batch = api.batches.create(input_file_id=file.id, **made)
                wait_until(lambda: api.batches.retrieve(batch.id).status == "completed")
                batch = api.batches.retrieve(batch.id)
                assert batch.output_file_id is not None
                output = api.files.content(batch.output_file_id).read().splitlines()
                assert [json.loads(answer)["custom_id"] for answer in output] == ["a", "c"]
                assert batch.error_file_id is not None
                (failed,) = api.files.content(batch.error_file_id).read().splitlines()
                assert json.loads(failed)["custom_id"] == "b"

                for key in workers.redis.keys("tokenmill:run:*"):
                    workers.redis.delete(key)
                assert api.batches.retrieve(batch.id).status == "completed"

                api.files.delete(file.id)
                with pytest.raises(openai.NotFoundError):
                    api.files.content(file.id)
                assert api.files.list().data == []
                proxy.choose = lambda method, path: "403"
                with pytest.raises(openai.InternalServerError, match="store"):
                    api.files.list()
        finally:
            workers.close()
            proxy.close()
    assert store.uploads() == []
