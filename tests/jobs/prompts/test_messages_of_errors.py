"""An error has a message, whatever values led to it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from click.testing import CliRunner
from redis import Redis

import jobs
from jobs import errors
from jobs.cli import main
from jobs.common.display import message_of
from jobs.context import JobContext
from jobs.errors import InvalidValue, JobsError, wrong_value_error
from jobs.installed import check_sampling
from jobs.prompts.batch_lines import failure_text, line_task

SLIPS = [["yes", "no"], "{0}", {"{}": 1}, {"regex": 5}, {"choice": "{x}"}, {"json": "{"}, 7]


@pytest.mark.parametrize("value", SLIPS, ids=repr)
def test_structured_outputs_of_a_wrong_kind_are_refused_in_words(value: object) -> None:
    with pytest.raises(JobsError) as raised:
        check_sampling({"structured_outputs": value})
    assert "structured_outputs" in str(raised.value)
    assert isinstance(raised.value.log_text, str)


def test_braces_around_a_value_stay_as_they_are() -> None:
    assert (
        str(wrong_value_error("{a}", {"b": 1}, 'one of {"c": d}'))
        == "{a} is {'b': 1}, expected one of {\"c\": d}"
    )
    assert (
        InvalidValue('an object such as {"a": 1}, got {}', "{}").log_text
        == 'an object such as {"a": 1}, got ...'
    )
    assert str(InvalidValue("{} and {}", 1, 2)) == "1 and 2"
    assert str(InvalidValue("nothing in {}")) == "nothing in {}"


def test_an_error_that_was_made_with_other_arguments_than_it_names_still_has_a_message() -> None:
    for kind in all_kinds(JobsError):
        for arguments in ((), ("{x}",), ("{0}", "}"), (1, 2, 3, 4, 5, 6)):
            if kind is not InvalidValue or arguments:
                assert message_of(kind(*arguments))


def all_kinds(kind: type[JobsError]) -> Iterator[type[JobsError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from all_kinds(each)


def test_an_error_whose_message_cannot_be_made_says_so() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise KeyError("'regex'")

    assert message_of(Broken()) == "Broken, whose message cannot be made (KeyError)"


@pytest.mark.parametrize("value", ['["a"]', '"{x}"', "{}"])
def test_the_command_line_and_python_say_it_in_one_line(
    value: str, redis: Redis, redis_url: str
) -> None:
    with pytest.raises(errors.InvalidJob, match="structured_outputs"):
        jobs.submit("in.parquet", "out", sampling={"structured_outputs": ["a"]}, connection=redis)
    sampling = f'{{"structured_outputs": {value}}}'
    options = ["--url", redis_url, "submit", "in.parquet", "out", "--sampling", sampling]
    ended = CliRunner().invoke(main, options)
    assert ended.exit_code == 1, ended.output
    assert ended.exception is None or isinstance(ended.exception, SystemExit)
    assert "structured_outputs" in ended.output
    assert "Traceback" not in ended.output


def test_a_batch_line_of_that_kind_says_why_it_alone_fails(context: JobContext) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "structured_outputs": ["a"]}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
    with pytest.raises(JobsError) as raised:
        line_task(line, 0).open(replace(context, check_sampling=check_sampling))
    assert "structured_outputs must be an object such as {'regex': '[0-9]+'}" in failure_text(
        raised.value
    )
