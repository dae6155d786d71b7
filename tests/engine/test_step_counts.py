"""How many steps of each kind graphs replay, and what a step of each kind launches.

A kernel that is launched once more, or a step that runs without its graph, costs time on a GPU and changes no answer.
So it is counted here, in Triton's interpreter, with graphs that call again what they recorded.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")

from engine import Engine, EngineConfig, SamplingParams
from engine.attention import prefix_groups
from engine.kernels.attention.kv_tile import INTERPRETED
from engine.kernels.products import low_rank
from engine.layers import lora_tables
from engine.run.forward.model_runner import ModelRunner
from engine.sampling.sampling_batch import SamplingBatch
from engine.schedule.step_batch import StepBatch
from tests.engine.adapters import make_adapter
from tests.engine.checkpoints import SHAPES, make_checkpoint
from tests.engine.graphs import (
    SimulatedCapture,
    SimulatedPieces,
    simulate_graphs,
    simulate_mixed_graphs,
)
from tests.engine.test_prefix_attention import PREFIX, count_launches

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not INTERPRETED, reason="launches are counted in the interpreter"),
]

(SHAPE,) = (shape for shape in SHAPES if shape.name == "gqa2_tied_hub")
LAYERS = SHAPE.num_layers
NUM_TOKENS = 5  # of each answer
PROMPTS = [[5, 9, 20], [7, 31, 40, 8], [6] * 9]

#: What a decode step launches whose rows stay the same.
DECODE = {
    "advance_kernel": 1,
    "rms_norm_kernel": 2 * LAYERS + 1,
    "norm_rotate_store_kernel": LAYERS,
    "decode_kernel": LAYERS,
    "gate_and_mul_kernel": LAYERS,
    "tile_maxima_kernel": 1,
    "choose_token_kernel": 1,
}
#: What a step launches that computes nothing but prompts.
PROMPT = DECODE | {"advance_kernel": 0, "decode_kernel": 0, "prefill_kernel": LAYERS}
ADAPTED = {"group_kernel": 1, "narrow_kernel": 4 * LAYERS, "widen_kernel": 4 * LAYERS}


@dataclass(frozen=True)
class Kind:
    """Requests of one kind, and what their steps launch beside those of plain requests.

    num_replays: graphs of a decode step. The second one chooses tokens; where logits are needed or changed, kernels are
    launched in its place.
    """

    params: dict[str, Any]
    prompts: list[list[int]] = field(default_factory=lambda: PROMPTS)
    num_replays: int = 2
    more_in_decodes: dict[str, int] = field(default_factory=dict)
    more_in_prompts: dict[str, int] = field(default_factory=dict)


KINDS = {
    "plain": Kind({}),
    "log probabilities": Kind(
        {"logprobs": 0},
        num_replays=1,
        more_in_decodes={"score_kernel": 1},
        more_in_prompts={"score_kernel": 1},
    ),
    "log probabilities of prompts": Kind(
        {"prompt_logprobs": 0}, more_in_prompts={"score_kernel": 1}
    ),
    "grammar": Kind(
        {"structured_outputs": {"regex": "[a-f]{40}"}},
        num_replays=1,
        more_in_decodes={"edit_kernel": 1},
        more_in_prompts={"edit_kernel": 1},
    ),
    "adapters": Kind({"adapter": "all"}, more_in_decodes=ADAPTED, more_in_prompts=ADAPTED),
    "cascade": Kind(
        {},
        prompts=[PREFIX + prompt for prompt in PROMPTS],
        more_in_decodes={"prefix_kernel": LAYERS},
    ),
}


@dataclass
class CountedSteps:
    """What each step replayed and launched. is_decode: of each step, whether every sequence had one token."""

    decodes: SimulatedCapture
    mixed: SimulatedPieces
    launches: Counter[str]
    is_decode: list[bool] = field(default_factory=list)
    num_decode_replays: list[int] = field(default_factory=list)
    num_mixed_replays: list[int] = field(default_factory=list)
    launched: list[Counter[str]] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count the steps of a runner from now on."""
        launch = ModelRunner._launch

        def count(runner: ModelRunner, step: StepBatch, sampling: SamplingBatch) -> Any:
            num_decodes = len(self.decodes.replayed)
            num_mixed = len(self.mixed.replayed)
            self.launches.clear()
            tokens = launch(runner, step, sampling)
            self.is_decode.append(bool((step.query_lens == 1).all()))
            self.num_decode_replays.append(len(self.decodes.replayed) - num_decodes)
            self.num_mixed_replays.append(len(self.mixed.replayed) - num_mixed)
            # rows are written when they change, which is another test's: test_batch_rows.py
            self.launched.append(Counter(self.launches) - Counter(write_rows_kernel=1))
            return tokens

        monkeypatch.setattr(ModelRunner, "_launch", count)


@pytest.fixture(scope="module")
def model_and_adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("step_counts")
    model = make_checkpoint(root / "model", SHAPE)
    make_adapter(root / "adapters" / "all", model, seed=1)
    return model, root / "adapters"


def run_counted(
    monkeypatch: pytest.MonkeyPatch,
    model_and_adapters: tuple[Path, Path],
    kind: Kind,
    **limits: Any,
) -> CountedSteps:
    """Answer the kind's requests, and return what their steps replayed and launched."""
    model, adapters = model_and_adapters
    steps = CountedSteps(
        simulate_graphs(monkeypatch),
        simulate_mixed_graphs(monkeypatch),
        count_launches(monkeypatch),
    )
    values: dict[str, Any] = {
        "dtype": "float32",
        "attention_backend": "triton",
        "kv_cache_bytes": 1 << 20,
        "max_model_len": 112,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        **limits,
    }
    if "adapter" in kind.params:
        for module in (low_rank, lora_tables):  # fewer programs for the interpreter
            monkeypatch.setattr(module, "MOST_RANKS", 16)
        values |= {"adapters": str(adapters), "max_adapters": 1}
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, **kind.params)
    with Engine(EngineConfig(str(model), **values)) as engine:
        engine._open_runner()
        steps.watch(monkeypatch)
        for completion in engine.generate(kind.prompts, params):
            assert completion.error is None
            assert len(completion.token_ids) == NUM_TOKENS
    return steps


@pytest.mark.parametrize("name", KINDS)
def test_every_step_is_replayed_and_launches_what_its_kind_needs(
    name: str, model_and_adapters: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step of prompts, then decode steps."""
    kind = KINDS[name]
    limits = {}
    if name == "cascade":
        monkeypatch.setattr(prefix_groups, "LEAST_SPARED_BYTES", 1)
        limits = {"max_num_batched_tokens": len(PREFIX) + 64}

    steps = run_counted(monkeypatch, model_and_adapters, kind, **limits)

    num_decodes = NUM_TOKENS - 1
    assert steps.is_decode == [False] + num_decodes * [True]
    assert steps.num_mixed_replays == [1] + num_decodes * [0]
    assert steps.num_decode_replays == [0] + num_decodes * [kind.num_replays]
    of_prompts = Counter(PROMPT) + Counter(kind.more_in_prompts)
    of_decodes = Counter(DECODE) + Counter(kind.more_in_decodes)
    assert steps.launched == [of_prompts] + num_decodes * [of_decodes]


def test_a_step_of_prompts_beside_decodes_is_replayed_and_launches_one_kernel_more_a_layer(
    model_and_adapters: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 5, 7, 7 and 2 tokens, the last three beside a row that decodes."""
    kind = Kind({}, prompts=[[5, 9, 20], [6] * 21])

    steps = run_counted(monkeypatch, model_and_adapters, kind, max_num_batched_tokens=8)

    assert steps.is_decode == 4 * [False] + 4 * [True]
    assert steps.num_mixed_replays == 4 * [1] + 4 * [0]
    assert steps.num_decode_replays == 4 * [0] + 4 * [2]
    beside_decodes = Counter(PROMPT) + Counter(decode_kernel=LAYERS)
    expected = [Counter(PROMPT)] + 3 * [beside_decodes] + 4 * [Counter(DECODE)]
    assert steps.launched == expected
