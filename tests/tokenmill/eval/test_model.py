"""The engine as a model of lm-evaluation-harness: every answer is that of the harness's `hf` class."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from engine import ConfigError, InvalidRequest, InvalidSampling
from tests.engine.checkpoints import SHAPES, make_checkpoint

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: the extra [eval]")
pytest.importorskip(
    "accelerate", reason="accelerate is not installed, which the harness's hf class needs"
)

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from tokenmill.eval.model import TokenmillLM

BOS = "<|endoftext|>"
LONG = "Der März ist ein Monat. Le café est fermé à midi, naïvement. " * 3
PAIRS = [
    ("The quick brown", " fox jumps"), ("The quick brown", " fox"), ("The quick brown ", "fox"),
    ("", "Monat"), ("3rd of  ", " March, '87"), (LONG, " Ñandú"), ("The quick brown", " " + LONG[:40]),
    (BOS + "The", " lazy dog"), ("", BOS + "Numbers"), ("日本", "語😀"),
]  # fmt: skip
CONTEXTS = ["The quick brown", "", LONG, BOS + "Numbers: 0 1", "gives 1987"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module", params=["adds none", "adds the first token"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, by what its tokenizer puts before each text."""
    from transformers import PreTrainedTokenizerFast

    folder = make_checkpoint(tmp_path_factory.mktemp("harness") / "model", SHAPES[0])
    if request.param != "adds none":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), bos_token=BOS)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=[BOS, "$A"], special_tokens=[(BOS, tokenizer.bos_token_id)]
        )
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(folder: Path) -> Iterator[Any]:
    """The two classes, made with the same arguments."""
    made = []

    def both(**arguments: Any) -> tuple[TokenmillLM, HFLM]:
        own = TokenmillLM(
            str(folder), dtype="float32", kv_cache_bytes=1 << 22, device="cpu", **arguments
        )
        made.append(own)
        return own, HFLM(str(folder), dtype="float32", device="cpu", **arguments)

    yield both
    for model in made:
        model.close()


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"max_length": 24}],
    ids=str,
)
def test_log_likelihoods_are_those_of_the_hf_class(models: Any, arguments: dict[str, Any]) -> None:
    own, hf = models(**arguments)
    requests = asked("loglikelihood", *PAIRS)
    for found, right in zip(own.loglikelihood(requests), hf.loglikelihood(requests), strict=True):
        assert found[0] == pytest.approx(right[0], abs=1e-4)
        assert found[1] is right[1]
    texts = asked("loglikelihood_rolling", (LONG,), ("",), ("fox",), (LONG[:60],))
    found = own.loglikelihood_rolling(texts)
    assert found == pytest.approx(hf.loglikelihood_rolling(texts), abs=1e-3)


@pytest.mark.parametrize(
    "values",
    [
        {"until": ["o"], "max_gen_toks": 9}, {"until": ["e "], "max_gen_toks": 5, "do_sample": False},
        {"max_gen_toks": 12, "repetition_penalty": 1.5, "temperature": 0.0},
        {"until": ["", "ab", "b"], "max_new_tokens": 8},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("arguments", [{"max_length": 24}, {"add_bos_token": True}], ids=str)
def test_answers_are_those_of_the_hf_class(
    models: Any, arguments: dict[str, Any], values: dict[str, Any]
) -> None:
    own, hf = models(**arguments)
    contexts = (
        CONTEXTS if own.tokenizer.bos_token_id is not None else [text for text in CONTEXTS if text]
    )
    hf_values = {**values, "until": [text for text in values.get("until", []) if text]}
    found = own.generate_until(asked("generate_until", *((text, values) for text in contexts)))
    right = hf.generate_until(asked("generate_until", *((text, hf_values) for text in contexts)))
    assert found == right
    assert any(found)


def test_what_cannot_be_asked_is_refused(models: Any, folder: Path) -> None:
    own, _ = models(max_length=24)
    with pytest.raises(InvalidRequest, match="has 0 tokens of its own"):
        own.loglikelihood(asked("loglikelihood", ("The", "")))
    with pytest.raises(InvalidRequest, match="from 1 to 24"):
        own.loglikelihood(asked("loglikelihood", ("The", LONG)))
    with pytest.raises(InvalidRequest, match="max_gen_toks=24"):
        own.generate_until(asked("generate_until", ("The", {"max_gen_toks": 24})))
    with pytest.raises(InvalidSampling, match="num_beams"):
        own.generate_until(asked("generate_until", ("The", {"num_beams": 2, "max_gen_toks": 2})))
    with pytest.raises(ConfigError, match="think_end_token"):
        TokenmillLM(str(folder), enable_thinking=True)
