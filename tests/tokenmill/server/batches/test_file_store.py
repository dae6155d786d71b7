"""What a killed server leaves is removed later, and one broken batch does not hide the others."""

import os
from pathlib import Path

import pytest
from redis import Redis

from jobs.errors import InvalidValue
from tokenmill.server.batches import batch_runs
from tokenmill.server.batches.batch_runs import Batches
from tokenmill.server.batches.file_store import ABANDONED_S, FileStore
from tokenmill.server.errors import ApiError


def stored(files: FileStore, data: bytes = b"{}\n") -> str:
    file_id, sink = files.begin("search")
    with sink:
        sink.write(data)
    return files.finish("search", file_id, "a", "batch", None).id


def test_what_a_killed_server_left_is_removed_after_a_day(tmp_path: Path) -> None:
    now = 1_000_000_000.0
    files = FileStore(tmp_path, clock=lambda: now)
    kept = stored(files)
    folder = files.project_folder("search", "files")
    left = [folder / "file-1.partial", folder / "file-2", folder / ".file-3.json.abcd"]
    for path in left:
        path.write_bytes(b"x")
        os.utime(path, (now, now))

    assert [file.id for file in files.uploads("search")] == [kept]
    assert all(path.exists() for path in left)
    now += ABANDONED_S + 1
    assert [file.id for file in files.uploads("search")] == [kept]
    assert not any(path.exists() for path in left)
    assert files.find("search", kept)[1].read_bytes() == b"{}\n"


def test_a_batch_that_cannot_be_submitted_is_not_there(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FileStore(tmp_path)
    batches = Batches(redis, files, "bulk")
    asked = {
        "input_file_id": stored(files),
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    good = batches.create("search", asked)

    def refuse(*_: object, **__: object) -> None:
        raise InvalidValue("{} is wrong", "it")

    with monkeypatch.context() as patched:
        patched.setattr(batch_runs, "submit_run", refuse)
        with pytest.raises(ApiError, match="it is wrong") as caught:
            batches.create("search", asked)
        assert caught.value.status == 400
        assert [batch["id"] for batch in batches.page("search", None, 10)[0]] == [good["id"]]

        redis.flushall()
        (shown,) = batches.page("search", None, 10)[0]
        assert shown["status"] == "failed"
        assert "it is wrong" in shown["errors"]["data"][0]["message"]


def test_a_batch_that_redis_lost_is_submitted_again_without_its_file(
    redis: Redis, tmp_path: Path
) -> None:
    files = FileStore(tmp_path)
    batches = Batches(redis, files, "bulk")
    file_id = stored(files)
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = batches.create("search", asked)
    files.delete("search", file_id)
    redis.flushall()
    assert batches.retrieve("search", batch["id"])["status"] in ("validating", "failed")
    for _ in range(2):
        assert batches.cancel("search", batch["id"])["status"] in ("cancelled", "failed")
