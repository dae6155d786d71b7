"""OpenAI's client calls the server as it calls OpenAI."""

import json
import shutil
import threading
import urllib.request
from http.client import HTTPConnection

import openai
import pytest

from jobs.runs.job_cancel import cancel_job
from tests.rq_workers import wait_until
from tests.tokenmill.server.conftest import Served


def test_a_completion_has_openais_type(served: Served) -> None:
    answer = served.client.completions.create(model="fake", prompt="hello", max_tokens=3)
    assert answer.choices[0].text == "echo:hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert answer.model == "fake"


def test_a_chat_has_openais_type(served: Served) -> None:
    answer = served.client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hello"}], max_tokens=2, n=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.role == "assistant"
    assert (answer.choices[0].message.content or "").startswith("echo:")
    assert answer.object == "chat.completion"


def test_the_models_are_those_of_living_workers(served: Served) -> None:
    models = served.client.models.list().data
    assert [model.id for model in models] == ["fake"]
    assert served.client.models.retrieve("fake").owned_by == "tokenmill"
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("gpt-4o")


def test_an_adapter_is_a_model_as_soon_as_its_folder_is_there(served: Served) -> None:
    folder = served.folder.parent / "adapters" / "sql"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
    header = b"{}"  # the fake engine reads no tensors
    weights = len(header).to_bytes(8, "little") + header
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    wait_until(lambda: [model.id for model in served.client.models.list().data] == ["fake", "sql"])
    listed = served.client.models.list().data[1]
    assert listed == served.client.models.retrieve("sql")
    assert listed.model_extra is not None
    assert listed.model_extra["parent"] == "fake"
    answer = served.client.completions.create(model="sql", prompt="hello", max_tokens=3)
    assert (answer.choices[0].text, answer.model) == ("echo:hello", "sql")
    fingerprint = served.client.completions.create(model="fake", prompt="x").system_fingerprint
    assert (answer.system_fingerprint or "").startswith(f"{fingerprint}/")
    with pytest.raises(openai.BadRequestError, match=r"'sql' is an adapter, .* name 'fake'"):
        served.client.post("/classify", cast_to=object, body={"model": "sql", "input": "hello"})
    with pytest.raises(
        openai.NotFoundError, match="'sqll' is not served; the served models are fake, sql: name"
    ):
        served.client.completions.create(model="sqll", prompt="hello")
    shutil.rmtree(folder)
    wait_until(lambda: [model.id for model in served.client.models.list().data] == ["fake"])


def test_another_model_is_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        served.client.completions.create(model="gpt-4o", prompt="x")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}, "temperature"),
        ({}, "messages is missing"),
        ({"messages": [{"role": "user", "content": "x"}], "no_such_option": 1}, "no_such_option"),
        (
            {"messages": [{"role": "user", "content": "x"}], "structured_outputs": ["a"]},
            "structured",
        ),
        (
            {"messages_template": "{{ x }}", "messages": [{"role": "user", "content": "x"}]},
            "template",
        ),
    ],
)
def test_a_wrong_argument_is_a_bad_request_and_no_job(
    served: Served, body: dict[str, object], said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        served.client.post("/chat/completions", cast_to=object, body=body)


@pytest.mark.parametrize("url", ["/etc/passwd", "file:///etc/passwd", "https://example.com/a.png"])
def test_no_client_can_have_a_worker_read_a_file(served: Served, url: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "user", "content": content}]
    with pytest.raises(openai.BadRequestError, match="no data: URL"):
        served.client.post("/chat/completions", cast_to=object, body={"messages": messages})
    with pytest.raises(openai.BadRequestError, match="no data: URL"):
        served.client.post("/completions", cast_to=object, body={"prompt": content})


def test_a_prompt_that_the_engine_refuses_is_a_bad_request(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="refused"):
        served.client.completions.create(model="fake", prompt="refuse")


def test_each_answer_names_its_request(served: Served) -> None:
    answer = served.client.completions.with_raw_response.create(model="fake", prompt="x")
    request_id = answer.headers["x-request-id"]
    assert request_id.startswith("req_")
    assert answer.parse().id == f"cmpl-{request_id}"
    assert request_id in served.log.read_text()


def test_no_prompt_is_in_the_log(served: Served) -> None:
    served.client.completions.create(model="fake", prompt="a secret prompt")
    with pytest.raises(openai.BadRequestError):
        served.client.completions.create(model="fake", prompt="a secret prompt", n=-1)
    assert "a secret prompt" not in served.log.read_text()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_job(served: Served, stream: bool) -> None:
    body = {"prompt": "hang", "stream": stream}
    host, _, port = served.address.removeprefix("http://").partition(":")
    connection = HTTPConnection(host, int(port))
    connection.request("POST", "/v1/completions", json.dumps(body))
    wait_until(lambda: served.redis.zcard("rq:wip:prompts"))
    connection.close()
    wait_until(lambda: not served.redis.exists("rq:wip:prompts"))
    assert served.client.completions.create(model="fake", prompt="y").choices[0].text == "echo:y"


def test_a_cancelled_job_answers_its_client(served: Served) -> None:
    caught: list[openai.APIStatusError] = []

    def ask() -> None:
        try:
            served.client.completions.create(model="fake", prompt="hang")
        except openai.APIStatusError as error:
            caught.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: served.redis.zcard("rq:wip:prompts"))
    (entry,) = served.redis.zrange("rq:wip:prompts", 0, -1)
    cancel_job(served.redis, entry.decode().partition(":")[0])
    asking.join(timeout=30)
    assert caught[0].status_code >= 500


@pytest.mark.parametrize(
    ("key", "is_stream"),
    [("rq:results", False), ("tokenmill:text", False), ("tokenmill:text", True)],
)
def test_a_key_that_somebody_has_overwritten_costs_its_own_call_alone(
    served: Served, key: str, is_stream: bool
) -> None:
    caught: list[openai.APIStatusError] = []

    def ask() -> None:
        try:
            list(served.client.completions.create(model="fake", prompt="hang", stream=True))
        except openai.APIStatusError as error:
            caught.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: served.redis.zcard("rq:wip:prompts"))
    (entry,) = served.redis.zrange("rq:wip:prompts", 0, -1)
    job_id = entry.decode().partition(":")[0]
    if is_stream:
        served.redis.xadd(f"{key}:{job_id}", {"no": "piece"})
    else:
        served.redis.set(f"{key}:{job_id}", "no stream")
    answer = served.client.completions.create(model="fake", prompt="y")
    assert answer.choices[0].text == "echo:y"
    asking.join(timeout=30)
    assert caught[0].status_code == 500
    wait_until(lambda: not served.redis.exists("rq:wip:prompts"))
    served.redis.delete(f"{key}:{job_id}")


@pytest.mark.parametrize(
    ("data", "status"), [(b"{", 400), (b"[]", 400), (b"[" * 100_000, 400), (b"\xff", 400)]
)
def test_a_body_that_is_no_object_is_a_bad_request(
    served: Served, data: bytes, status: int
) -> None:
    request = urllib.request.Request(f"{served.address}/v1/completions", data)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    with caught.value as error:
        assert error.code == status
        assert json.load(error)["error"]["type"] == "invalid_request_error"


def test_a_call_that_is_no_post_says_so(served: Served) -> None:
    with pytest.raises(openai.APIStatusError, match="takes POST, and this is GET") as refused:
        served.client.get("/chat/completions", cast_to=object)
    assert refused.value.status_code == 405
    assert refused.value.response.headers["allow"] == "POST"


def test_another_path_says_what_is_served(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        served.client.post("/audio/speech", cast_to=object, body={})


def test_probes_need_no_key(served: Served) -> None:
    for path in ("/livez", "/readyz"):
        with urllib.request.urlopen(served.address + path, timeout=30) as response:
            assert response.read() == b"ok\n"
