"""An upload is the same however its bytes are cut."""

import asyncio
import io
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.server.batches.uploads import MAX_FIELD_BYTES, Upload
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
