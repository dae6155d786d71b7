"""A model of transformers over several ranks, split by its own plan."""

from __future__ import annotations

import pytest

from engine import UnsupportedModel
from engine.checkpoint.model_config import read_model_config
from engine.layers.parallel import TensorParallel
from engine.run.model_runner import ModelRunner
from tests.engine.architectures import Architectures, small

pytestmark = pytest.mark.long


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_share_a_model_over_gloo(architecture: Architectures) -> None:
    assert architecture("glm").run("tp2")[0] == []


@pytest.mark.parametrize(
    ("name", "message"), [("gpt2", "no plan for splitting GPT2"), ("qwen2_moe", "moe_tp")]
)
def test_a_split_that_is_not_built_is_refused(name: str, message: str, architecture: Architectures) -> None:
    folder = architecture(name).reference.folder
    config = small(folder, model_path="transformers")
    with pytest.raises(
        UnsupportedModel, match=rf"tensor_parallel_size=2: .*{message}.* set tensor_parallel_s"
    ):
        ModelRunner(config, read_model_config(folder), folder, TensorParallel(0, 2))
