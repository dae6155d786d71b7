"""Two ranks say what one says; and whatever happens to one of them, the engine ends with one clear error."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import (
    ConfigError,
    Engine,
    EngineConfig,
    EngineStats,
    MissingWeights,
    PoolingParams,
    RankFailed,
    SamplingParams,
)
from engine.checkpoint.model_config import read_model_config
from engine.checkpoint.weights import CheckpointTensor
from engine.layers.parallel import Share, TensorParallel
from engine.run.model_runner import ModelRunner
from engine.sampling.logit_edits import EditParts
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows
from engine.schedule.step_batch import StepBatch
from engine.tensor_parallel import rank_group
from engine.tensor_parallel.channel import Channel
from engine.tensor_parallel.messages import (
    DTYPES,
    PREFIX_BYTES,
    Kind,
    decode,
    encode,
    pack_step,
    unpack_step,
)
from engine.tensor_parallel.rank_group import RankGroup, rank_devices
from engine.tensor_parallel.rank_process import RankProcess
from tests.engine.checkpoints import SHAPES, Shape, make_checkpoint, pool_bytes
from tests.engine.embedding_models import Truth
from tests.engine.reference import NUM_NEW_TOKENS, Reference
from tests.engine.test_determinism import requests as seeded_requests
from tests.engine.test_loglikelihood import check as check_loglikelihood
from tests.engine.test_logprobs import check as check_logprobs
from tests.engine.test_logprobs import generate, mixed_requests, true_logprobs

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
SHAPE_OF = {shape.name: shape for shape in SHAPES}
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


def config(folder: Path, shape: Shape, *, pool_blocks: int = 600, **changes: Any) -> EngineConfig:
    """Two ranks in float32, each with pool_blocks blocks of its own KV heads."""
    per_rank = replace(shape, num_kv_heads=max(1, shape.num_kv_heads // 2))
    values: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 200, "max_num_seqs": 32, "max_num_batched_tokens": 2048,
        "kv_cache_bytes": pool_bytes(per_rank, pool_blocks), "tensor_parallel_size": 2,
    }  # fmt: skip
    return EngineConfig(str(folder), **{**values, **changes})


def ranks_of(built: Engine) -> RankGroup:
    runner = built._open_runner()
    assert isinstance(runner, RankGroup)
    return runner


def wait_until(condition: Callable[[], object], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)  # a process's state announces nothing


def check_nothing_is_left(pids: list[int], port: int) -> None:
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


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


def test_log_probabilities_are_those_of_the_whole_vocabulary(
    shared: Engine, references: dict[str, Reference]
) -> None:
    """Of which each rank computes a part."""
    asked = mixed_requests()[3:7]
    truth = true_logprobs(references["gqa2_tied_hub"])
    check_logprobs(generate(shared, asked), asked, truth)


def test_embeddings_come_from_the_ranks(shared: Engine, folders: dict[str, Path]) -> None:
    """Beside completions, whose tokens travel in the same messages."""
    truth = Truth(folders["gqa2_tied_hub"])
    prompts = [[7 + i] * (9 * i + 1) for i in range(4)]
    params = [PoolingParams(), SamplingParams(max_tokens=3, logprobs=1), PoolingParams(), PoolingParams()]
    found = shared.generate(prompts, params)
    assert found[1].embedding is None
    for i in (0, 2, 3):
        assert found[i].embedding == pytest.approx(truth.pooled(prompts[i], "mean").tolist(), abs=1e-5)


def test_what_prompts_share_is_copied_on_each_rank(shared: Engine, references: dict[str, Reference]) -> None:
    """Twenty-one tokens are one block and five tokens: the first computes them, the others' rank copies."""
    truth = true_logprobs(references["gqa2_tied_hub"])
    pairs = [([11 + i for i in range(21)], [40 + i, 41, 42]) for i in range(6)]
    before = shared.stats().prefill_tokens
    for found, pair in zip(shared.loglikelihood(pairs), pairs, strict=True):
        check_loglikelihood(found, truth, *pair)
    assert shared.stats().prefill_tokens - before == 21 + 6 * 2, "a last token is scored, not computed"


@pytest.fixture
def doomed(folders: dict[str, Path]) -> Iterator[Engine]:
    """An engine whose ranks a test may hurt, with requests under way; nothing of it may be left."""
    with Engine(config(folders["gqa1_untied"], SHAPE_OF["gqa1_untied"])) as built:
        pids, port = ranks_of(built).pids, ranks_of(built)._store.port  # type: ignore[union-attr]
        for i in range(3):
            built.add(str(i), [5, 6, 7 + i], GREEDY)
        built.step()
        yield built
        check_nothing_is_left(pids, port)
        built.close()


def compare(reference: Reference, built: Engine) -> EngineStats:
    """Every token equals transformers', save ties; no block is lost."""
    assert reference.unexplained(built.generate(reference.prompts, GREEDY)) == []
    stats = built.stats()
    assert stats.free_blocks == stats.num_blocks
    return stats


# What two ranks say


def test_two_kv_heads_and_tied_embeddings_give_transformers_tokens(
    shared: Engine, references: dict[str, Reference]
) -> None:
    stats = compare(references["gqa2_tied_hub"], shared)
    assert stats.cached_tokens > 0
    assert stats.num_blocks == 600, "the pool is counted per rank, with half of the KV heads"


def test_four_kv_heads_and_chunked_prefill_give_transformers_tokens(references: dict[str, Reference]) -> None:
    reference, shape = references["gqa1_untied"], SHAPE_OF["gqa1_untied"]
    chunked = {"max_num_seqs": 6, "max_num_batched_tokens": 13, "enable_prefix_caching": False}
    with Engine(config(reference.folder, shape, **chunked)) as built:
        stats = compare(reference, built)
        assert stats.prefill_tokens == sum(map(len, reference.prompts)) > 13 * 44
        assert stats.cached_tokens == 0


def test_one_kv_head_on_both_ranks_and_preemption_give_transformers_tokens(
    references: dict[str, Reference],
) -> None:
    reference, shape = references["gqa4_tied"], SHAPE_OF["gqa4_tied"]
    with Engine(config(reference.folder, shape, pool_blocks=14, max_num_batched_tokens=33)) as built:
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
    with Engine(config(odd, ODD, **large, tensor_parallel_size=1, kv_cache_bytes=bytes_alone)) as built:
        (one,) = built.generate([long], few)
    assert two.token_ids == one.token_ids


def test_an_engine_of_ranks_names_their_attention_backend(shared: Engine) -> None:
    assert shared.attention_backend in ("cpu", "torch")


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
            replace(GREEDY, presence_penalty=1.0, repetition_penalty=1.5, allowed_token_ids=range(0, 512, 3)),
            SamplingParams(max_tokens=12, seed=4, frequency_penalty=2.0, logit_bias={9: 5, 99: 5}, n=2),
            replace(GREEDY, bad_words=["a", "the", "lazy dog"]),
        ]
        expected = alone.generate(prompts, params)
    answers = shared.generate(prompts, params)
    assert [c.token_ids for c in answers] == [c.token_ids for c in expected]
    assert len(answers[-5].token_ids) > 4
    assert not set(ends) & set(answers[-5].token_ids[:4])


# How they share a model


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_ranks_cover_every_dimension_once(size: int) -> None:
    ranks = [TensorParallel(rank, size) for rank in range(size)]
    for total in (24, 24 * size):
        shares = [tp.share(total, "heads") for tp in ranks]
        assert sum(share.length for share in shares) == total
        assert [share.start for share in shares] == [i * total // size for i in range(size)]
    for total in (1, 2, 509, 512):
        padded = [tp.share_padded(total) for tp in ranks]
        covered = [i for share in padded for i in range(share.start, share.start + share.length)]
        assert covered == list(range(total))
        assert max(share.length for share in padded) == ranks[0].padded_length(total)


def test_a_kv_head_goes_to_the_ranks_whose_queries_attend_to_it() -> None:
    """8 ranks of 16 query heads over 2 KV heads: ranks 0 to 3 hold the first, 4 to 7 the second."""
    shares = [TensorParallel(rank, 8).share_or_copy(2, "KV heads") for rank in range(8)]
    assert shares == [Share(rank // 4, 1, 2) for rank in range(8)]
    with pytest.raises(ConfigError, match="tensor_parallel_size=8: 3 KV heads"):
        TensorParallel(0, 8).share_or_copy(3, "KV heads")


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (2, 4)])
def test_a_rank_reads_only_its_share_of_the_checkpoint(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, rank: int, size: int
) -> None:
    """Query heads, the KV head they attend to, MLP features and vocabulary; norms and one bias whole."""
    shape, folder = SHAPE_OF["gqa2_bias"], folders["gqa2_bias"]
    weights, read_whole = load_file(folder / "model.safetensors"), set()

    def whole(tensor: CheckpointTensor) -> torch.Tensor:
        read_whole.add(tensor.name)
        return weights[tensor.name]

    monkeypatch.setattr(CheckpointTensor, "whole", whole)
    runner = ModelRunner(config(folder, shape), read_model_config(folder), folder, TensorParallel(rank, size))
    assert all("norm" in name or name.endswith("o_proj.bias") for name in read_whole)
    parameters = {
        name: parameter.to_dense() if parameter.is_mkldnn else parameter
        for name, parameter in runner.model.named_parameters()
    }
    features, kv_head = 16 * 4 // size, rank * 2 // size
    prefix = "model.layers.1.self_attn"
    for kind in ("weight", "bias"):
        query = weights[f"{prefix}.q_proj.{kind}"].split(features)[rank]
        heads = 2 // size or 1
        others = [
            weights[f"{prefix}.{name}_proj.{kind}"][16 * kv_head : 16 * (kv_head + heads)] for name in "kv"
        ]
        torch.testing.assert_close(parameters[f"{prefix}.qkv_proj.{kind}"], torch.cat((query, *others)))
    columns = weights[f"{prefix}.o_proj.weight"].split(features, dim=1)[rank]
    torch.testing.assert_close(parameters[f"{prefix}.o_proj.weight"], columns)
    rows = weights["lm_head.weight"].split(512 // size)[rank]
    torch.testing.assert_close(parameters["lm_head.weight"], rows)


def test_sizes_that_cannot_work_are_named_before_a_rank_starts(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "RankProcess", None)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2: 3 KV heads cannot be shared by 2 ranks"):
        Engine(config(folders["gqa2_sharded"], SHAPE_OF["gqa2_sharded"]))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    four = EngineConfig("m", device="cuda", tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 needs 4 GPUs, torch finds 2"):
        rank_devices(four)
    with pytest.raises(ConfigError, match="device='cuda:1' is one GPU"):
        rank_devices(replace(four, device="cuda:1"))
    assert rank_devices(replace(four, tensor_parallel_size=2)) == ["cuda:0", "cuda:1"]


# How they speak


def test_messages_arrive_as_they_were_whatever_their_size() -> None:
    """Every dtype, empty arrays, and megabytes through a socket's small buffer."""
    rng = np.random.default_rng(1)
    arrays = [rng.integers(0, 200, size).astype(dtype) for dtype in DTYPES for size in (0, 1, 13, (5, 3))]
    arrays += [rng.integers(0, 9, (700, 1001)), np.zeros((0, 2), np.int64), np.asfortranarray(arrays[7])]
    ours, theirs = map(Channel, socket.socketpair())
    message = encode(Kind.STEP, arrays)
    assert len(message) > 5_000_000
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(ours.send, message)
        received = theirs.receive()
        sent.result()
    assert received.kind is Kind.STEP
    for array, expected in zip(received.arrays, arrays, strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()


def test_a_step_arrives_as_it_was() -> None:
    ids, lens = np.arange(4), np.arange(1, 3)
    step = StepBatch(ids, ids + 1, ids + 2, ids[:2], np.ones((2, 3), np.int32), lens, lens)
    values = neutral_rows(3)
    values["temperature"] = values["seed"] = np.arange(3)
    parts = EditParts(pending=[(1, 0)], banned=[(0, np.array([1, 2])), (1, np.array([7]))])
    parts.penalize(1, (0.5, 1.5, 2.5), np.array([(7, 1), (-1, 0)], np.int32))
    for edits in (None, parts.joined(np.array([0, 2]))):
        sampling = SamplingBatch(values, np.arange(3, dtype=np.uint64), edits)
        message = encode(Kind.STEP, pack_step(step, sampling))
        prefix, body = message[:PREFIX_BYTES], bytearray(message[PREFIX_BYTES:])
        same_step, same_sampling = unpack_step(decode(prefix, body).arrays)
        assert repr(same_step) == repr(step)
        assert repr(same_sampling) == repr(sampling)


# What happens to a rank


def test_a_rank_killed_in_a_step_takes_its_engine_down_and_no_other(doomed: Engine, shared: Engine) -> None:
    """It is frozen first, so that the step is under way when it dies; the other engine goes on."""
    victim = psutil.Process(ranks_of(doomed).pids[1])
    assert ranks_of(doomed)._store.port != ranks_of(shared)._store.port  # type: ignore[union-attr]
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


def test_rank_0_killed_between_two_steps_is_named_at_the_next(doomed: Engine) -> None:
    victim = psutil.Process(ranks_of(doomed).pids[0])
    victim.kill()
    wait_until(lambda: victim.status() == psutil.STATUS_ZOMBIE)
    with pytest.raises(RankFailed, match="rank 0 failed: it was killed by SIGKILL"):
        doomed.step()


def test_a_rank_that_raises_is_named_with_its_error(doomed: Engine) -> None:
    """Rank 1 is to sample rows that do not exist, while rank 0 waits for it in a sum."""
    group = ranks_of(doomed)
    send = group._send

    def spoil(rank: RankProcess, message: bytes) -> None:
        if rank.rank == 1:
            arrays = decode(message[:PREFIX_BYTES], bytearray(message[PREFIX_BYTES:])).arrays
            step, sampling = unpack_step(arrays)
            step = replace(step, sample_rows=step.sample_rows + 10**9)
            message = encode(Kind.STEP, pack_step(step, sampling))
        send(rank, message)

    group._send = spoil  # type: ignore[method-assign]
    with pytest.raises(RankFailed, match=r"rank 1 failed: IndexError: .*out of bounds"):
        doomed.step()


def test_a_rank_that_hangs_is_given_up(doomed: Engine) -> None:
    group = ranks_of(doomed)
    group._step_timeout_s = 1.0
    psutil.Process(group.pids[1]).suspend()
    with pytest.raises(RankFailed, match="no answer in 1 s"):
        doomed.step()


def test_an_interrupted_step_ends_the_ranks(doomed: Engine) -> None:
    """An answer that nobody waits for any more, or half of one, would be taken for the next step's."""

    def interrupted(deadline: float) -> Iterator[RankProcess]:
        raise KeyboardInterrupt

    ranks_of(doomed)._readable = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        doomed.step()
    with pytest.raises(RankFailed, match="interrupted by KeyboardInterrupt"):
        doomed.step()


# How they start and end


def test_missing_weights_are_the_error_one_process_would_raise(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """And no rank is left, whichever of them said so first."""
    folder = Path(shutil.copytree(folders["gqa1_untied"], tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    before = psutil.Process().children(recursive=True)
    with pytest.raises(MissingWeights, match=r"rank [01]: .* lacks 1 tensors .* model\.norm\.weight"):
        Engine(config(folder, SHAPE_OF["gqa1_untied"]))
    assert psutil.Process().children(recursive=True) == before


def test_a_rank_that_dies_while_it_starts_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


DRIVER = """
import sys, threading, time
import torch
from engine import Engine, EngineConfig, SamplingParams

model, in_main_thread = sys.argv[1], sys.argv[2] == "main"
torch.set_num_threads(1)
made = []
make = lambda: made.append(Engine(EngineConfig(model, kv_cache_bytes=1 << 22, tensor_parallel_size=2)))
if in_main_thread:
    make()
else:
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
(engine,) = made
engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
print(*engine._live_runner.pids, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("made_by", ["main", "a thread that has ended"])
def test_ranks_die_with_a_driver_that_is_killed(folder: Path, made_by: str) -> None:
    """Frozen ones through the kernel, where the main thread made them; others also by their lifeline."""
    command = [sys.executable, "-c", DRIVER, str(folder), made_by]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    ranks = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    assert len(ranks) == 2
    for rank in ranks:
        for number in (signal.SIGINT, signal.SIGTERM):  # not theirs to act on
            rank.send_signal(number)
        assert os.getpgid(rank.pid) != os.getpgid(driver.pid)
        if made_by == "main" and sys.platform == "linux":
            rank.suspend()
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert psutil.wait_procs(ranks, timeout=5)[1] == []


def test_one_rank_starts_no_process_and_no_group(folder: Path) -> None:
    import torch.distributed as dist

    before, threads = psutil.Process().children(), threading.active_count()
    with Engine(config(folder, SHAPE_OF["gqa2_tied_hub"], tensor_parallel_size=1)) as built:
        built.generate([[5, 6, 7]], GREEDY)
        assert psutil.Process().children() == before
        assert threading.active_count() == threads
        assert not dist.is_initialized()
