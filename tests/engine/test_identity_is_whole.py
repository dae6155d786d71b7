"""Each file that is opened while a model is loaded and a request prepared is in its identity, or named below."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine import Engine, EngineConfig, PoolingParams, SamplingParams
from engine.checkpoint import fingerprint
from engine.text.tokenizer import Tokenizer
from tests.engine.checkpoints import SHAPES, make_checkpoint, shard
from tests.engine.embedding_models import like_qwen3_embedding
from tests.engine.encoders import write_encoder
from tests.engine.family_runs import config_of
from tests.engine.opened_files import opened_files
from tests.engine.picture_models import make_with_pictures, prompts
from tests.engine.text_models import make_text_model

#: Files that change no answer, each with the reason.
BESIDE: dict[str, str] = {
    "model.safetensors.index.json": "it says which file has a tensor; the tensors themselves are read"
}
CHAT = [{"role": "user", "content": "a"}]


def plain(folder: Path) -> None:
    with Engine(EngineConfig(str(folder), dtype="float32", kv_cache_bytes=1 << 22)) as engine:
        engine.prepare("a b", SamplingParams(truncate_prompt_tokens=-1))
        if engine._tokenizer.template is not None:
            engine.prepare_chat(CHAT)
        engine.generate([[5, 6]], SamplingParams(max_tokens=2, seed=1))


def tokenized(folder: Path) -> None:
    assert Tokenizer(folder).encode("a b")


def pictured(folder: Path) -> None:
    with Engine(config_of(folder, "whole")) as engine:
        assert engine.reads_pictures
        engine.prepare(prompts()[0])  # type: ignore[arg-type]


def embedded(folder: Path) -> None:
    with Engine(EngineConfig(str(folder), dtype="float32")) as engine:
        engine.embed(["a b"], PoolingParams())


def classified(folder: Path) -> None:
    with Engine(EngineConfig(str(folder), dtype="float32")) as engine:
        assert engine.identity.classes


def with_templates(folder: Path) -> Path:
    make_checkpoint(folder, SHAPES[0])
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "other.jinja").write_text("{{ messages }}")
    shard(folder)
    return folder


def with_tokenizer_of(folder: Path, family: str) -> Path:
    """Make a folder that has a tokenizer, and one tensor that is no model's."""
    save_file({"weight": torch.zeros(3)}, folder / "model.safetensors")
    return make_text_model(folder, family)


Make, Use = Callable[[Path], Any], Callable[[Path], None]
#: Kinds of folders, and what is done with one.
FOLDERS: dict[str, tuple[Make, Use]] = {
    "shards and templates": (with_templates, plain),
    "sentencepiece": (lambda folder: with_tokenizer_of(folder, "sentencepiece"), tokenized),
    "pieces": (lambda folder: with_tokenizer_of(folder, "llama"), tokenized),
    "tekken": (lambda folder: with_tokenizer_of(folder, "tekken"), tokenized),
    "pictures": (lambda folder: make_with_pictures(folder, "llava"), pictured),
    "embeddings": (like_qwen3_embedding, embedded),
    "a head": (lambda folder: write_encoder(folder, "bert", 3), classified),
}


def not_in_the_identity(folder: Path, use: Use) -> set[str]:
    with opened_files(folder) as read:
        fingerprint.read_identity(folder, "float32")
    with opened_files(folder) as opened:
        use(folder)
    assert opened, "something is read"
    return opened - read - BESIDE.keys()


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_file_that_is_opened_is_in_the_identity(tmp_path: Path, kind: str) -> None:
    make, use = FOLDERS[kind]
    folder = tmp_path / "model"
    folder.mkdir()
    folder = make(folder) or folder
    assert not_in_the_identity(folder, use) == set()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("pictures", "processor_config.json"),
        ("sentencepiece", "tokenizer.model"),
        ("pieces", "tokenizer.json"),
        ("embeddings", "modules.json"),
        ("shards and templates", "generation_config.json"),
    ],
)
def test_a_file_that_is_left_out_is_noticed(
    tmp_path: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, use = FOLDERS[kind]
    folder = tmp_path / "model"
    folder.mkdir()
    folder = make(folder) or folder
    monkeypatch.setattr(
        fingerprint, "TEXT_FILES", [each for each in fingerprint.TEXT_FILES if each != name]
    )
    assert not_in_the_identity(folder, use) == {name}
