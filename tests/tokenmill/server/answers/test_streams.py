"""A stream is the answer, piece by piece, also through the death of the worker that makes it."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Event
from typing import Any

import openai
import pytest

from tests.rq_workers import wait_until
from tests.tokenmill.server.conftest import RealModel, Served
from tokenmill.server.answers.bodies import Call
from tokenmill.server.answers.event_streams import EventStream
from tokenmill.server.answers.jobs_asked import TextPiece

LONG = {"max_tokens": 300, "temperature": 1.2, "extra_body": {"ignore_eos": True, "min_p": 0.01}}


def texts_of(chunks: Any) -> tuple[dict[int, str], int]:
    """Return the text of each choice, and how many chunks brought some."""
    texts: dict[int, str] = {}
    num_pieces = 0
    for chunk in chunks:
        for choice in chunk.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
            num_pieces += bool(piece)
    return texts, num_pieces


def test_a_streamed_completion_is_the_whole_one(model: RealModel) -> None:
    options = {"model": "model", "prompt": "1 May 2004 ->", "seed": 3, "n": 2, **LONG}
    whole = model.api.completions.create(**options)
    texts, num_pieces = texts_of(model.api.completions.create(stream=True, **options))
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert num_pieces > 4


def test_a_streamed_chat_has_openais_chunks(model: RealModel) -> None:
    options: dict[str, Any] = {
        "model": "model",
        "messages": [{"role": "user", "content": "the 3rd of March, '87"}],
        "temperature": 0,
    }
    whole = model.api.chat.completions.create(**options)
    chunks = list(
        model.api.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **options
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert texts_of(chunks)[0] == {0: whole.choices[0].message.content}
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_stream_goes_on_through_the_deaths_of_its_workers(model: RealModel) -> None:
    options = {"model": "model", "prompt": "2 May 2004 ->", "seed": 8, **LONG}
    whole = model.api.completions.create(**options)
    text = ""
    num_pieces = 0
    for chunk in model.api.completions.create(stream=True, **options):
        text += chunk.choices[0].text
        num_pieces += 1
        if num_pieces in (3, 6):
            model.workers.processes[-1].kill()
            model.start()
    assert num_pieces > 6
    assert text == whole.choices[0].text


NUM_STREAMS = 200
NUM_KILLS = 20


@pytest.mark.long  # each kill costs the start of a worker
@pytest.mark.timeout(1800)
def test_many_streams_go_on_through_kills(model: RealModel) -> None:
    """At least 200 streams, and as many more as it takes to kill a worker 20 times."""

    def options(number: int) -> dict[str, Any]:
        prompt = f"{number % 28 + 1} May {1900 + number} ->"
        return {**LONG, "model": "model", "prompt": prompt, "seed": number}

    def whole(number: int) -> str:
        return model.api.completions.create(**options(number)).choices[0].text

    def stream(number: int) -> str:
        chunks = model.api.completions.create(stream=True, **options(number))
        return "".join(chunk.choices[0].text for chunk in chunks)

    numbers = count()
    has_killed = Event()

    def streams() -> list[tuple[int, str]]:
        texts = []
        for number in numbers:
            if number >= NUM_STREAMS and has_killed.is_set():
                break
            texts.append((number % NUM_STREAMS, stream(number % NUM_STREAMS)))
        return texts

    with ThreadPoolExecutor(16) as pool:
        expected = list(pool.map(whole, range(NUM_STREAMS)))
        model.start()  # of three workers one is killed each time
        model.start()
        wait_until(lambda: len(model.served()) >= 3)
        clients = [pool.submit(streams) for _ in range(16)]
        for _ in range(NUM_KILLS):
            alive = [process for process in model.workers.processes if process.poll() is None]
            serving = model.served()
            alive[0].kill()
            model.start()
            wait_until(lambda before=serving: model.served() - before)
        has_killed.set()
        texts = [pair for each in clients for pair in each.result()]
    assert len(texts) >= NUM_STREAMS
    assert [text for _, text in texts] == [expected[number] for number, _ in texts]


@pytest.mark.parametrize("prompt", ["hello", ["a", "b"]])
def test_an_answer_of_any_kind_can_be_streamed(served: Served, prompt: Any) -> None:
    whole = served.client.completions.create(model="fake", prompt=prompt, max_tokens=3)
    texts, _ = texts_of(
        served.client.completions.create(model="fake", prompt=prompt, max_tokens=3, stream=True)
    )
    assert texts == {choice.index: choice.text for choice in whole.choices}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/completions", {"prompt": "x", "stream": "yes"}, "stream is neither"),
        ("/completions", {"prompt": "x", "stream_options": {}}, "needs stream=true"),
        (
            "/completions",
            {"prompt": "x", "stream": True, "stream_options": {"a": 1}},
            "include_usage",
        ),
        ("/embeddings", {"input": "x", "stream": True}, "does not stream"),
        ("/completions", {"prompt": "refuse", "stream": True}, "refused"),
    ],
)
def test_a_stream_that_cannot_be_is_a_bad_request(
    served: Served, path: str, body: dict[str, Any], said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        served.client.post(path, cast_to=object, body=body)


def collected(parts: list[TextPiece | bytes]) -> str:
    """Return what a client reads from these parts."""

    async def read() -> str:
        async def answer() -> Any:
            for part in parts:
                yield part

        text = ""
        stream = EventStream("id", Call("jobs.complete", {}, None), "model")
        async for event in stream.events(answer()):
            data = event.decode().removeprefix("data: ").strip()
            if data != "[DONE]":
                content = json.loads(data)
                assert "error" not in content, content
                text += content["choices"][0]["text"]
        return text

    return asyncio.run(read())


def test_pieces_may_come_again_overlap_and_be_missing() -> None:
    text = "a text of some length"
    whole = json.dumps(
        {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}], "usage": {}}
    ).encode()
    for first, again, gap in ((3, 0, 0), (5, 2, 0), (5, 5, 4), (0, 0, 9)):
        pieces: list[TextPiece | bytes] = [
            TextPiece(0, "text", 0, text[:first]),
            TextPiece(0, "text", again, text[again : first + 4]),
            TextPiece(0, "text", first + 4 + gap, text[first + 4 + gap : first + 6 + gap]),
        ]
        assert collected([*pieces, whole]) == text


def test_a_text_that_changes_ends_in_an_error() -> None:
    whole = json.dumps({"choices": [{"index": 0, "text": "other"}], "usage": {}}).encode()
    with pytest.raises(AssertionError, match="differs"):
        collected([TextPiece(0, "text", 0, "some"), whole])
