"""What a killed server leaves is removed later, and one broken batch does not hide the others."""

import os
import time
from pathlib import Path

import pytest
from redis import Redis

from jobs.errors import InvalidValue
from tokenmill.server.batches import batch_runs
from tokenmill.server.batches.batch_runs import Batches
from tokenmill.server.batches.file_store import ABANDONED_S, FileStore
from tokenmill.server.batches.folders import LocalFolder
from tokenmill.server.errors import ApiError


def stored(files: FileStore, data: bytes = b"{}\n") -> str:
    new_file = files.begin("search")
    new_file.draft.write(data)
    return files.finish("search", new_file, "a", "batch", None).id


def test_what_a_killed_server_left_is_removed_after_a_day(tmp_path: Path) -> None:
    now = 1_000_000_000.0
    files = FileStore(LocalFolder(tmp_path), clock=lambda: now)
    kept = stored(files)
    folder = tmp_path / "search" / "files"
    left = [folder / ".file-1.abcd", folder / "file-2", folder / ".file-3.json.abcd"]
    for path in left:
        path.write_bytes(b"x")
        os.utime(path, (now, now))

    assert [file.id for file in files.uploads("search")] == [kept]
    assert all(path.exists() for path in left)
    now += ABANDONED_S + 1
    assert [file.id for file in files.uploads("search")] == [kept]
    assert not any(path.exists() for path in left)
    with files.folder.open(files.find("search", kept).content) as source:
        assert source.read() == b"{}\n"


def test_a_batch_that_cannot_be_submitted_is_not_there(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FileStore(LocalFolder(tmp_path))
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
    files = FileStore(LocalFolder(tmp_path))
    batches = Batches(redis, files, "bulk")
    file_id = stored(files)
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = batches.create("search", asked)
    files.delete("search", file_id)
    redis.flushall()
    assert batches.retrieve("search", batch["id"])["status"] in ("validating", "failed")
    for _ in range(2):
        assert batches.cancel("search", batch["id"])["status"] in ("cancelled", "failed")


def test_a_batch_whose_window_ends_while_no_worker_is_alive_is_expired(
    redis: Redis, tmp_path: Path
) -> None:
    files = FileStore(LocalFolder(tmp_path))
    two_hours_ago = time.time() - 7200
    asked = {
        "input_file_id": stored(files),
        "endpoint": "/v1/completions",
        "completion_window": "1h",
    }
    earlier = Batches(redis, files, "bulk", clock=lambda: two_hours_ago)
    batch = earlier.create("search", asked)
    assert batch["status"] == "validating"
    shown = Batches(redis, files, "bulk").retrieve("search", batch["id"])
    assert (shown["status"], shown["expired_at"]) == ("expired", shown["expires_at"])
    assert (shown["output_file_id"], shown["error_file_id"]) == (None, None)
