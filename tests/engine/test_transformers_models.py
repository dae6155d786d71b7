"""Models of transformers with the engine's attention: the same tokens, or a refusal that says why."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers.models.llama4 import modeling_llama4

import engine.models.attention_calls
import engine.models.transformers_model
from engine import (
    AttentionRefused,
    ConfigError,
    Engine,
    MissingWeights,
    UnsupportedModel,
    WeightMismatch,
)
from engine.checkpoint.model_config import read_model_config
from engine.layers.parallel import TensorParallel
from engine.models import served
from engine.models.served import refuse_known, served_architectures
from engine.run.forward.model_runner import ModelRunner
from jobs.cli import main
from tests.engine.architectures import (
    BY_NAME,
    REFUSED,
    SERVED,
    WITH_STATES,
    Architectures,
    add_sizes,
    class_name,
    make_architecture,
    small,
)
from tests.engine.families import COMMON, Family
from tests.engine.family_runs import NUM_NEW_TOKENS, run
from tests.engine.graphs import simulate_graphs
from tests.engine.reference import Reference

#: Each for something that the others lack: slopes in place of positions, values narrower than keys, a soft cap with
#: windows, other names in config.json, chunks, a window that the mask alone tells of.
SAMPLE = [
    "bloom",
    "deepseek_v3",
    "gemma2",
    "gpt2",
    "jamba",
    "llama4_text",
    "mamba2",
    "qwen2_moe",
    "qwen3_5_text",
]
MIXING = ["gptj", "recurrent_gemma", "qwen4_exp_text"]


@pytest.fixture
def gpt2(architecture: Architectures, tmp_path: Path) -> Path:
    """A checkpoint of an architecture that is not native, for a test to spoil."""
    return Path(shutil.copytree(architecture("gpt2").reference.folder, tmp_path / "gpt2"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "name",
    [
        *SAMPLE,
        *(pytest.param(name, marks=pytest.mark.long) for name in SERVED if name not in SAMPLE),
    ],
)
def test_greedy_tokens_equal_transformers(name: str, architecture: Architectures) -> None:
    """With chunks of 24 tokens, the prefix cache, and preemptions, all at once."""
    differences, stats = architecture(name).run()
    assert differences == []
    assert stats.cached_tokens > 0
    assert stats.num_preemptions > 0 or "max_position_embeddings" in WITH_STATES.get(
        name, ()
    )  # without KV
    answers = architecture(name).reference.answers
    assert sum(len(set(answer)) for answer in answers) > NUM_NEW_TOKENS / 4 * len(answers)


def test_the_cpu_backend_gives_the_same_tokens(architecture: Architectures) -> None:
    pytest.importorskip(
        "numba", reason="numba is not installed, so the CPU kernels cannot be compiled"
    )
    assert architecture("deepseek_v3").run(backend="cpu")[0] == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", lambda call: replace(call, options={**call.options, "softcap": None})),
        ("gemma2", lambda call: replace(call, scaling=call.scaling * 1.1)),
        ("gpt_oss", lambda call: replace(call, options={**call.options, "s_aux": None})),
    ],
    ids=["soft cap", "scale", "sinks"],
)
def test_what_is_left_out_of_a_layers_attention_is_found_at_start(
    name: str, change: Any, architecture: Architectures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By comparing the model with itself as transformers runs it."""
    call_type = engine.models.attention_calls.AttentionCall
    monkeypatch.setattr(
        engine.models.attention_calls, "AttentionCall", lambda *args: change(call_type(*args))
    )
    folder = architecture(name).reference.folder
    with pytest.raises(
        UnsupportedModel, match="attends differently here than in transformers' own code"
    ):
        Engine(small(folder, model_path="transformers"))


@pytest.mark.parametrize("name", MIXING)
def test_models_that_mix_rows_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """At sight by the table, and where that is passed over, by what the model does."""
    folder = make_architecture(tmp_path / "model", name)
    with pytest.raises(
        UnsupportedModel, match=rf"{class_name(name)} .*the nearest that is served: \w+"
    ):
        Engine(small(folder))
    add_sizes(folder)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(UnsupportedModel, match=f"{class_name(name)} .*the nearest") as refused:
            Engine(small(folder, model_path="transformers", dtype=dtype))
        assert re.search("layers attend|mixes the sequences|an index chooses", str(refused.value))


def test_a_mask_that_no_layer_takes_refuses_nothing(tmp_path: Path) -> None:
    """Without its windows, which is how it comes, Qwen2-MoE makes a mask for windows of no tokens."""
    Engine(
        small(make_architecture(tmp_path / "model", "qwen2_moe", use_sliding_window=False))
    ).close()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("big_bird", "0 of its 3 layers attend"),
        ("moshi", "makes no logits of hidden"),
        # from its 128th token on
        ("deepseek_v4", "does not attend to exactly one key for each token"),
    ],
)
def test_a_model_on_no_list_is_refused_by_name(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BY_NAME, name, Family(name, name, {}))
    folder = make_architecture(tmp_path / "model", name)
    with pytest.raises(UnsupportedModel, match=f"{class_name(name)} .*{reason}"):
        Engine(small(folder))


def test_a_count_that_matters_only_far_from_the_start_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond any probe's length: one by torch.arange is told positions, another refuses the model."""
    folder = make_architecture(
        tmp_path / "model", "llama4_text", floor_scale=200, attention_chunk_size=64
    )
    asked = [[7 * i % 500 + 3 for i in range(length)] for length in (290, 12, 240)]
    reference = Reference(folder, asked, num_new_tokens=NUM_NEW_TOKENS, use_cache=False)
    assert run(reference, "chunks", max_model_len=400)[0] == []

    def cumsum(*ends: int, **options: Any) -> Tensor:
        if len(ends) > 1:
            return torch.arange(*ends, **options)
        return torch.ones(ends[0], dtype=torch.long, device=options.get("device")).cumsum(0) - 1

    counting = ModuleType("torch")
    vars(counting).update(vars(torch), arange=cumsum)
    monkeypatch.setattr(modeling_llama4, "torch", counting)
    Engine(small(folder, max_model_len=170)).close()
    with pytest.raises(UnsupportedModel, match="Llama4TextAttention counts tokens by itself"):
        Engine(small(folder, max_model_len=400))


def test_a_state_beside_the_cache_is_found(
    architecture: Architectures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that adds what its first row was in the step before forgets nothing within a step."""
    last: dict[str, Tensor] = {}

    class Remembering(engine.models.transformers_model.TransformersModel):
        def hidden_states(self, batch: Any, cache: Any) -> Tensor:
            hidden = super().hidden_states(batch, cache)
            moved = hidden + last.get("row", 0.0) * (batch.positions[:1] > 0)
            last["row"] = hidden[-1:]
            return moved

    monkeypatch.setattr(engine.models.transformers_model, "TransformersModel", Remembering)
    with pytest.raises(UnsupportedModel, match="forgets what came before a chunk"):
        Engine(small(architecture("gpt2").reference.folder))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"architectures": None},
            UnsupportedModel,
            "none named is no model of transformers .* that generates text",
        ),
        (
            {"model_type": "gpt9"},
            UnsupportedModel,
            "cannot read config.json of this GPT2LMHeadModel: .*gpt9",
        ),
        ({"n_embd": 96}, WeightMismatch, r"another shape than config.json says: .*transformer\."),
        ({"n_layer": 4}, MissingWeights, r"lacks tensors .*transformer\.h\.3"),
        ({"n_layer": 2}, WeightMismatch, r"no place: transformer\.h\.2"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            UnsupportedModel,
            "'hqq' are not supported",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(
    gpt2: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    change_config(gpt2, **changes)
    with pytest.raises(error, match=message):
        Engine(small(gpt2))


def test_rotations_that_follow_the_longest_sequence_are_refused(tmp_path: Path) -> None:
    """Up to the length at which they change, the model is served."""
    rope = {
        "rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 6, "long_factor": [4.0] * 6, "factor": 8.0,
    }  # fmt: skip
    values = {**COMMON, "head_dim": None, "rope_parameters": rope, "partial_rotary_factor": 1.0}
    folder = make_architecture(tmp_path / "model", "granite", **values)
    with pytest.raises(UnsupportedModel, match=r"set max_model_len=64 or lower"):
        Engine(small(folder))
    Engine(small(folder, max_model_len=64)).close()


def test_the_way_is_chosen_and_logged(
    architecture: Architectures, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Native where it can be, else through transformers; and what the configuration wants."""
    native, foreign = folders["gqa1_untied"], architecture("gpt2").reference.folder
    caplog.set_level("INFO", logger="engine")
    for folder, changes, line in (
        (native, {}, "Qwen3ForCausalLM runs natively"),
        (
            native,
            {"model_path": "transformers"},
            "Qwen3ForCausalLM runs through transformers: model_path=",
        ),
        (
            foreign,
            {},
            "GPT2LMHeadModel runs through transformers: architecture 'GPT2LMHeadModel' is not nat",
        ),
    ):
        caplog.clear()
        Engine(small(folder, **changes)).close()
        assert line in caplog.text
    with pytest.raises(UnsupportedModel, match=r"not native.* 'auto' tries transformers"):
        Engine(small(foreign, model_path="native"))
    with pytest.raises(
        ConfigError, match="model_path='fast' must be 'auto', 'native' or 'transformers'"
    ):
        small(foreign, model_path="fast")


def test_auto_takes_another_backend_where_a_layer_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An explicit one is an error."""
    pytest.importorskip("numba", reason="numba is not installed, so 'auto' takes torch anyway")
    folder = make_architecture(tmp_path / "model", "gemma", head_dim=272)
    with Engine(small(folder, max_model_len=20, model_path="transformers")) as built:
        assert built.attention_backend == "torch"
    assert "attention_backend='auto' takes 'torch'" in caplog.text
    with pytest.raises(
        AttentionRefused, match="heads of an even size up to 256, this model has 272"
    ):
        Engine(small(folder, model_path="transformers", attention_backend="cpu"))


def test_decode_steps_are_captured(
    architecture: Architectures, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = simulate_graphs(monkeypatch)
    assert architecture("gemma2").run("chunks")[0] == []
    assert capture.replayed


@pytest.mark.long
@pytest.mark.usefixtures("forked_ranks")
def test_ranks_share_a_model_over_gloo(architecture: Architectures) -> None:
    assert architecture("glm").run("tp2")[0] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "message"), [("gpt2", "no plan for splitting GPT2"), ("qwen2_moe", "moe_tp")]
)
def test_a_split_that_is_not_built_is_refused(
    name: str, message: str, architecture: Architectures
) -> None:
    folder = architecture(name).reference.folder
    config = small(folder, model_path="transformers")
    with pytest.raises(
        UnsupportedModel, match=rf"tensor_parallel_size=2: .*{message}.* set tensor_parallel_s"
    ):
        ModelRunner(config, read_model_config(folder), folder, TensorParallel(0, 2))


ROOT = Path(__file__).parents[2]


def test_what_is_listed_is_what_was_compared() -> None:
    assert set(served.TRANSFORMERS) == set(map(class_name, SERVED))
    listed = {name for nearest in served.REFUSED.values() for name in nearest}
    assert listed == set(map(class_name, REFUSED))
    assert not listed & served_architectures()


def test_what_is_named_instead_is_served() -> None:
    for nearest in served.REFUSED.values():
        for name, instead in nearest.items():
            assert instead in served_architectures()
            with pytest.raises(UnsupportedModel, match=f"{name} .*{instead}"):
                refuse_known(name)
    for name in served_architectures():
        refuse_known(name)


def test_the_command_prints_what_is_served() -> None:
    result = CliRunner().invoke(main, ["models"])
    assert result.exit_code == 0
    assert all(name in result.output for name in (*served_architectures(), *served.WITH_IMAGES))
    assert "pictures where the start finds them exact:\n  Aria" in result.output
    for page, words in (
        ("README.md", "{} architectures (["),
        ("docs/index.md", "{} architectures, CPUs"),
        ("docs/models.md", "`tokenmill models` lists"),
    ):
        assert words.format(len(served_architectures())) in (ROOT / page).read_text()
