"""Two ranks say what one says; and whatever happens to one of them, the engine ends with one clear error."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from engine import Completion, Engine, MissingWeights, RankFailed, SamplingParams
from engine.checkpoint.model_config import read_model_config
from engine.tensor_parallel import rank_group
from engine.tensor_parallel.messages import LENGTH_BYTES, STEP_ARRAYS, Kind, decode, encode
from engine.tensor_parallel.rank_group import RankGroup, RankProcess
from tests.engine.checkpoints import Shape, make_checkpoint, pool_bytes
from tests.engine.forked_ranks import HangingRank
from tests.engine.reference import NUM_NEW_TOKENS, Reference
from tests.engine.test_determinism import requests as seeded_requests
from tests.engine.test_logprobs import check as check_logprobs
from tests.engine.test_logprobs import generate, mixed_requests
from tests.engine.two_ranks import (
    GREEDY,
    SHAPE_OF,
    check_nothing_is_left,
    compare,
    config,
    ranks_of,
)
from tests.forking import ForkedProcess

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("forked_ranks")]

ODD = Shape(
    "odd_vocabulary_and_bias",
    hidden_size=44,
    attention_bias=True,
    vocab_size=509,
    max_positions=16_384,
    rope_theta=900.0,
    seed=6,
)
LONG = 10_000  # tokens; three int64 arrays of them are more than the buffers of a socket


@pytest.fixture(scope="module")
def shared(folders: dict[str, Path]) -> Iterator[Engine]:
    """Two ranks of a model with two KV heads and tied embeddings, for all tests that break nothing."""
    name = "gqa2_tied_hub"
    with Engine(config(folders[name], SHAPE_OF[name], pooling="mean")) as built:
        yield built
        pids, port = ranks_of(built).pids, ranks_of(built)._store.port  # type: ignore[union-attr]
        assert all(map(psutil.pid_exists, pids))
    check_nothing_is_left(pids, port)
    built.close()


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("odd") / ODD.name, ODD)


def test_log_probabilities_are_those_of_the_whole_vocabulary(shared: Engine, truth: Any) -> None:
    """Of which each rank computes a part."""
    asked = mixed_requests()[3:7]
    check_logprobs(generate(shared, asked), asked, truth)


@pytest.fixture
def doomed(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine whose ranks a test may hurt, with requests under way; nothing of it may be left. They are the
    driver's own children."""
    monkeypatch.setattr(rank_group, "RankProcess", RankProcess)
    with Engine(config(folders["gqa1_untied"], SHAPE_OF["gqa1_untied"])) as built:
        pids, port = ranks_of(built).pids, ranks_of(built)._store.port  # type: ignore[union-attr]
        for i in range(3):
            built.add(str(i), [5, 6, 7 + i], GREEDY)
        built.step()
        yield built
        check_nothing_is_left(pids, port)
        built.close()


# What two ranks say


def test_two_kv_heads_and_tied_embeddings_give_transformers_tokens(
    shared: Engine, references: dict[str, Reference]
) -> None:
    stats = compare(references["gqa2_tied_hub"], shared)
    assert stats.cached_tokens > 0
    assert stats.num_blocks == 600, "the pool is counted per rank, with half of the KV heads"


def test_one_kv_head_on_both_ranks_and_preemption_give_transformers_tokens(
    references: dict[str, Reference],
) -> None:
    reference, shape = references["gqa4_tied"], SHAPE_OF["gqa4_tied"]
    with Engine(
        config(reference.folder, shape, pool_blocks=14, max_num_batched_tokens=33)
    ) as built:
        stats = compare(reference, built)
        assert stats.num_preemptions > 0
        assert stats.cached_tokens > 0


def test_an_odd_vocabulary_biases_and_a_prompt_beyond_any_buffer(odd: Path) -> None:
    """509 entries are padded to 510, untied; only one rank adds the bias of a sum."""
    reference = Reference(odd)
    long = [3 + i * i % 490 for i in range(LONG)]
    large = {"max_model_len": LONG + 200, "max_num_batched_tokens": LONG + 200, "pool_blocks": 1000}
    few = replace(GREEDY, max_tokens=3)
    with Engine(config(odd, ODD, **large)) as built:
        compare(reference, built)
        (two,) = built.generate([long], few)
        assert two.num_prompt_tokens == LONG
    bytes_alone = pool_bytes(ODD, 1000)
    with Engine(
        config(odd, ODD, **large, tensor_parallel_size=1, kv_cache_bytes=bytes_alone)
    ) as built:
        (one,) = built.generate([long], few)
    assert two.token_ids == one.token_ids


def test_seeded_sampling_is_that_of_one_rank(shared: Engine) -> None:
    """Temperature, top_k, top_p, min_p, several samples of one prompt, bans at first, other edits."""
    prompts, params = map(list, zip(*seeded_requests(), strict=True))
    with Engine(replace(shared.config, tensor_parallel_size=1)) as alone:
        (free,) = alone.generate([prompts[0]], GREEDY)
        ends = tuple(set(free.token_ids))
        prompts.append(prompts[0])
        params.append(replace(GREEDY, max_tokens=6, min_tokens=4, stop_token_ids=ends))
        prompts += prompts[:3]
        params += [
            replace(
                GREEDY,
                presence_penalty=1.0,
                repetition_penalty=1.5,
                allowed_token_ids=range(0, 512, 3),
            ),
            SamplingParams(
                max_tokens=12, seed=4, frequency_penalty=2.0, logit_bias={9: 5, 99: 5}, n=2
            ),
            replace(GREEDY, bad_words=["a", "the", "lazy dog"]),
        ]
        expected = alone.generate(prompts, params)
    answers = shared.generate(prompts, params)
    assert [c.token_ids for c in answers] == [c.token_ids for c in expected]
    assert len(answers[-5].token_ids) > 4
    assert not set(ends) & set(answers[-5].token_ids[:4])


# What happens to a rank


def test_a_rank_killed_in_a_step_takes_its_engine_down_and_no_other(
    doomed: Engine, shared: Engine
) -> None:
    """It is frozen first, so that the step is under way when it dies; the other engine goes on."""
    victim = psutil.Process(ranks_of(doomed).pids[1])
    victim.suspend()
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(doomed.step)
        time.sleep(0.3)
        assert not step.done()
        victim.kill()
        killed_at = time.monotonic()
        with pytest.raises(RankFailed, match="rank 1 failed: it was killed by SIGKILL") as failure:
            step.result(timeout=60)
    assert time.monotonic() - killed_at < 5
    assert failure.value.args == (1, "it was killed by SIGKILL")
    assert doomed.stats().free_blocks == doomed.stats().num_blocks
    with pytest.raises(RankFailed, match="rank 1 failed"):
        doomed.step()
    (completion,) = shared.generate([[5, 6, 7]], GREEDY)
    assert len(completion.token_ids) == NUM_NEW_TOKENS


def test_a_rank_that_raises_is_named_with_its_error(doomed: Engine) -> None:
    """Rank 1 is to sample rows that do not exist, while rank 0 waits for it in a sum."""
    group = ranks_of(doomed)
    send = group._send

    def spoil(rank: RankProcess, message: bytes) -> None:
        if rank.rank == 1:
            arrays = decode(message[LENGTH_BYTES:]).arrays
            arrays[STEP_ARRAYS.index("sample_rows")] += 10**9
            message = encode(Kind.STEP, arrays=arrays)
        send(rank, message)

    group._send = spoil  # type: ignore[method-assign]
    with pytest.raises(RankFailed, match=r"rank 1 failed: IndexError: .*out of bounds"):
        doomed.step()


NAME = "gqa2_tied_hub"


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Drawn and greedy ones, ends by length, by stop token and by bans, and shared prefixes."""
    prompts = [[5, 6, 7 + i % 3] * (1 + i % 4) for i in range(9)]
    greedy = [
        replace(GREEDY, max_tokens=1 + 18 * (i % 3), stop_token_ids=(i, 300 + i)) for i in range(9)
    ]
    return [*seeded_requests()[:6], *zip(prompts, greedy, strict=True)]


def steps(built: Engine, num_steps: int = 400) -> list[Completion]:
    """So many steps of an engine, or as many as it needs."""
    done: list[Completion] = []
    for _ in range(num_steps):
        if built.has_unfinished:
            done += built.step()
    return done


def test_overlapping_ranks_give_the_tokens_of_ranks_that_wait(folders: dict[str, Path]) -> None:
    """Also where an urgent request preempts others, one is aborted, and nobody waits for a step."""
    answers = []
    for overlap in (False, True):
        few = config(folders[NAME], SHAPE_OF[NAME], max_num_seqs=4, max_num_batched_tokens=20)
        with Engine(replace(few, async_scheduling=overlap)) as built:
            asked = [(str(i), *request) for i, request in enumerate(requests())]
            for each in asked[:-2]:
                built.add(*each, lane=1)
            done = [*map(asdict, steps(built, 5))]
            assert built._stepper.in_flight == overlap
            built.abort("1")
            done += map(asdict, steps(built, 3))
            for each in asked[-2:]:
                built.add(*each, lane=0)
            done += map(asdict, steps(built, 4))
            if overlap:
                built._stepper._start_over(RuntimeError("a step that raised"))
            done += map(asdict, steps(built))
            group = ranks_of(built)
            assert group._num_launched - group._num_answered == 0
            assert built.stats().num_preemptions > 0
            answers.append(sorted(done, key=lambda each: (int(each["request_id"]), each["index"])))
    for each in answers[0] + answers[1]:
        del each["num_cached_tokens"], each["metrics"]  # withdrawn steps publish nothing
    assert answers[0] == answers[1]
    assert {each["request_id"] for each in answers[0]} == {each[0] for each in asked} - {"1"}


def test_missing_weights_are_the_error_one_process_would_raise(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """And no rank is left, whichever of them said so first."""
    folder = Path(shutil.copytree(folders["gqa1_untied"], tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    before = psutil.Process().children(recursive=True)
    with pytest.raises(
        MissingWeights, match=r"rank [01]: .* lacks 1 tensors .* model\.norm\.weight"
    ):
        Engine(config(folder, SHAPE_OF["gqa1_untied"]))
    assert psutil.Process().children(recursive=True) == before


def test_a_rank_that_dies_while_it_starts_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stillborn(RankProcess):
        def __init__(self, rank: int, timeout_s: float) -> None:
            super().__init__(rank, timeout_s)
            if rank == 1:
                os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(rank_group, "RankProcess", Stillborn)
    before = psutil.Process().children(recursive=True)
    with pytest.raises(RankFailed, match="rank 1 failed: it was killed by SIGKILL"):
        Engine(config(folder, SHAPE_OF["gqa2_tied_hub"]))
    assert psutil.Process().children(recursive=True) == before


def test_every_rank_is_told_how_many_sequences_the_driver_schedules(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their GPUs may differ, and each alone would take its own default."""
    monkeypatch.setattr("engine.run.device.default_num_seqs", lambda device: 7)
    told = []
    send = RankGroup._send

    def note(group: RankGroup, rank: RankProcess, message: bytes) -> None:
        decoded = decode(message[LENGTH_BYTES:])
        if decoded.kind == Kind.START:
            told.append(decoded.facts["config"]["max_num_seqs"])
        send(group, rank, message)

    monkeypatch.setattr(RankGroup, "_send", note)
    with Engine(config(folder, SHAPE_OF["gqa2_tied_hub"], max_num_seqs=None)) as engine:
        assert engine.max_num_seqs == 7
    assert told == [7, 7]


def test_ranks_that_do_not_meet_end_the_start_with_a_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "RankProcess", HangingRank)
    model = read_model_config(folder)
    ForkedProcess(os.getpid).wait()  # the process that forks ranks is there before
    before = psutil.Process().children(recursive=True)
    expected = r"rank 0 failed: it did not meet .* within 0\.5 s.*\(no answer from rank 1 either\)"
    with pytest.raises(RankFailed, match=expected):
        RankGroup(config(folder, SHAPE_OF["gqa2_tied_hub"]), model, folder, meet_timeout_s=0.5)
    assert [process for process in psutil.Process().children() if process not in before] == []


ROOT = Path(__file__).parents[2]
DRIVER = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import torch
from engine import Engine, EngineConfig, SamplingParams

torch.set_num_threads(1)
config = EngineConfig(sys.argv[1], kv_cache_bytes=1 << 22, tensor_parallel_size=2)
with ThreadPoolExecutor(1) as thread:  # which ends before its ranks do
    engine = thread.submit(Engine, config).result()
engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
print(*engine._live_runner.pids, flush=True)
time.sleep(60)
"""


def test_ranks_die_with_a_driver_that_is_killed(folder: Path) -> None:
    command = [sys.executable, "-c", DRIVER, str(folder)]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    ranks = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    assert len(ranks) == 2
    for rank in ranks:
        for number in (signal.SIGINT, signal.SIGTERM):  # not theirs to act on
            rank.send_signal(number)
        assert os.getpgid(rank.pid) != os.getpgid(driver.pid)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert psutil.wait_procs(ranks, timeout=5)[1] == []


DRIVER_OF_A_BUSY_RANK = """
import sys, time
from engine.checkpoint.model_config import read_model_config
from engine.tensor_parallel import rank_group

hold, _ = rank_group.BOOTSTRAP.rsplit("from", 1)
rank_group.BOOTSTRAP = hold + "import ctypes, os; os.write(descriptor, b'.'); ctypes.PyDLL(None).sleep(60)"
rank = rank_group.RankProcess(0, 60)
rank.channel._read(1)
print(rank.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends a process with its parent")
def test_a_rank_whose_threads_cannot_run_dies_with_its_driver() -> None:
    command = [sys.executable, "-c", DRIVER_OF_A_BUSY_RANK]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    rank = psutil.Process(int(driver.stdout.readline()))
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert psutil.wait_procs([rank], timeout=5)[1] == []
