"""Each endpoint, asked of a real model as clients ask it."""

import math
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.tokenmill.server.conftest import RealModel

QUESTION: list[Any] = [{"role": "user", "content": "the 3rd of March, '87"}]


class Date(BaseModel):
    """A form that answers are made to have."""

    year: Literal[1987, 2004]  # a small model ends no number by itself


def post(model: RealModel, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: Any = model.api.post(path, cast_to=object, body=body)
    return dict(answer)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_texts_are_embedded(model: RealModel, encoding: Any) -> None:
    answer = model.api.embeddings.create(
        model="model", input=["3 March 1987", "4 March 1987"], encoding_format=encoding
    )
    assert [each.index for each in answer.data] == [0, 1]
    whole = model.api.embeddings.create(model="model", input="4 March 1987").data[0].embedding
    assert math.isclose(sum(x * x for x in whole), 1, rel_tol=1e-5)
    if encoding == "float":
        assert answer.data[1].embedding == pytest.approx(whole, abs=1e-6)
    assert answer.usage.total_tokens > 0


def test_documents_are_ranked(model: RealModel) -> None:
    documents = ["a date", {"text": "no date"}, "another"]
    answer = post(model, "/rerank", {"query": "date", "documents": documents, "top_n": 2})
    scores = [each["relevance_score"] for each in answer["results"]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    assert answer["results"][0]["document"]["text"] in ("a date", "no date", "another")


def test_a_prompt_gets_the_probability_of_each_label(model: RealModel) -> None:
    answer = post(model, "/classify", {"prompt": "3 March 1987 ->", "labels": ["1987", "2004"]})
    assert answer["label"] == "1987"
    assert sum(answer["probabilities"].values()) == pytest.approx(1)


def test_openais_helpers_parse_a_model_of_pydantic(model: RealModel) -> None:
    chat = model.api.chat.completions.parse(
        model="model", messages=QUESTION, response_format=Date, temperature=0, max_tokens=40
    )
    assert chat.choices[0].message.parsed == Date(year=1987)
    response = model.api.responses.parse(
        model="model",
        input="the 3rd of March, '87",
        text_format=Date,
        temperature=0,
        max_output_tokens=40,
    )
    assert response.output_parsed == Date(year=1987)


def test_effort_needs_a_template_that_reads_it(model: RealModel) -> None:
    says = "reads no variable 'reasoning_effort'"
    with pytest.raises(openai.BadRequestError, match=says):
        model.api.chat.completions.create(
            model="model", messages=QUESTION, reasoning_effort="low", max_tokens=4
        )
    with pytest.raises(openai.BadRequestError, match=says):
        model.api.responses.create(model="model", input="hi", reasoning={"effort": "low"})


def test_openais_helpers_put_streams_together(model: RealModel) -> None:
    with model.api.chat.completions.stream(model="model", messages=QUESTION, temperature=0) as chat:
        for _ in chat:
            pass
        assert chat.get_final_completion().choices[0].message.content == "1987-03-03"
    with model.api.responses.stream(
        model="model", input="the 3rd of March, '87", temperature=0
    ) as response:
        for _ in response:
            pass
        assert response.get_final_response().output_text == "1987-03-03"


def test_log_probabilities_have_openais_type(model: RealModel) -> None:
    chat = model.api.chat.completions.create(
        model="model", messages=QUESTION, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    assert "".join(each.token for each in logprobs.content).startswith("1987-03-03")
    assert len(logprobs.content[0].top_logprobs) == 2


def test_a_forced_call_that_the_models_template_cannot_write_is_a_bad_request(
    model: RealModel,
) -> None:
    parameters = {"type": "object", "properties": {}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError, match="tool"):
        model.api.chat.completions.create(
            model="model", messages=QUESTION, tools=[tool], tool_choice="required"
        )
