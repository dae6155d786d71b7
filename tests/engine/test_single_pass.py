"""Encoders and heads that classify: texts of one step, of any lengths, are as transformers has each alone."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine import (
    ClassParams,
    ConfigError,
    Engine,
    EngineConfig,
    MissingWeights,
    PoolingParams,
    PromptTooLong,
    SamplingParams,
    UnsupportedModel,
    UnsupportedTask,
    WeightMismatch,
    check_up,
    model_identity,
)
from engine.models import linear_plan, single_pass
from engine.models.single_pass import Sight, SinglePass, load_single_pass
from engine.run.describe import describe_model
from engine.run.forward.single_pass_runner import SinglePassRunner
from tests.engine.accounting import check_accounting
from tests.engine.embedding_models import write_modules
from tests.engine.encoders import MAX_LENGTH, VOCAB_SIZE, Alone, words, write_encoder

TEXTS = [words(length, seed) for seed, length in enumerate((1, 3, 90, 10, 40, 7, 25, 60, 2, 120))]
PAIRS = [
    (words(3), words(30)),
    (words(70), words(80)),
    (words(100), words(2)),
    (words(5), words(200)),
]

#: By model type, whether the texts of a step are one row, or padded.
MODELS = {
    **dict.fromkeys(
        ("bert", "roberta", "modernbert", "distilbert", "albert", "electra", "xlm-roberta"), True
    ),
    **dict.fromkeys(("nomic_bert", "jina_embeddings_v3", "gte", "eurobert", "camembert"), True),
    **dict.fromkeys(("mpnet", "deberta-v2"), False),
}
DECODERS = ("qwen3", "llama", "gemma3_text", "gpt2")


def config(folder: Path, **options: Any) -> EngineConfig:
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 300}
    return EngineConfig(str(folder), **{"dtype": "float32", "device": "cpu", **small, **options})


def scores(expected: torch.Tensor) -> Any:
    return pytest.approx(
        {f"class {number}": each for number, each in enumerate(expected.tolist())}, abs=1e-5
    )


def model_of(engine: Engine) -> SinglePass:
    runner = engine._open_runner()
    assert isinstance(runner, SinglePassRunner)
    return runner.model


@pytest.mark.parametrize("model_type", MODELS)
def test_embeddings_of_an_encoder_are_as_each_text_alone_has_them(
    tmp_path: Path, model_type: str
) -> None:
    folder = write_encoder(tmp_path, model_type)
    alone = Alone(folder)
    with Engine(config(folder)) as engine:
        assert model_of(engine).is_packed == MODELS[model_type]
        found = engine.embed(TEXTS)
        check_accounting(engine._scheduler)
        assert engine.stats().max_running > 1
    for text, completion in zip(TEXTS, found, strict=True):
        assert completion.embedding == pytest.approx(alone(text).tolist(), abs=1e-5)


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("model_type", ["bert", "modernbert", "gte"])
def test_texts_of_many_parts_are_as_each_alone_with_a_kernel_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, has_kernel: bool
) -> None:
    """A text longer than any before it shows what a longer one sees."""
    monkeypatch.setattr(single_pass, "MAX_BYTES", 40_000)
    if not has_kernel:
        monkeypatch.setattr(single_pass, "_has_kernel", lambda call: False)
    folder = write_encoder(tmp_path, model_type, max_position_embeddings=600)
    with Engine(config(folder)) as engine:
        texts = [torch.arange(4, 4 + length) % VOCAB_SIZE for length in (40, 70, 3, 500, 5, 20, 90)]
        found = model_of(engine)(texts)
        expected = torch.cat([model_of(engine).alone(text) for text in texts])
    assert torch.allclose(found, expected, atol=5e-5)


def test_activations_and_sums_are_computed_with_the_products_before_them(tmp_path: Path) -> None:
    """In each of three layers the sums behind two products, and an activation."""
    text = torch.arange(4, 90)
    with Engine(config(write_encoder(tmp_path, "bert", hidden_act="gelu_new"))) as engine:
        model = model_of(engine)
        assert len(model._fused) == 3 * (2 + 2)
        assert {module.activation for module, name in model._fused if name == "activation"} == {
            ("gelu", "tanh")
        }
        fused = model([text])
        model.pad()
        assert torch.allclose(fused, model.alone(text), atol=1e-5)


def test_a_model_that_computes_otherwise_with_its_products_is_computed_by_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_for_another(*given: Any) -> list[tuple[torch.nn.Module, str]]:
        changed = linear_plan.fuse_linears(*given)
        for module, name in changed:
            if name == "activation":
                module.__dict__[name] = "relu", ""
        return changed

    text, folder = torch.arange(4, 90), write_encoder(tmp_path, "bert")
    with Engine(config(folder)) as engine:
        expected = model_of(engine)([text])
    monkeypatch.setattr(single_pass, "fuse_linears", take_for_another)
    with Engine(config(folder)) as engine:
        assert not model_of(engine).is_packed
        assert torch.allclose(model_of(engine)([text]), expected, atol=1e-5)


def test_products_have_few_numbers_of_rows(tmp_path: Path) -> None:
    """Code for each is made and kept."""
    seen = set()
    with Engine(config(write_encoder(tmp_path, "bert", max_position_embeddings=600))) as engine:
        model = model_of(engine)
        model.model.embeddings.register_forward_hook(
            lambda module, args, output: seen.add(output.shape[1])
        )
        for length in range(1, 600, 7):
            assert len(model([torch.arange(length) % VOCAB_SIZE])) == length
    assert seen <= {*range(8, 520, 8), 576, 640}


def test_heads_of_an_odd_size_in_bfloat16_are_attended_to_by_torch(tmp_path: Path) -> None:
    """The kernel takes pairs."""
    folder = write_encoder(tmp_path, "bert", hidden_size=20)
    model = load_single_pass("BertModel", folder, torch.device("cpu"), torch.bfloat16)
    text = torch.arange(4, 30)
    assert model.is_packed
    assert torch.allclose(model([text]), model.alone(text), atol=0.1)


def test_what_a_long_text_sees_is_asked_for_in_pieces() -> None:
    pairs: list[int] = []

    def rule(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        pairs.append((query - key).numel())
        return (query - key).abs() <= 7

    sight = Sight.of(rule, 1024, torch.device("cpu"))
    assert max(pairs) <= 1024 * 256
    assert sight.reach == (7, 7)
    assert sight.mask is not None
    assert int(sight.mask.sum()) == 1024 * 15 - 7 * 8
    assert Sight.of(lambda batch, head, query, key: key < 5, 512, torch.device("cpu")).reach is None


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("model_type", [*MODELS, *DECODERS])
def test_classes_are_as_each_text_alone_has_them(
    tmp_path: Path, model_type: str, num_labels: int
) -> None:
    folder = write_encoder(tmp_path, model_type, num_labels)
    alone = Alone(folder)
    with Engine(config(folder)) as engine:
        found = engine.generate(TEXTS, ClassParams())
    for text, completion in zip(TEXTS, found, strict=True):
        expected = alone(text) if num_labels == 1 else alone(text).softmax(0)
        assert completion.class_scores == scores(expected)
    assert len({str(each.class_scores) for each in found}) == len(TEXTS)


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "modernbert", "deberta-v2"])
def test_two_texts_are_cut_and_told_apart_as_a_cross_encoder_does_it(
    tmp_path: Path, model_type: str
) -> None:
    folder = write_encoder(tmp_path, model_type, 1)
    alone = Alone(folder)
    with Engine(config(folder)) as engine:
        found = engine.generate(
            [query for query, _ in PAIRS], [ClassParams(pair=text) for _, text in PAIRS]
        )
    assert [each.num_prompt_tokens for each in found] == [36, MAX_LENGTH, 105, MAX_LENGTH]
    for pair, completion in zip(PAIRS, found, strict=True):
        assert completion.class_scores == scores(alone(*pair).sigmoid())


def test_classes_that_do_not_exclude_each_other_have_a_sigmoid_each(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert", 3, problem_type="multi_label_classification")
    with Engine(config(folder)) as engine:
        (found,) = engine.generate(TEXTS[:1], ClassParams())
    assert found.class_scores == scores(Alone(folder)(TEXTS[0]).sigmoid())
    assert model_identity(config(folder)).classes == ("class 0", "class 1", "class 2")


def test_a_text_is_cut_only_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert", 2)
    long = words(200)
    with Engine(config(folder)) as engine:
        refused, cut, short = engine.generate(
            [long] * 3,
            [
                ClassParams(),
                ClassParams(truncate_prompt_tokens=-1),
                ClassParams(truncate_prompt_tokens=20),
            ],
        )
        with pytest.raises(PromptTooLong):
            engine.add("long", long, ClassParams())
    assert refused.finish_reason == "error"
    assert (cut.num_prompt_tokens, short.num_prompt_tokens) == (MAX_LENGTH, 20)
    assert cut.class_scores == scores(Alone(folder)(long).softmax(0))


@pytest.mark.parametrize("most", [2, 3, 20, -1])
def test_a_text_that_is_embedded_loses_its_end_and_keeps_what_stands_around_it(
    tmp_path: Path, most: int
) -> None:
    """[CLS], [SEP] and the checkpoint's own prompt stay, as transformers cuts; a chat loses its beginning instead."""
    folder = write_encoder(tmp_path, "bert")
    prompt = "w1 w2 "
    names = folder / "config_sentence_transformers.json"
    names.write_text(json.dumps({"prompts": {"query": prompt}, "default_prompt_name": "query"}))
    long = words(200)
    with Engine(config(folder)) as engine:
        longest = engine.max_model_len
        (of_text,) = engine.embed([long], PoolingParams(truncate_prompt_tokens=most))
        (of_ids,) = engine.embed([list(range(5, 205))], PoolingParams(truncate_prompt_tokens=most))
    num_tokens = longest if most == -1 else most
    num_of_text = min(num_tokens, MAX_LENGTH)
    assert (of_text.num_prompt_tokens, of_ids.num_prompt_tokens) == (num_of_text, num_tokens)
    alone = Alone(folder)
    assert of_text.embedding == pytest.approx(
        alone(prompt + long, most=num_of_text).tolist(), abs=1e-5
    )
    expected_ids = torch.tensor([list(range(5, 205))[:num_tokens]])
    assert of_ids.embedding == pytest.approx(alone.of_ids(expected_ids).tolist(), abs=1e-5)


def test_token_ids_that_are_classified_lose_their_end(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert", 2)
    token_ids = list(range(5, 60))
    with Engine(config(folder)) as engine:
        cut, first = engine.generate(
            [token_ids, token_ids[:20]], [ClassParams(truncate_prompt_tokens=20), ClassParams()]
        )
    assert cut.class_scores == first.class_scores


@pytest.mark.parametrize("activation", ["Tanh", "Identity"])
def test_layers_behind_the_pooling_are_computed(tmp_path: Path, activation: str) -> None:
    folder = write_encoder(tmp_path, "bert")
    write_modules(folder, {"pooling_mode": "mean"}, "Dense", "Normalize", size=48)
    weight, bias = torch.randn(16, 48), torch.randn(16)
    dense = folder / "2_Dense"
    dense.mkdir()
    name = f"torch.nn.modules.activation.{activation}"
    (dense / "config.json").write_text(
        json.dumps(
            {"in_features": 48, "out_features": 16, "bias": True, "activation_function": name}
        )
    )
    save_file({"linear.weight": weight, "linear.bias": bias}, dense / "model.safetensors")
    assert model_identity(config(folder)).embedding_size == 16
    with Engine(config(folder)) as engine:
        (found,) = engine.embed(TEXTS[:1])
    projected = weight @ Alone(folder)(TEXTS[0]) + bias
    expected = torch.nn.functional.normalize(
        projected.tanh() if activation == "Tanh" else projected, dim=0
    )
    assert found.embedding == pytest.approx(expected.tolist(), abs=1e-5)
    (dense / "model.safetensors").unlink()
    with pytest.raises(MissingWeights):
        Engine(config(folder))


def test_a_checkpoint_is_described_and_found_sound_without_its_weights(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert", 2)
    described = describe_model(str(folder))
    assert "BertForSequenceClassification runs through transformers" in described
    assert "classes: class 0, class 1" in described
    found = [each for each in check_up(config(folder)) if each.subject == "model"]
    assert {each.grade for each in found} == {"ok"}
    assert "gives      a score" in describe_model(str(write_encoder(tmp_path / "one", "bert", 1)))
    write_encoder(tmp_path / "body", "bert").joinpath("modules.json").unlink()
    assert "embeddings if TOKENMILL_POOLING says how" in describe_model(str(tmp_path / "body"))


def test_a_head_of_more_classes_than_are_named_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert", 3)
    values = json.loads((folder / "config.json").read_text())
    del values["id2label"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(WeightMismatch, match=r"another shape than config.json says: .*classifier"):
        Engine(config(folder))


def test_a_model_whose_answers_padding_changes_is_refused(tmp_path: Path) -> None:
    """FNet mixes all places of a row, padding too."""
    folder = write_encoder(tmp_path, "fnet", 2)
    with pytest.raises(
        UnsupportedModel, match=r"FNetForSequenceClassification .* mixes the texts of one batch"
    ):
        Engine(config(folder))


def test_a_text_that_would_change_the_rotation_of_others_is_refused(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "original_max_position_embeddings": 64,
        **factors,
    }
    values = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    folder = write_encoder(tmp_path, "phi3", 2, **values)
    with pytest.raises(UnsupportedModel, match="set max_model_len=64"):
        Engine(config(folder))
    with Engine(config(folder, max_model_len=64)) as engine:
        assert engine.generate(["w1"], ClassParams())[0].class_scores


def test_labels_and_head_must_have_the_same_number(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert", 3)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for wrong, problem in (
        ({"id2label": {"0": "a", "1": "a"}}, "a name of its own"),
        ({"id2label": {"0": "a", "1": "\ud800", "2": "b"}}, "a name of its own"),
        ({"id2label": {str(number): str(number) for number in range(10_001)}}, "at most 10000"),
        ({"problem_type": "regression"}, "3 numbers of regression"),
        ({"id2label": {}, "num_labels": "3"}, "num_labels"),
    ):
        path.write_text(json.dumps({**values, **wrong}))
        with pytest.raises((ConfigError, UnsupportedModel), match=problem):
            Engine(config(folder))
    path.write_text(json.dumps({**values, "layer_norm_eps": float("nan")}))
    with Engine(config(folder)) as engine:
        (found,) = engine.generate(TEXTS[:1], ClassParams())
    assert found.error is not None
    assert "no finite numbers" in found.error
    path.write_text(json.dumps(values))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": "x"}))
    with pytest.raises(ConfigError, match="model_max_length is no number"):
        Engine(config(folder))


def test_what_a_checkpoint_has_no_part_for_is_refused(tmp_path: Path) -> None:
    head = write_encoder(tmp_path / "head", "bert", 2)
    with Engine(config(head)) as engine:
        for params in (SamplingParams(), PoolingParams()):
            with pytest.raises(UnsupportedTask):
                engine.add("other", "w1", params)
    body = write_encoder(tmp_path / "body", "bert")
    with Engine(config(body)) as engine, pytest.raises(UnsupportedTask):
        engine.add("other", "w1", ClassParams())
    for option in (
        {"deterministic": True},
        {"quantization": "int8"},
        {"kv_cache_dtype": "fp8_e4m3"},
    ):
        with pytest.raises(ConfigError, match=next(iter(option))):
            Engine(config(head, **option))
    (body / "modules.json").unlink()
    with pytest.raises(UnsupportedModel, match="pooling"):
        Engine(config(body))
    with Engine(config(body, pooling="mean")) as engine:
        assert engine.embed(["w1"])[0].embedding


def test_a_text_whose_numbers_are_not_finite_fails_alone(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert", 2)
    with Engine(config(folder)) as engine:
        table: Any = model_of(engine).model.get_input_embeddings()
        table.weight[10] = math.nan
        good, bad = engine.generate([[1, 9, 2], [1, 10, 2]], ClassParams())
    assert good.class_scores is not None
    assert bad.finish_reason == "error"


def test_a_model_that_mixes_texts_when_they_are_one_row_is_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_encoder(tmp_path, "bert")
    alone = Alone(folder)

    def shifted(self: SinglePass, texts: Any) -> Any:
        return compute(self, texts) + (0.5 if self.is_packed else 0)

    compute = SinglePass.__call__
    monkeypatch.setattr(SinglePass, "__call__", shifted)
    with Engine(config(folder)) as engine:
        assert not model_of(engine).is_packed
        found = engine.embed(TEXTS)
    for text, completion in zip(TEXTS, found, strict=True):
        assert completion.embedding == pytest.approx(alone(text).tolist(), abs=1e-5)
