"""Pictures in columns: of bytes, of Hugging Face's Image, of paths; where they stand, and what is wrong with them."""

import json
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine import InvalidRequest
from jobs.errors import InvalidJob, WrongColumnType
from jobs.prompts.pictures import MAX_BYTES, picture_of
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, keep, opened_task, refuse
from tests.jobs.conftest import MakeContext
from tests.jobs.local_runs import Runs
from tests.picture_files import BLUE, RED, bomb, data_url, picture
from worker.engine_thread.pictures import decode_pictures

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
RED_FILE, BLUE_FILE = picture(RED), picture(BLUE)

Ask = Callable[..., list[Any]]


def seen(request: Request) -> FakeCompletion:
    """Answer with the prompt, with the first letter of its color for each picture."""
    try:
        found = decode_pictures(request.prompt if request.messages is None else request.messages)
    except InvalidRequest as error:
        return refuse(str(error))
    if request.messages is None:
        return FakeCompletion(found if isinstance(found, str) else "".join(map(_letter, found)))
    contents = [message["content"] for message in found]
    texts = [each if isinstance(each, str) else "".join(map(_letter, each)) for each in contents]
    return FakeCompletion(" / ".join(texts))


def _letter(part: Any) -> str:
    if isinstance(part, dict):
        part = part.get("text", part.get("image"))
    return part if isinstance(part, str) else {RED: "[r]", BLUE: "[b]"}[tuple(part[0, 0].tolist())]


@pytest.fixture
def make_context(make_context: MakeContext) -> MakeContext:
    from jobs.parquet.prompts.picture_source import picture_reader

    return lambda: replace(make_context(), picture_reader=picture_reader)


@pytest.fixture
def ask(runs: Runs) -> Ask:
    """Scores a table; returns what each row was answered, or its error."""

    def run(table: dict[str, Any] | pa.Table, **arguments: Any) -> list[Any]:
        pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), runs.source)
        rows = runs.score(
            answer=seen, keep=["prompt"], **{"image_column": "image", **arguments}
        ).to_pylist()
        return [row["completion"] or row["error"] for row in rows]

    return run


@pytest.mark.parametrize(
    "image",
    [
        pa.array([RED_FILE, None, BLUE_FILE]),
        pa.array([RED_FILE, None, BLUE_FILE]).cast(pa.large_binary()),
        pa.array(
            [{"bytes": RED_FILE, "path": "x.png"}, None, {"bytes": BLUE_FILE, "path": None}], IMAGE
        ),
        pa.array(
            [
                {"bytes": None, "path": "red.png"},
                {"bytes": None, "path": None},
                {"path": "in/blue.png"},
            ],
            IMAGE,
        ),
        pa.array(["red.png", None, "in/blue.png"]),
        pa.array([data_url(RED_FILE), None, data_url(BLUE_FILE)]),
        pa.array([[RED_FILE], [], [BLUE_FILE]]),
    ],
    ids=["bytes", "large bytes", "structs", "structs of paths", "paths", "data URLs", "lists"],
)
def test_a_picture_stands_before_its_text_and_null_is_none(
    ask: Ask, tmp_path: Path, image: pa.Array
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "red.png").write_bytes(RED_FILE)
    (tmp_path / "in" / "blue.png").write_bytes(BLUE_FILE)
    assert ask({"prompt": ["one", "two", "three"], "image": image}) == ["[r]one", "two", "[b]three"]


def test_a_page_of_pictures_may_be_as_large_as_row_groups_make_it(
    runs: Runs, tmp_path: Path
) -> None:
    """pandas writes up to 1,024 rows into a page; other columns' pages have a smaller limit."""
    files = [os.urandom(1 << 20) for _ in range(60)]
    pd.DataFrame({"prompt": list(map(str, range(60))), "image": files}).to_parquet(runs.source)
    found = runs.score(answer=lambda _: FakeCompletion("seen"), image_column="image")
    assert found["completion"].to_pylist() == ["seen"] * 60
    assert found["image"].to_pylist() == files


def test_what_pandas_writes_is_read(runs: Runs, ask: Ask) -> None:
    frame = pd.DataFrame({"prompt": ["one", "two"], "image": [RED_FILE, None]})
    frame.to_parquet(runs.source)
    assert ask(pq.read_table(runs.source)) == ["[r]one", "two"]


@pytest.mark.parametrize(
    ("template", "more", "expected"),
    [
        ("What is {image}?", {}, "What is [r]?"),
        ("{prompt}: {image}{image}", {}, "one: [r][r]"),
        ("Describe it.", {}, "[r]Describe it."),
        ("{{ prompt }}: {{ image }}", {"template_format": "jinja"}, "one: [r]"),
        ("Describe it.", {"template_format": "jinja"}, "[r]Describe it."),
        ("{other} or {image}: {prompt}", {"image_column": ["image", "other"]}, "[b] or [r]: one"),
        ("{other}: {prompt}", {"image_column": ["image", "other"]}, "[r][b]: one"),
        ("{image}: {prompt}", {"image_column": ["other"]}, "[b]: one"),
        (
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Is {image} {prompt}?"},
            ],
            {},
            "Be brief. / Is [r] one?",
        ),
        (
            [{"role": "user", "content": "Hi"}, {"role": "user", "content": "{prompt}?"}],
            {},
            "Hi / [r]one?",
        ),
    ],
)
def test_a_template_places_pictures_by_their_columns(
    ask: Ask, template: Any, more: Any, expected: str
) -> None:
    table = {"prompt": ["one"], "image": [RED_FILE], "other": [BLUE_FILE]}
    assert ask(table, template=template, **more) == [expected]


def test_a_text_cannot_place_a_picture(ask: Ask) -> None:
    table = {"prompt": ["{image} {{ image }} <image>"], "image": [RED_FILE]}
    assert ask(table, template="{image}: {prompt}") == ["[r]: {image} {{ image }} <image>"]


def test_pictures_stand_first_in_the_last_message_of_the_user(ask: Ask) -> None:
    url = {"type": "image_url", "image_url": {"url": data_url(BLUE_FILE), "detail": "auto"}}
    chats = [
        [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, url, {"type": "text", "text": "z"}],
            }
        ],
        [{"role": "assistant", "content": "nobody asks"}],
    ]
    chats = [json.dumps(each) for each in chats]
    found = ask({"prompt": chats, "image": [RED_FILE] * 3}, messages_column="prompt")
    assert found[:2] == ["[r]one / two", "[r]a[b]z"]
    assert "no message of the user" in found[2]


def test_a_chat_names_files_below_the_roots_alone(runs: Runs, ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED_FILE)
    os.symlink("/etc/passwd", tmp_path / "link.png")
    os.symlink("loop.png", tmp_path / "loop.png")
    (tmp_path / "large.png").write_bytes(bytes(MAX_BYTES + 1))
    urls = ["red.png", str(tmp_path / "red.png"), f"file://{tmp_path}/red.png"]
    urls += [
        "/etc/passwd",
        "link.png",
        "../x.png",
        "none.png",
        "https://host/x.png",
        "data:text/plain;base64,aGk=",
    ]
    urls += ["data:image/png;base64,?", "large.png", "folder", "loop.png"]
    (tmp_path / "folder").mkdir()
    contents = [
        [{"type": "image_url", "image_url": url}, {"type": "text", "text": "?"}] for url in urls
    ]
    chats = [json.dumps([{"role": "user", "content": each}]) for each in contents]
    found = ask({"prompt": chats}, messages_column="prompt", image_column=None)
    assert found[:3] == ["[r]?"] * 3
    words = ["outside the data roots"] * 3 + [
        "there is no picture at",
        "URL of the web",
        "expected data:",
    ]
    words += [
        "is no base64",
        f"more than the limit of {MAX_BYTES}",
        *["there is no picture at"] * 2,
    ]
    for error, expected in zip(found[3:], words, strict=True):
        assert expected in error


@pytest.mark.parametrize(
    "part", [{"image": RED_FILE}, {"type": "text", "text": "5", "image": RED_FILE}]
)
def test_bytes_in_another_part_than_a_picture_cost_their_row(
    ask: Ask, part: dict[str, Any]
) -> None:
    chats = pa.array(
        [[{"role": "user", "content": [each]}] for each in (part, {"type": "text", "text": "?"})]
    )
    found = ask({"prompt": chats}, messages_column="prompt", image_column=None)
    assert [found[1], "a part of message 0 must be" in found[0]] == ["?", True]


def test_a_long_url_takes_no_memory_to_be_refused() -> None:
    tracemalloc.start()
    with pytest.raises(InvalidJob, match="a picture is 'data:image/x;;;"):
        picture_of("data:image/x" + 1_000_000 * ";", "a picture")
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_broken_picture_costs_its_row(ask: Ask) -> None:
    files = [RED_FILE, bomb(), picture(size=(64, 64))[:60], b"", BLUE_FILE, bytes(MAX_BYTES + 1)]
    found = ask({"prompt": ["?"] * 6, "image": files})
    assert [found[0], found[4]] == ["[r]?", "[b]?"]
    assert found[1].startswith("picture 1 has 50000 x 50000 pixels")
    assert found[2].startswith("picture 1 cannot be decoded")
    assert found[3].startswith("picture 1 is no picture of the formats PNG")
    assert found[5] == f"the prompt's pictures have more than {MAX_BYTES} bytes: make them smaller"


def test_equal_pictures_with_equal_texts_are_asked_once_and_others_apart(runs: Runs) -> None:
    images = [RED_FILE, BLUE_FILE, RED_FILE, None]
    asked: list[Request] = []
    pq.write_table(pa.table({"prompt": ["?"] * 4, "image": images}), runs.source)

    def answer(request: Request) -> FakeCompletion:
        asked.append(request)
        return seen(request)

    arguments: dict[str, Any] = {"image_column": "image", "sampling": {"temperature": 0}}
    found = runs.score(answer=answer, **arguments)["completion"].to_pylist()
    assert found == ["[r]?", "[b]?", "[r]?", "?"]
    assert len(asked) == 3
    # Another run takes the answers of equal rows, whatever their column is called.
    images[1] = picture((0, 255, 0))
    pq.write_table(
        pa.table({"prompt": ["?"] * 4, "photo": images}), runs.source.with_name("new.parquet")
    )
    arguments["image_column"] = "photo"
    output = runs.output.with_name("new")
    runs.plan(runs.source.with_name("new.parquet"), output, reuse=[str(runs.output)], **arguments)
    asked.clear()
    runs.work(lambda request: asked.append(request) or FakeCompletion("green"))
    assert pq.read_table(output)["completion"].to_pylist() == ["[r]?", "green", "[r]?", "?"]
    assert len(asked) == 1


def test_pictures_of_rows_that_are_sorted_keep_their_folders(runs: Runs, tmp_path: Path) -> None:
    for name, file in (("one", RED_FILE), ("two", BLUE_FILE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(file)
        pq.write_table(
            pa.table({"prompt": [name], "image": ["x.png"]}), tmp_path / name / "in.parquet"
        )
    inputs = [str(tmp_path / name / "in.parquet") for name in ("one", "two")]
    found = runs.score(inputs, answer=seen, image_column="image")
    assert found["completion"].to_pylist() == ["[r]one", "[b]two"]
    found = runs.score(inputs, seen, tmp_path / "sorted", image_column="image", order="prefix")
    assert all("give the whole path" in each for each in found["error"].to_pylist())


def test_an_answer_to_a_picture_that_was_replaced_since_is_not_taken(
    runs: Runs, tmp_path: Path
) -> None:
    (tmp_path / "x.png").write_bytes(RED_FILE)
    pq.write_table(pa.table({"prompt": ["?"], "image": ["x.png"]}), runs.source)
    runs.score(answer=seen, image_column="image")
    reused, journalled = (runs.output.with_name(name) for name in ("reused", "journalled"))
    runs.plan(output=reused, image_column="image", reuse=[str(runs.output)])
    runs.plan(output=journalled, image_column="image")
    first = runs.answered(runs.jobs[-1])
    assert keep(first, {})
    first.close()
    (tmp_path / "x.png").write_bytes(BLUE_FILE)
    runs.work(seen)
    assert [pq.read_table(each)["completion"].to_pylist() for each in (reused, journalled)] == [
        ["[b]?"]
    ] * 2


def test_labels_are_scored_behind_a_picture(runs: Runs) -> None:
    asked: list[Request] = []
    pq.write_table(pa.table({"prompt": ["?"], "image": [RED_FILE]}), runs.source)

    def answer(request: Request) -> FakeCompletion:
        asked.append(request)
        return refuse("seen")

    runs.score(answer=answer, image_column="image", labels=["yes", "no"], max_errors=1)
    assert [request.kind for request in asked] == ["score"]
    assert seen(asked[0]).text == "[r]?"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"task": "embed"}, "image_column and task 'embed'"),
        ({"prompts": [{"name": "a", "template": "{prompt}"}]}, "image_column and prompts"),
        ({"labels": ["a", "b"], "calibrate": True}, "image_column and calibrate"),
        ({"image_column": 7}, "image_column is 7, expected a column"),
    ],
)
def test_what_pictures_do_not_go_with_is_named(
    runs: Runs, arguments: dict[str, Any], says: str
) -> None:
    runs.write(["a"], image=pa.array([RED_FILE]))
    with pytest.raises(InvalidJob, match=says):
        runs.plan(**{"image_column": "image", **arguments})


@pytest.mark.parametrize(
    "image", [7, {"bytes": 7, "path": "red.png"}, {"bytes": [1], "path": ""}, {"url": "red.png"}]
)
def test_a_column_that_holds_no_pictures_is_refused(runs: Runs, image: Any) -> None:
    runs.write(["a"], image=pa.array([image]))
    with pytest.raises(
        WrongColumnType, match=r"column 'image' is of type .*, expected bytes, paths"
    ):
        runs.plan(image_column="image")


def test_a_template_over_bytes_names_the_way_to_pictures(runs: Runs) -> None:
    runs.write(["a"], image=pa.array([RED_FILE]))
    with pytest.raises(WrongColumnType, match="pictures by image_column"):
        runs.plan(template="What does {image} show?")


def test_lines_of_a_batch_file_hold_pictures_and_their_paths(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED_FILE)
    source = tmp_path / "in.jsonl"
    urls: list[Any] = [
        {"url": data_url(BLUE_FILE)},
        {"url": "red.png"},
        "red.png",
        "none.png",
        "https://host/x.png",
    ]
    with source.open("w") as file:
        for number, url in enumerate(urls):
            content = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": url}]
            body = {"messages": [{"role": "user", "content": content}]}
            line = {
                "custom_id": f"{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            file.write(json.dumps(line) + "\n")
    runs.plan(source, input_format="openai-batch")
    runs.work(seen)
    lines = [
        json.loads(line)
        for path in sorted(runs.output.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    texts = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        if line["response"]
        else line["error"]["message"]
        for line in lines
    }
    assert [texts[name] for name in "012"] == ["see [b]", "see [r]", "see [r]"]
    assert "there is no picture at" in texts["3"]
    assert "URL of the web" in texts["4"]


PATH_LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "PATH"}}]}
        ]
    },
}


@pytest.mark.parametrize("escaped", ["image_url", "image\\u005furl", "\\u0069mage_url"])
@pytest.mark.parametrize("path", ["red.png", "/etc/passwd", "file:///etc/passwd", "s3://b/a.png"])
def test_a_line_that_may_name_no_file_fails_alone(
    runs: Runs, tmp_path: Path, path: str, escaped: str
) -> None:
    (tmp_path / "red.png").write_bytes(RED_FILE)
    source = tmp_path / "in.jsonl"
    with_path = json.dumps(PATH_LINE).replace("image_url", escaped).replace("PATH", path)
    inline = json.dumps(PATH_LINE).replace("PATH", data_url(BLUE_FILE)).replace('"a"', '"b"')
    source.write_text(f"{with_path}\n{inline}\n")
    runs.plan(source, input_format="openai-batch", inline_pictures=True)
    runs.work(seen)
    errors = (runs.output / "errors.jsonl").read_text()
    assert json.loads(errors)["custom_id"] == "a"
    assert "a picture is no data: URL" in errors
    assert json.loads((runs.output / "output.jsonl").read_text())["custom_id"] == "b"


def test_labels_of_a_chat_see_its_picture_which_has_no_prior(
    make_context: MakeContext, tmp_path: Path
) -> None:
    (tmp_path / "blue.png").write_bytes(BLUE_FILE)
    content = [{"type": "image_url", "image_url": {"url": str(tmp_path / "blue.png")}}]
    asked = {"messages": [{"role": "user", "content": content}], "labels": ["yes", "no"]}
    task = opened_task(make_context(), "jobs.classify", (), asked)
    (request,) = task.requests()
    assert (request.kind, seen(request).text) == ("score", "[b]")
    with pytest.raises(InvalidJob, match="calibrate and pictures do not go together"):
        opened_task(make_context(), "jobs.classify", (), {**asked, "calibrate": True})


def test_planning_refuses_pictures_where_the_model_reads_none(runs: Runs) -> None:
    runs.write(["a"])
    planners = runs.context
    runs.context = lambda: replace(
        planners(), model=replace(planners().model, reads_pictures=False)
    )
    with pytest.raises(InvalidJob, match="'m', which reads no pictures"):
        runs.plan(image_column="prompt", template="{image}: what is it?")
