"""A body that no job could hold is refused at the door."""

import pytest

from tokenmill.server.answers.response_bodies import response_call
from tokenmill.server.errors import ApiError
from tokenmill.server.request_bodies import MAX_DEPTH, MAX_MARKS, parsed_body


def test_a_body_is_the_value_of_its_json() -> None:
    assert parsed_body('{"a": ["é", 1.5, "\\ud83d\\ude00"]}'.encode()) == {"a": ["é", 1.5, "😀"]}
    assert parsed_body(b"\xef\xbb\xbf1") == 1
    assert parsed_body(b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1))


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b'{"temperature": NaN}', 400),
        (b'{"temperature": -Infinity}', 400),
        (b'{"temperature": 1e999}', 400),
        (b"1" * 5000, 400),
        (b'"\\ud800"', 400),
        (b'{"\\uDFFF": 1}', 400),
        (b'"\xed\xa0\x80"', 400),
        ('{"a": 1}'.encode("utf-16"), 400),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), 400),
        (b'{"a":' * 900 + b"1" + b"}" * 900, 400),
        (b"[" + b"0," * MAX_MARKS + b"0]", 413),
        (b"", 400),
    ],
)
def test_a_body_that_no_job_could_hold_is_refused(data: bytes, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        parsed_body(data)
    assert caught.value.status == status


@pytest.mark.parametrize("value", [True, 5, 1.5, "x", {"a": 1}])
def test_tools_of_a_response_are_a_list(value: object) -> None:
    with pytest.raises(ApiError, match="tools is no list") as caught:
        response_call({"input": "x", "tools": value})
    assert caught.value.status == 400
