"""Each row has the answer of the model that its adapter makes, whatever rows of others are computed with it."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import (
    Completion,
    ConfigError,
    Engine,
    EngineConfig,
    PoolingParams,
    SamplingParams,
    ScoringParams,
)
from engine.run import adapters
from tests.engine.adapters import (
    ALL,
    GREEDY,
    NAMES,
    PROMPTS,
    SHAPE,
    Stage,
    ask,
    check_answers,
    make_adapter,
    make_stage,
    merge,
)
from tests.engine.checkpoints import make_checkpoint, pool_bytes
from tests.engine.families import BY_NAME, make_family
from tests.engine.graphs import simulate_graphs
from tests.engine.quantizers import FORMATS, quantize_checkpoint
from tests.engine.reference import NUM_NEW_TOKENS, Reference


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return make_stage(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def engine(stage: Stage) -> Iterator[Engine]:
    with Engine(stage.config()) as built:
        yield built


def test_each_row_has_the_answer_of_its_own_merged_model(stage: Stage, engine: Engine) -> None:
    """In chunks of a long prompt, with prefixes that all of them share."""
    check_answers(stage, engine)
    stats = engine.stats()
    assert stats.cached_tokens > 0
    assert 0 < stats.adapter_steps <= stats.num_steps


def test_preempted_rows_come_to_the_same_answers(stage: Stage) -> None:
    few = stage.config(kv_cache_bytes=pool_bytes(SHAPE, 20))
    with Engine(few) as built:
        check_answers(stage, built)
        assert built.stats().num_preemptions > 0


def test_steps_that_overlap_come_to_the_same_answers(stage: Stage) -> None:
    with Engine(stage.config(async_scheduling=True, attention_backend="torch")) as built:
        check_answers(stage, built)


def test_steps_with_adapters_run_without_graphs_and_the_others_with_them(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows go back and forth between both."""
    capture = simulate_graphs(monkeypatch)
    with Engine(stage.config(attention_backend="torch", max_num_seqs=8)) as built:
        captured = len(capture.replayed)
        ask(built, PROMPTS[8], None)
        assert built.stats().adapter_steps == 0
        assert len(capture.replayed) - captured == 2 * (NUM_NEW_TOKENS - 1), "two graphs a step"
        num_replayed = len(capture.replayed)
        ask(built, PROMPTS[8], "all")
        assert built.stats().adapter_steps == NUM_NEW_TOKENS
        assert len(capture.replayed) == num_replayed
        long = replace(GREEDY, max_tokens=60)
        both = [(long, PROMPTS[3]), (replace(GREEDY, max_tokens=9, adapter="mlp"), PROMPTS[4])]
        done = built.generate([prompt for _, prompt in both], [params for params, _ in both])
        assert len(capture.replayed) > num_replayed
        model = stage.references[None].model
        expected = model.generate(
            torch.tensor([PROMPTS[3]]), max_new_tokens=60, do_sample=False, eos_token_id=None
        )
        assert done[0].token_ids == expected[0, len(PROMPTS[3]) :].tolist()


def test_fewer_places_than_adapters_are_used_in_turn(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was used least lately goes, and none that a request still uses."""
    with Engine(stage.config(max_adapters=2)) as built:
        runner: Any = built._open_runner()
        load, loads = runner.load_adapter, []

        def note(number: int, adapter: Any) -> None:
            loads.append((number, adapter.name))
            load(number, adapter)

        monkeypatch.setattr(runner, "load_adapter", note)
        check_answers(stage, built)
        assert len(runner._adapters._products) == 2
        assert len(loads) < len(PROMPTS) / 2, "rows of loaded adapters go before the one that waits"
        ask(built, [5, 6], "all")
        ask(built, [5, 6], "mlp")
        del loads[:]
        for name in ("all", "attention", "all"):
            ask(built, [5, 6], name)
        assert [name for _, name in loads] == ["attention"]


def test_a_request_that_waits_for_a_place_is_overtaken_a_few_times_only(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "MAX_OVERTAKES", 3)
    with Engine(stage.config(max_adapters=1, max_num_seqs=2)) as built:
        built.add("first", [5, 6], replace(GREEDY, adapter="all"))
        built.step()
        built.add("waits", [5, 6], replace(GREEDY, adapter="mlp"))
        for number in range(6):
            built.add(str(number), [5, 6], replace(GREEDY, adapter="all"))
        done = []
        while built.has_unfinished:
            done += [completion.request_id for completion in built.step()]
        assert done == ["first", "0", "1", "2", "waits", "3", "4", "5"]


def test_a_request_of_an_earlier_lane_gets_the_next_place_that_comes_free(stage: Stage) -> None:
    """Rows of a later lane that have the adapter in the only place are preempted by a lane between, and wait behind."""
    long = replace(GREEDY, max_tokens=60)
    with Engine(stage.config(max_adapters=1, max_num_seqs=2)) as built:
        for number in range(4):
            built.add(f"low {number}", PROMPTS[3], replace(long, adapter="all"), lane=2)
        for _ in range(3):
            built.step()
        built.add("high", PROMPTS[4], replace(GREEDY, adapter="mlp"), lane=0)
        for number in range(30):
            built.add(f"between {number}", [5, 6], GREEDY, lane=1)
        done: dict[str, Completion] = {}
        while built.has_unfinished:
            done |= {each.request_id: each for each in built.step()}
        alone = ask(built, PROMPTS[3], "all", max_tokens=60).token_ids
    assert list(done).index("high") < 4
    assert done["high"].token_ids == stage.references["mlp"]._generate(PROMPTS[4])
    assert [done[f"low {number}"].token_ids for number in range(4)] == [alone] * 4


def test_equal_prompts_of_different_adapters_share_no_blocks(engine: Engine) -> None:
    """Neither whole ones nor the beginning of one."""
    for prompt in ([9] * 40, [8] * 7):
        cached = [ask(engine, prompt, name, max_tokens=1).num_cached_tokens for name in NAMES]
        assert cached == [0] * len(NAMES)
        again = [ask(engine, prompt, name, max_tokens=1).num_cached_tokens for name in NAMES]
        assert again == [len(prompt) - 1 if len(prompt) < 16 else 39] * len(NAMES)


def test_a_prompt_prepared_for_another_adapter_is_prepared_again(engine: Engine) -> None:
    prepared = engine.prepare([4] * 40, replace(GREEDY, adapter="all"))
    expected = ask(engine, [4] * 40, "mlp")
    engine.add("x", prepared, replace(GREEDY, adapter="mlp"))
    done = [completion for _ in range(100) for completion in engine.step()]
    assert done[0].token_ids == expected.token_ids


def test_log_probabilities_and_scores_are_those_of_the_merged_model(
    stage: Stage, engine: Engine
) -> None:
    prompt = PROMPTS[8][:30]
    for name in NAMES:
        with torch.inference_mode():
            logits = stage.references[name].model(torch.tensor([prompt])).logits[0]
        expected = logits.log_softmax(-1)
        found = ask(engine, prompt, name, max_tokens=1, prompt_logprobs=0).prompt_logprobs
        assert found is not None
        for place in range(1, len(prompt)):
            entry = found[place]
            assert entry is not None
            truth = expected[place - 1, prompt[place]].item()
            assert entry[prompt[place]].logprob == pytest.approx(truth, abs=1e-3)
        scoring = ScoringParams([[prompt[-1]], [7, 8]], adapter=name)
        (scores,) = engine.generate([prompt[:-1]], scoring)
        assert scores.loglikelihoods is not None
        truth = expected[-2, prompt[-1]].item()
        assert scores.loglikelihoods[0].logprob == pytest.approx(truth, abs=1e-3)


def test_bfloat16_is_as_near_to_the_merged_model_as_the_model_alone(stage: Stage) -> None:
    prompt = PROMPTS[8][:30]
    errors = []
    with Engine(stage.config(dtype="bfloat16")) as built:
        for name in NAMES:
            with torch.inference_mode():
                logits = stage.references[name].model(torch.tensor([prompt])).logits[0]
            expected = logits.log_softmax(-1)
            found = ask(built, prompt, name, max_tokens=1, prompt_logprobs=0).prompt_logprobs
            assert found is not None
            own = [found[i][prompt[i]].logprob for i in range(1, len(prompt))]  # type: ignore[index]
            truth = expected[torch.arange(len(prompt) - 1), prompt[1:]]
            errors.append((torch.tensor(own) - truth).abs().mean().item())
    assert max(errors) < 3 * errors[0] + 0.02


def test_an_aborted_request_that_waits_for_its_adapter_is_gone(stage: Stage) -> None:
    with Engine(stage.config(max_adapters=1)) as built:
        built.add("1", [5, 6], replace(GREEDY, adapter="all"))
        built.add("2", [5, 6], replace(GREEDY, adapter="mlp"))
        built.add("3", [5, 6], replace(GREEDY, adapter="attention"))
        built.step()
        assert built.stats().num_waiting == 2
        built.abort("2")
        done = []
        while built.has_unfinished:
            done += built.step()
        assert [completion.request_id for completion in done] == ["1", "3"]


def test_several_samples_and_embeddings_have_the_adapter_too(stage: Stage) -> None:
    with Engine(stage.config(pooling="mean")) as built:
        drawn = SamplingParams(max_tokens=8, seed=3, n=3, adapter="all", ignore_eos=True)
        alone = built.generate([PROMPTS[9]], drawn)
        beside = built.generate([PROMPTS[9]] * 2, [drawn, replace(drawn, adapter=None)])
        assert [c.token_ids for c in beside[:3]] == [c.token_ids for c in alone]
        assert beside[3].token_ids != alone[0].token_ids
        for name in ("all", None):
            (found,) = built.embed([PROMPTS[9]], PoolingParams(adapter=name, normalize=False))
            with torch.inference_mode():
                body = stage.references[name].model.model
                truth = body(torch.tensor([PROMPTS[9]])).last_hidden_state[0].mean(0)
            assert torch.allclose(torch.tensor(found.embedding), truth, atol=1e-3)


def test_quantized_weights_have_adapters_on_top(stage: Stage) -> None:
    try:
        built = Engine(stage.config(quantization="int8"))
    except ConfigError as error:
        pytest.skip(str(error))
    with built:
        plain, changed = ask(built, PROMPTS[8], None), ask(built, PROMPTS[8], "all")
        assert changed.token_ids != plain.token_ids


def test_weights_that_stay_packed_have_adapters_on_top(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    made = quantize_checkpoint(folders["gqa1_untied"], tmp_path / "awq", FORMATS["awq"])
    adapter = make_adapter(tmp_path / "adapters" / "a", made.unpacked, seed=1)
    prompts = PROMPTS[:4]
    reference = Reference(merge(tmp_path / "merged", made.unpacked, adapter), prompts)
    config = EngineConfig(
        str(made.folder), dtype="float32", kv_cache_bytes=1 << 22, adapters=str(adapter.parent)
    )
    with Engine(config) as built:
        assert reference.unexplained(built.generate(prompts, replace(GREEDY, adapter="a"))) == []


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_gives_the_same_merged_or_not(stage: Stage, tmp_path: Path) -> None:
    """Each row has another adapter than the one before, and rows are preempted.

    The adapters have ranks and alphas by pattern, scales by the root of the rank, and some of the matrices.
    """
    peft = pytest.importorskip("peft")
    folder = tmp_path / "adapters"
    options: dict[str, dict[str, Any]] = {
        "patterns": {
            "use_rslora": True,
            "target_modules": list(ALL),
            "rank_pattern": {"layers.0.self_attn.q_proj": 7, "down_proj": 2},
            "alpha_pattern": {"up_proj": 3, "layers.1.self_attn.o_proj": 9},
        },
        "some": {"target_modules": ["q_proj", "v_proj"]},
        "wide": {"r": 9, "lora_alpha": 5, "target_modules": ["up_proj", "o_proj"]},
    }
    for seed, (name, values) in enumerate(options.items()):
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            **{
                "r": 4,
                "lora_alpha": 6,
                "init_lora_weights": False,
                "task_type": "CAUSAL_LM",
                **values,
            }
        )
        peft.get_peft_model(Reference(stage.model).model, config).save_pretrained(folder / name)

    names = list(options)
    prompts = [prompt for prompt in PROMPTS for _ in names]
    params = [replace(GREEDY, adapter=name) for _ in PROMPTS for name in names]
    few_blocks = pool_bytes(SHAPE, 20)
    with Engine(stage.config(adapters=str(folder), kv_cache_bytes=few_blocks)) as built:
        completions = built.generate(prompts, params)
        assert built.stats().num_preemptions > 0

    for number, name in enumerate(names):
        unmerged = peft.PeftModel.from_pretrained(Reference(stage.model).model, folder / name)
        for model in (unmerged.eval(), unmerged.merge_and_unload()):
            reference = Reference(stage.model, PROMPTS)
            reference.__dict__["model"] = model
            assert reference.unexplained(completions[number :: len(names)]) == []
    answers = {tuple(completion.token_ids) for completion in completions[: len(names)]}
    assert len(answers) == len(names), "the adapters must differ, or this test would see nothing"


@pytest.mark.long  # ranks are processes
@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_share_each_adapter(stage: Stage, tmp_path: Path) -> None:
    """Rows are preempted. An adapter that does not fit the ranks ends its request alone, while steps are under way."""
    folder = tmp_path / "adapters"
    shutil.copytree(stage.adapters, folder)
    other = make_checkpoint(tmp_path / "other", replace(SHAPE, hidden_size=64))
    make_adapter(folder / "of_another", other, seed=1)
    for overlaps in (False, True):
        two = stage.config(
            adapters=str(folder),
            tensor_parallel_size=2,
            async_scheduling=overlaps,
            max_adapters=2,
            kv_cache_bytes=pool_bytes(SHAPE, 20) // 2,  # of each rank, which has half of the heads
        )
        with Engine(two) as built:
            check_answers(stage, built)
            assert built.stats().num_preemptions > 0
            done = built.generate(
                [PROMPTS[8]] * 3,
                [replace(GREEDY, adapter=name) for name in ("all", "of_another", "mlp")],
            )
            assert "was it trained on another model?" in str(done[1].error)
            assert done[2].token_ids == stage.references["mlp"]._generate(PROMPTS[8])


def test_a_hybrid_with_experts_has_adapters_of_its_attention_and_its_shared_expert(
    tmp_path: Path,
) -> None:
    """And none of the experts that a router chooses, nor of layers that keep states."""
    model = make_family(tmp_path / "model", BY_NAME["qwen3_5_moe"])
    make_adapter(
        tmp_path / "adapters" / "a", model, seed=1, targets=(*ALL[:4], "shared_expert.up_proj")
    )
    make_adapter(tmp_path / "adapters" / "b", model, seed=1, targets=("experts.3.up_proj",))
    make_adapter(tmp_path / "adapters" / "c", model, seed=1, targets=("in_proj_qkv",))
    reference = Reference(
        merge(tmp_path / "merged", model, tmp_path / "adapters" / "a"), PROMPTS[:5]
    )
    folder = str(tmp_path / "adapters")
    with Engine(
        EngineConfig(str(model), dtype="float32", kv_cache_bytes=1 << 22, adapters=folder)
    ) as built:
        asked = replace(GREEDY, adapter="a")
        assert reference.unexplained(built.generate(PROMPTS[:5], asked)) == []
        for name in ("b", "c"):
            (refused,) = built.generate([[5, 6]], replace(GREEDY, adapter=name))
            assert "this model has no such linear layer" in str(refused.error)
