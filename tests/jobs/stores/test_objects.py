"""Objects of a store: written, read in blocks, and listed."""

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("obstore", reason="the extra `cloud` is not installed")
pytest.importorskip("moto", reason="moto, a server of the S3 protocol for tests, is not installed")

from jobs import errors
from jobs.context import JobContext
from jobs.parquet.files import object_files
from jobs.parquet.files.filesystem import FetchedFile, StoreRefused, StoreUnreachable
from jobs.parquet.files.object_files import list_in_child
from jobs.parquet.files.object_requests import LEVEL, make_request
from jobs.parquet.files.storage import Storage
from sandbox import ChildDied, ChildOutOfMemory, ChildTooSlow
from tests.jobs.conftest import MakeContext
from tests.jobs.s3_server import S3, FaultyProxy
from tests.jobs.stored_runs import ROOT, in_store


@pytest.fixture
def context(make_context: MakeContext, tmp_path: Path) -> JobContext:
    return in_store(make_context(), tmp_path)


def test_nothing_is_left_of_an_object_whose_writing_fails(
    s3: S3, context: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_files, "CHUNK_BYTES", 5 << 20)
    storage, path = Storage.of(context), f"{ROOT}/large"

    def fail() -> None:
        with storage.open_output(path) as sink:
            for _ in range(4):
                sink.write(b"x" * (4 << 20))
            assert s3.uploads() == ["data/large"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (s3.names(), s3.uploads()) == ([], [])
    with storage.open_output(path) as sink:
        for letter in b"abcd":
            sink.write(bytes([letter]) * (4 << 20))
    assert s3.get("data/large") == b"".join(bytes([letter]) * (4 << 20) for letter in b"abcd")
    assert s3.uploads() == []


def test_an_object_is_read_in_few_pieces_and_little_memory(
    s3: S3, proxy: FaultyProxy, context: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_files, "BLOCK_BYTES", 1000)
    contents = bytes(n % 251 for n in range(20_500))
    s3.put("data/file", contents)
    with Storage.of(context).open_input(f"{ROOT}/file") as file:
        assert file.size() == 20_500
        before = proxy.requests
        assert b"".join(iter(lambda: file.read(100), b"")) == contents
        assert proxy.requests - before == 21
        assert file.read_at(30, 20_490) == contents[20_490:]
        assert file.read_at(5000, 600) == contents[600:5600]
        assert proxy.requests - before == 23


def test_the_names_in_a_prefix_are_those_of_its_objects_and_folders(
    s3: S3, context: JobContext
) -> None:
    storage = Storage.of(context)
    assert storage.names(f"{ROOT}/out") == []
    for name in ("", "b", "a", "sub/c", "sub/d/e", "sub2/f", "a b%2Fc", "sub2//g"):
        s3.put(f"data/out/{name}", b"x")
    s3.put("data/outer", b"x")
    with storage.scan(f"{ROOT}/out") as entries:
        expected = sorted(entry.name for entry in entries)
    assert {"a", "b", "sub", "sub2"} <= set(expected)
    assert storage.names(f"{ROOT}/out") == expected


def test_an_object_that_is_replaced_while_it_is_read_is_told(s3: S3, context: JobContext) -> None:
    s3.put("data/file", b"a" * (3 << 20))
    with Storage.of(context).open_input(f"{ROOT}/file") as file:
        assert file.read(10) == b"a" * 10
        s3.put("data/file", b"b" * (3 << 20))
        with pytest.raises(errors.PathSwapped, match="another object came in its place"):
            file.read_at(10, 2 << 20)
        s3.delete("data/file")
        with pytest.raises(FileNotFoundError):
            file.read_at(10, 2 << 20)


CONTENTS = bytes(n % 251 for n in range(6000))


@given(st.lists(st.tuples(st.integers(0, 6500), st.integers(-1, 700)), max_size=60))
def test_any_reads_give_what_is_there(reads: list[tuple[int, int]]) -> None:
    raw = FetchedFile(lambda start, end: CONTENTS[start:end], len(CONTENTS))
    for reader in (
        raw,
        io.BufferedReader(FetchedFile(lambda start, end: CONTENTS[start:end], len(CONTENTS)), 100),
    ):
        for place, size in reads:
            reader.seek(place)
            assert reader.read(size) == CONTENTS[place:][: size if size >= 0 else None]


class Children:
    """Stands in for the children that list prefixes. reply: what each of them replies, or its failure."""

    def __init__(self, reply: dict[str, Any] | Exception) -> None:
        self._reply = reply

    def call(self, _: object) -> tuple[dict[str, Any], bytearray]:
        if isinstance(self._reply, Exception):
            raise self._reply
        return self._reply, bytearray()


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (ChildTooSlow("took more than 30 s"), StoreRefused),
        (ChildDied("ended its process"), StoreRefused),
        (ChildOutOfMemory("needed more than 512 MiB"), StoreRefused),
        ({"raised": "GenericError", "text": "connection reset"}, StoreUnreachable),
        ({"raised": "PermissionDeniedError", "text": "no"}, StoreRefused),
        ({"raised": "ValueError", "text": "no region"}, StoreRefused),
        ({"raised": "FileNotFoundError", "text": "no such key"}, FileNotFoundError),
    ],
    ids=str,
)
def test_a_failed_listing_is_as_lasting_as_its_cause(
    monkeypatch: pytest.MonkeyPatch, reply: dict[str, Any] | Exception, error: type[Exception]
) -> None:
    monkeypatch.setattr(object_files, "_pool", Children(reply))
    with pytest.raises(error) as raised:
        make_request(ROOT, lambda: list_in_child(LEVEL, ROOT, 1.0))
    assert raised.type is error
