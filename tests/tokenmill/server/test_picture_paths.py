"""No batch has a worker read a file that its client names."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.server.batches.picture_paths import refuse_picture_paths
from tokenmill.server.errors import ApiError


def line(image: Any) -> bytes:
    parts = [{"type": "image_url", "image_url": image}]
    body = {"messages": [{"role": "user", "content": parts}]}
    return json.dumps({"custom_id": "a", "body": body}).encode()


PATH = line("/etc/passwd")


@pytest.mark.parametrize(
    "data",
    [
        PATH,
        line({"url": "/etc/passwd"}),
        line({"url": "file:///etc/passwd"}),
        line({"url": "a.png", "detail": "low"}),
        line({"url": "s3://bucket/a.png"}),
        b"{}\n{}\n" + PATH + b"\n{}\n",
        b"junk image_url\r" + PATH,
        PATH.replace(b"image_url", b"image\\u005furl"),
        PATH.replace(b"passwd", b"passwd\xff"),
        gzip.compress(PATH),
    ],
)
def test_a_file_that_names_a_path_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "in").write_bytes(data)
    with pytest.raises(ApiError) as caught:
        refuse_picture_paths(tmp_path / "in")
    assert caught.value.status == 400
    assert caught.value.param == "input_file_id"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"junk image_url\n",
        b"\xff\xfe\xff",
        line({"url": "data:image/png;base64,AAAA"}),
        line("https://example.com/a.png"),
        line(5),
        json.dumps({"custom_id": "image_url", "body": {"prompt": "image_url \u00e9"}}).encode(),
    ],
)
def test_another_file_is_taken(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "in").write_bytes(data)
    refuse_picture_paths(tmp_path / "in")
