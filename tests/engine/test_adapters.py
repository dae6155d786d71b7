"""Each row has the answer of the model that its adapter makes, whatever rows of others are computed with it."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import (
    Completion,
    ConfigError,
    Engine,
    EngineConfig,
    PoolingParams,
    SamplingParams,
    ScoringParams,
    UnknownAdapter,
    check_up,
)
from engine.checkpoint.adapter_folder import NO_FILES, Adapter, AdapterFolder, scale_of
from engine.errors import AdapterRefused
from engine.run import adapters
from engine.run.forward import memory, model_runner
from engine.tensor_parallel.rank import _load_adapter
from tests.engine.adapters import ALL, make_adapter, merge
from tests.engine.checkpoints import Shape, make_checkpoint, pool_bytes
from tests.engine.families import BY_NAME, make_family
from tests.engine.graphs import simulate_graphs
from tests.engine.quantizers import FORMATS, quantize_checkpoint
from tests.engine.reference import NUM_NEW_TOKENS, Reference, mixed_prompts

SHAPE = Shape("for_adapters", num_heads=4, num_kv_heads=2, attention_bias=True, seed=7)
GREEDY = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
NAMES = (None, "all", "attention", "mlp")
PROMPTS = mixed_prompts(seed=5)[:10]


@dataclass(frozen=True)
class Stage:
    """A model, a folder of adapters, and what transformers says of the model with each of them merged."""

    model: Path
    adapters: Path
    references: dict[str | None, Reference]

    def config(self, **changes: Any) -> EngineConfig:
        values: dict[str, Any] = {
            "dtype": "float32", "max_model_len": 200, "max_num_seqs": 16, "max_num_batched_tokens": 64,
            "kv_cache_bytes": pool_bytes(SHAPE, 200), "adapters": str(self.adapters),
        }  # fmt: skip
        return EngineConfig(str(self.model), **{**values, **changes})


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    root = tmp_path_factory.mktemp("adapters")
    model = make_checkpoint(root / "model", SHAPE)
    folder = root / "folder"
    make_adapter(folder / "all", model, seed=1)
    make_adapter(folder / "attention", model, seed=2, rank=3, targets=ALL[:4:2] + ALL[3:4])
    make_adapter(folder / "mlp", model, seed=3, rank=8, targets=("up_proj", "down_proj"))
    references: dict[str | None, Reference] = {None: Reference(model, PROMPTS)}
    for name in NAMES[1:]:
        assert name is not None
        references[name] = Reference(merge(root / f"{name}-merged", model, folder / name), PROMPTS)
    return Stage(model, folder, references)


@pytest.fixture(scope="module")
def engine(stage: Stage) -> Iterator[Engine]:
    with Engine(stage.config()) as built:
        yield built


def check_answers(stage: Stage, engine: Engine) -> None:
    """Each prompt with each adapter, in an order in which neighbours have different ones."""
    asked = [(prompt, name) for prompt in PROMPTS for name in NAMES]
    completions = engine.generate(
        [prompt for prompt, _ in asked], [replace(GREEDY, adapter=name) for _, name in asked]
    )
    for number, name in enumerate(NAMES):
        assert stage.references[name].unexplained(completions[number :: len(NAMES)]) == []
    texts = {tuple(completion.token_ids) for completion in completions[: len(NAMES)]}
    assert len(texts) == len(NAMES), "the adapters must differ, or this test would see nothing"


def ask(engine: Engine, prompt: list[int], adapter: str | None, **changes: Any) -> Completion:
    (completion,) = engine.generate([prompt], replace(GREEDY, adapter=adapter, **changes))
    return completion


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


def test_a_new_sub_folder_is_found_and_changed_files_are_another_adapter(
    stage: Stage, tmp_path: Path
) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    with Engine(stage.config(adapters=str(folder))) as built:
        with pytest.raises(UnknownAdapter, match="there is no adapter 'all'; there are none yet"):
            built.add("1", [5, 6], replace(GREEDY, adapter="all"))
        shutil.copytree(stage.adapters / "all", folder / "all")
        first = ask(built, PROMPTS[8], "all")
        pinned = AdapterFolder(str(folder)).find("all").pinned
        assert ask(built, PROMPTS[8], pinned).token_ids == first.token_ids
        shutil.rmtree(folder / "all")
        shutil.copytree(stage.adapters / "mlp", folder / "all")
        other = ask(built, PROMPTS[8], "all")
        assert other.token_ids != first.token_ids
        assert other.num_cached_tokens == 0
        assert other.token_ids == stage.references["mlp"]._generate(PROMPTS[8])
        (refused,) = built.generate([[5, 6]], replace(GREEDY, adapter=pinned))
        assert refused.lacks_adapter
        assert str(refused.error).startswith("the files of adapter 'all' have changed")


@pytest.mark.parametrize("replaced_by", ["others", "nothing", "half"])
def test_a_request_whose_adapter_changes_before_it_is_loaded_says_so(
    stage: Stage, tmp_path: Path, replaced_by: str
) -> None:
    """It waits for a place meanwhile; the one that uses the place has its answer of the old files."""
    folder = tmp_path / "adapters"
    shutil.copytree(stage.adapters, folder)
    with Engine(stage.config(adapters=str(folder), max_adapters=1)) as built:
        built.add("first", PROMPTS[8], replace(GREEDY, adapter="mlp"))
        built.step()
        built.add("waits", PROMPTS[8], replace(GREEDY, adapter="all"))
        for name in ("all", "mlp"):
            shutil.rmtree(folder / name)
        if replaced_by != "nothing":
            shutil.copytree(stage.adapters / "attention", folder / "all")
        if replaced_by == "half":
            weights = folder / "all" / "adapter_model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-9])
        done: dict[str, Completion] = {}
        while built.has_unfinished:
            done |= {each.request_id: each for each in built.step()}
    assert done["first"].token_ids == stage.references["mlp"]._generate(PROMPTS[8])
    assert not done["first"].lacks_adapter
    assert done["waits"].lacks_adapter
    assert "the files of adapter 'all' have changed" in str(done["waits"].error)


def test_an_adapter_that_was_never_there_is_unknown_and_nobody_waits_for_it(engine: Engine) -> None:
    (refused,) = engine.generate([[5, 6]], replace(GREEDY, adapter=f"all@{NO_FILES}"))
    assert str(refused.error).startswith("there was no adapter 'all' when it was looked for")
    assert not refused.lacks_adapter


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is set, which is not built"),
        ({"bias": "all"}, "bias is 'all', and only 'none' is built"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is set"),
        ({"target_parameters": ["experts.down"]}, "target_parameters is set"),
        ({"init_lora_weights": "pissa"}, "changes the model's own weights"),
        ({"something_of_next_year": 3}, "something_of_next_year is set"),
        ({"lora_alpha": "16"}, "lora_alpha must be a number"),
        ({"lora_alpha": math.nan}, "lora_alpha must be a number .* got nan"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number .* got 1000"),
        ({"alpha_pattern": {"q_proj": math.inf}}, "lora_alpha must be a number .* got inf"),
        ({"alpha_pattern": {"(q_proj": 4}}, r"alpha_pattern has .\(q_proj., which is no pattern"),
    ],
)
def test_what_is_not_built_is_named(
    stage: Stage, tmp_path: Path, values: dict[str, Any], problem: str
) -> None:
    make_adapter(tmp_path / "bad", stage.model, seed=1, **values)
    with pytest.raises(AdapterRefused, match=f"adapter 'bad' cannot be used: .*{problem}"):
        AdapterFolder(str(tmp_path)).find("bad")


def test_whole_numbers_in_place_of_weights_are_refused_by_name(
    stage: Stage, tmp_path: Path
) -> None:
    weights = make_adapter(tmp_path / "bad", stage.model, seed=1) / "adapter_model.safetensors"
    save_file({name: each.int() for name, each in load_file(weights).items()}, weights)
    with pytest.raises(AdapterRefused, match=r"'bad' .*lora_A.weight' in .* is of type I32"):
        AdapterFolder(str(tmp_path)).find("bad")


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_a_module_that_stands_in_an_adapter_twice_is_refused_by_name(
    stage: Stage, engine: Engine, tmp_path: Path, prefix: str
) -> None:
    """Without PEFT's prefix, or without the one of the model's body."""
    weights = make_adapter(tmp_path / "bad", stage.model, seed=1) / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight"
    other = name.removeprefix("base_model.model.model." if prefix else "base_model.model.")
    for half in "AB":
        tensors[prefix + other.format(half)] = tensors[name.format(half)].clone()
    save_file(tensors, weights)
    runner: Any = engine._open_runner()
    with pytest.raises(AdapterRefused, match=r"'bad' .* holds '.*up_proj' twice"):
        runner.load_adapter(0, AdapterFolder(str(tmp_path)).find("bad"))


def test_an_adapter_that_cannot_be_loaded_fails_its_own_requests_alone(
    stage: Stage, tmp_path: Path
) -> None:
    folder = tmp_path / "adapters"
    shutil.copytree(stage.adapters, folder)
    other = make_checkpoint(tmp_path / "other", replace(SHAPE, hidden_size=64))
    make_adapter(folder / "of_another", other, seed=1)
    make_adapter(folder / "deeper", stage.model, seed=1)
    deeper = folder / "deeper" / "adapter_model.safetensors"
    deeper.write_bytes(deeper.read_bytes().replace(b"layers.1.", b"layers.9."))
    make_adapter(folder / "cut", stage.model, seed=1)
    cut = folder / "cut" / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    make_adapter(folder / "diverged", stage.model, seed=1)
    diverged = folder / "diverged" / "adapter_model.safetensors"
    save_file({name: each / 0 for name, each in load_file(diverged).items()}, diverged)
    names = ["all", "of_another", None, "deeper", "cut", "nobody", "diverged"]
    with Engine(stage.config(adapters=str(folder))) as built:
        done = built.generate([PROMPTS[8]] * 7, [replace(GREEDY, adapter=name) for name in names])
        assert not built.has_unfinished
    told = [each for each in check_up(built.config) if each.subject == "adapters"]
    assert [each.grade for each in told] == ["warning", "ok"]
    assert "'cut' cannot be used" in told[0].text
    assert done[0].token_ids == stage.references["all"]._generate(PROMPTS[8])
    assert done[2].token_ids == stage.references[None]._generate(PROMPTS[8])
    assert "adapter 'of_another' cannot be used" in str(done[1].error)
    assert "was it trained on another model?" in str(done[1].error)
    assert "this model has no such linear layer" in str(done[3].error)
    assert "no complete safetensors file" in str(done[4].error)
    assert "there is no adapter 'nobody'; known are all, attention" in str(done[5].error)
    assert "adapter 'diverged' cannot be used: 'model.layers.0." in str(done[6].error)
    assert "has numbers that are NaN or infinite in float32" in str(done[6].error)


def test_names_that_no_job_can_ask_for_are_not_listed(stage: Stage, tmp_path: Path) -> None:
    """Hidden folders, as copies that are not whole yet, and names that look pinned or have line breaks."""
    for name in ("all", ".copying", f"all@{'0' * 32}", "two\nlines"):
        shutil.copytree(stage.adapters / "all", tmp_path / name)
    folder = AdapterFolder(str(tmp_path))
    assert folder.names() == ["all"]
    assert [adapter.name for adapter in folder.look()[0]] == ["all"]
    with pytest.raises(UnknownAdapter, match=r"no adapter .two.nlines.; known are all"):
        folder.find("two\nlines")


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


def test_an_engine_that_cannot_have_adapters_says_so(stage: Stage) -> None:
    with pytest.raises(ConfigError, match=r"adapters=.* cannot be used: this model runs through"):
        Engine(stage.config(model_path="transformers"))
    with pytest.raises(ConfigError, match=r"adapters=.* cannot be used with deterministic=True"):
        stage.config(deterministic=True)
    with pytest.raises(ConfigError, match="adapters='/nowhere' is no folder"):
        Engine(stage.config(adapters="/nowhere"))
    with pytest.raises(ConfigError, match="max_adapters must be a positive integer"):
        stage.config(max_adapters=0)


def test_an_engine_without_adapters_refuses_requests_that_name_one(stage: Stage) -> None:
    with Engine(stage.config(adapters=None)) as built:
        (refused,) = built.generate([[5, 6]], replace(GREEDY, adapter="all"))
        assert refused.error == ("there is no adapter 'all'; this model is served without adapters")
        built.generate([[5, 6]], GREEDY)
        assert built.stats().adapter_steps == 0


def test_the_pool_leaves_memory_for_the_adapters_that_may_be_loaded(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as the largest one in the folder takes, for each place; `doctor` counts the same."""
    largest = 0
    for file in stage.adapters.glob("*/adapter_model.safetensors"):
        largest = max(largest, sum(tensor.nelement() for tensor in load_file(file).values()))
    config = stage.config(max_adapters=3)
    assert memory.adapter_bytes(config, number_bytes=4) == 3 * largest * 4
    assert memory.adapter_bytes(stage.config(adapters=None), number_bytes=4) == 0
    refused = stage.adapters / "refused"
    shutil.copytree(stage.adapters / "all", refused)
    values = json.loads((refused / "adapter_config.json").read_text())
    (refused / "adapter_config.json").write_text(
        json.dumps({**values, "modules_to_save": ["lm_head"]})
    )
    save_file(
        {"lm_head.weight": torch.zeros(4, 10 * largest)}, refused / "adapter_model.safetensors"
    )
    assert memory.adapter_bytes(config, number_bytes=4) == 3 * largest * 4
    shutil.rmtree(refused)

    assert config.kv_cache_bytes is not None
    room = config.kv_cache_bytes + 3 * largest * 4
    for missing in (0, 1):
        monkeypatch.setattr(model_runner, "allowed_bytes", lambda missing=missing: room - missing)
        if missing:
            with pytest.raises(ConfigError, match=r"left of .* beside 0.00 GiB for max_adapters=3"):
                Engine(config)
        else:
            Engine(config).close()
    (told,) = [each for each in check_up(config) if each.subject == "memory"]
    assert ", and 3 adapters 0.00 GiB and a KV pool of" in told.text


def test_names_that_leave_the_folder_are_unknown(stage: Stage) -> None:
    folder = AdapterFolder(str(stage.adapters))
    for name in ("../folder/all", "all/", "/", "..", ".", ""):
        with pytest.raises(UnknownAdapter):
            folder.find(name)


def test_scales_follow_patterns_and_rslora() -> None:
    values = {"lora_alpha": 16, "alpha_pattern": {"layers.1.self_attn.q_proj": 4, r"down_\w+": 8}}
    assert scale_of(values, "model.layers.0.self_attn.q_proj", 8) == 2
    assert scale_of(values, "model.layers.1.self_attn.q_proj", 8) == 0.5
    assert scale_of(values, "model.layers.3.mlp.down_proj", 4) == 2
    assert scale_of({**values, "use_rslora": True}, "x", 16) == 4


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_gives_the_same_merged_or_not(stage: Stage, tmp_path: Path) -> None:
    """With ranks and alphas by pattern, and scales by the root of the rank."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=list(ALL),
        rank_pattern={"layers.0.self_attn.q_proj": 7, "down_proj": 2},
        alpha_pattern={"up_proj": 3, "layers.1.self_attn.o_proj": 9},
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(11)
    trained = peft.get_peft_model(Reference(stage.model).model, config)
    trained.save_pretrained(tmp_path / "adapters" / "trained")
    unmerged = peft.PeftModel.from_pretrained(
        Reference(stage.model).model, tmp_path / "adapters" / "trained"
    ).eval()
    with Engine(stage.config(adapters=str(tmp_path / "adapters"))) as built:
        asked = [replace(GREEDY, adapter="trained")] * len(PROMPTS)
        completions = built.generate(PROMPTS, asked)
    for model in (unmerged, unmerged.merge_and_unload()):
        reference = Reference(stage.model, PROMPTS)
        reference.__dict__["model"] = model
        assert reference.unexplained(completions) == []
    assert json.loads((tmp_path / "adapters/trained/adapter_config.json").read_text())["use_rslora"]


def test_a_rank_says_what_any_error_of_an_adapters_files_was_and_goes_on() -> None:
    class Broken:
        def load_adapter(self, number: int, adapter: Adapter) -> None:
            raise ValueError("no such number")

    runner: Any = Broken()
    assert _load_adapter(runner, 0, "a", "f", "/nowhere") == "ValueError: no such number"


@pytest.mark.long  # ranks are processes
@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_share_each_adapter(stage: Stage, tmp_path: Path) -> None:
    """And one that does not fit them ends its request alone, while steps are under way."""
    folder = tmp_path / "adapters"
    shutil.copytree(stage.adapters, folder)
    other = make_checkpoint(tmp_path / "other", replace(SHAPE, hidden_size=64))
    make_adapter(folder / "of_another", other, seed=1)
    for overlaps in (False, True):
        two = stage.config(
            adapters=str(folder), tensor_parallel_size=2, async_scheduling=overlaps, max_adapters=2
        )
        with Engine(two) as built:
            check_answers(stage, built)
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
