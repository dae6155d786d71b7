"""An upload is the same however its bytes are cut."""

import asyncio
import io
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.server.batches.uploads import (
    MAX_FIELD_BYTES,
    MAX_NAME_CHARS,
    MAX_OTHER_BYTES,
    SILENT_S,
    Upload,
)
from tokenmill.server.errors import ApiError

TYPE = "multipart/form-data; boundary=frontier"


def multipart(data: bytes, **fields: str) -> bytes:
    parts = [
        f'--frontier\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    head = b'--frontier\r\nContent-Disposition: form-data; name="file"; filename="a b.jsonl"\r\n'
    parts.append(head + b"Content-Type: application/jsonl\r\n\r\n" + data + b"\r\n")
    return b"".join(parts) + b"--frontier--\r\n"


def read(body: bytes, cuts: list[int], limit: int = 1 << 20) -> tuple[Upload, bytes]:
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]

    async def chunks() -> AsyncIterator[bytes]:
        for start, end in pairwise(places):
            yield body[start:end]

    sink = io.BytesIO()
    upload = Upload(TYPE, sink, limit)
    asyncio.run(upload.read(chunks()))
    return upload, sink.getvalue()


@given(
    st.binary(max_size=200) | st.just(b"\r\n--frontier\r\n-"),
    st.lists(st.integers(0, 1000), max_size=8),
)
def test_a_file_and_its_fields_come_whole(data: bytes, cuts: list[int]) -> None:
    if b"--frontier" in data:
        data = data.replace(b"--frontier", b"--frontie")
    upload, written = read(multipart(data, purpose="batch"), cuts)
    assert written == data
    assert upload.fields == {"purpose": "batch"}
    assert upload.file_name == "a b.jsonl"


@given(st.integers(1, 400))
def test_a_cut_upload_is_refused(length: int) -> None:
    body = multipart(b"x" * 100, purpose="batch")
    with pytest.raises(ApiError):
        read(body[: min(length, len(body) - 5)], [])


@pytest.mark.parametrize(
    ("body", "limit", "status"),
    [
        (multipart(b"x" * 100), 99, 413),
        (multipart(b"x", purpose="y" * MAX_FIELD_BYTES), 1 << 20, 413),
        (b"--frontier--\r\n", 1 << 20, 400),
        (b"nothing of the kind", 1 << 20, 400),
    ],
)
def test_an_upload_that_cannot_be_is_refused(body: bytes, limit: int, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        read(body, [], limit)
    assert caught.value.status == status


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data", "é"])
def test_a_body_of_another_type_is_refused(content_type: str) -> None:
    with pytest.raises(ApiError, match="multipart"):
        Upload(content_type, io.BytesIO(), 1)


@pytest.mark.parametrize(
    "parameter",
    [
        "filename*=unicode_escape''%5cud800",
        "filename*=idna''%80xn--",
        "filename*=a\0b'x'q",
        "filename*=zip''x",
        "filename*0*=utf-8''a; filename*1=b; filename*x=3",
        'filename="' + "a" * 3000 + '"',
        'filename="a\x1b[2J\tb"',
    ],
)
def test_a_file_has_a_name_that_can_be_shown(parameter: str) -> None:
    head = f'--frontier\r\nContent-Disposition: form-data; name="file"; {parameter}\r\n\r\n'
    upload, written = read(head.encode() + b"x\r\n--frontier--\r\n", [])
    assert written == b"x"
    assert upload.file_name
    assert upload.file_name.encode().decode() == upload.file_name
    assert upload.file_name.isprintable()
    assert len(upload.file_name) <= MAX_NAME_CHARS + 3


@pytest.mark.parametrize(
    "boundary",
    ["boundary=" + "b" * 20_000, 'boundary=""', "boundary*=idna''%80", "boundary*=a\0b'x'q", ""],
)
def test_a_boundary_that_cannot_be_is_refused(boundary: str) -> None:
    with pytest.raises(ApiError) as caught:
        Upload(f"multipart/form-data; {boundary}", io.BytesIO(), 1)
    assert caught.value.status == 400


def test_what_follows_the_last_boundary_is_bounded() -> None:
    body = multipart(b"x", purpose="batch")
    assert read(body + b"y" * 1000, [len(body)])[1] == b"x"
    with pytest.raises(ApiError) as caught:
        read(body + b"y" * (MAX_OTHER_BYTES + 100), [len(body)], 50)
    assert caught.value.status == 413


def test_an_upload_that_only_trickles_is_refused() -> None:
    times = iter([0.0, 1.0, SILENT_S + 1])

    async def chunks() -> AsyncIterator[bytes]:
        yield b"--frontier\r\n"
        yield b"Content-Disposition: "

    upload = Upload(TYPE, io.BytesIO(), 1000, clock=lambda: next(times))
    with pytest.raises(ApiError) as caught:
        asyncio.run(upload.read(chunks()))
    assert caught.value.status == 408
