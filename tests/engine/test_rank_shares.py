"""How ranks share a model, and what the driver sends them: it arrives as it was."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine import ConfigError, Engine, EngineConfig
from engine.checkpoint.model_config import read_model_config
from engine.checkpoint.weights import CheckpointTensor
from engine.layers.parallel import TensorParallel
from engine.run.forward.model_runner import ModelRunner
from engine.sampling.logit_edits import EditParts
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows
from engine.schedule.step_batch import StepBatch
from engine.tensor_parallel import rank_group
from engine.tensor_parallel.block_tables import KeptTables, SentTables
from engine.tensor_parallel.messages import Channel, Kind, encode, pack_step, unpack_step
from engine.tensor_parallel.rank_group import RankGroup, RankProcess, rank_devices
from tests.engine.reference import Reference
from tests.engine.two_ranks import SHAPE_OF, check_nothing_is_left, compare, config, ranks_of


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
    runner = ModelRunner(
        config(folder, shape), read_model_config(folder), folder, TensorParallel(rank, size)
    )
    assert all("norm" in name or name.endswith("o_proj.bias") for name in read_whole)
    parameters = {
        name: parameter.to_dense() if parameter.is_mkldnn else parameter.cpu()
        for name, parameter in runner.model.named_parameters()
    }
    features, kv_head = 16 * 4 // size, rank * 2 // size
    prefix = "model.layers.1.self_attn"
    for kind in ("weight", "bias"):
        query = weights[f"{prefix}.q_proj.{kind}"].split(features)[rank]
        heads = 2 // size or 1
        others = [
            weights[f"{prefix}.{name}_proj.{kind}"][16 * kv_head : 16 * (kv_head + heads)]
            for name in "kv"
        ]
        torch.testing.assert_close(
            parameters[f"{prefix}.qkv_proj.{kind}"], torch.cat((query, *others))
        )
    columns = weights[f"{prefix}.o_proj.weight"].split(features, dim=1)[rank]
    torch.testing.assert_close(parameters[f"{prefix}.o_proj.weight"], columns)
    rows = weights["lm_head.weight"].split(512 // size)[rank]
    torch.testing.assert_close(parameters["lm_head.weight"], rows)


class QuickRank:
    """A rank that has sent all messages of a start before the driver reads the first."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank = rank
        driver_end, self._end = socket.socketpair()
        self.channel = Channel(driver_end, timeout_s)
        pool = {"num_blocks": 600, "num_bytes": 1, "max_model_len": 200, "states": None}
        for kind, facts in (
            (Kind.ARRIVED, None),
            (Kind.MET, None),
            (Kind.READY, (pool, "torch", False)),
        ):
            self._end.sendall(encode(kind, facts))

    def kill(self) -> None:
        self.channel.close()
        self._end.close()


class OneRankAtATime(RankGroup):
    """Reads all that a rank has sent before it looks at the next one."""

    def _readable(self, deadline: float) -> Iterator[RankProcess]:
        yield min(super()._readable(deadline), key=lambda rank: rank.rank)


def test_a_rank_that_is_steps_ahead_of_another_does_not_end_the_start(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "RankProcess", QuickRank)
    folder = folders["gqa2_tied_hub"]
    model = read_model_config(folder)
    group = OneRankAtATime(config(folder, SHAPE_OF["gqa2_tied_hub"]), model, folder)
    assert group.pool_size.num_blocks == 600
    group._kill()


def test_sizes_that_cannot_work_are_named_before_a_rank_starts(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "RankProcess", None)
    with pytest.raises(
        ConfigError, match="tensor_parallel_size=2: 3 KV heads cannot be shared by 2 ranks"
    ):
        Engine(config(folders["gqa2_sharded"], SHAPE_OF["gqa2_sharded"]))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    four = EngineConfig("m", device="cuda", tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 needs 4 GPUs, torch finds 2"):
        rank_devices(four)
    with pytest.raises(ConfigError, match="device='cuda:1' is one GPU"):
        rank_devices(replace(four, device="cuda:1"))
    assert rank_devices(replace(four, tensor_parallel_size=2)) == ["cuda:0", "cuda:1"]


def test_a_step_arrives_as_it_was() -> None:
    """Also megabytes of it through a socket's small buffer; then the end of the other side is seen."""
    ids, lens = np.arange(4), np.arange(1, 3)
    step = StepBatch(ids, ids + 1, ids + 2, ids[:2], np.ones((2, 300_000), np.int32), lens, lens)
    values = neutral_rows(3)
    values["temperature"] = values["seed"] = np.arange(3)
    parts = EditParts(pending=[(1, 0)], banned=[(0, np.array([1, 2])), (1, np.array([7]))])
    parts.penalize(1, (0.5, 1.5, 2.5), np.array([(7, 1), (-1, 0)], np.int32))
    ours, theirs = map(Channel, socket.socketpair())
    with ThreadPoolExecutor(1) as thread:
        for edits in (None, parts.joined(np.array([0, 2]))):
            sampling = SamplingBatch(values, np.arange(3, dtype=np.uint64), edits)
            arrays = pack_step(step, sampling, SentTables(2, 16))
            sent = thread.submit(ours.send, encode(Kind.STEP, arrays=arrays))
            received = theirs.receive()
            sent.result()
            assert received.kind is Kind.STEP
            assert repr(unpack_step(received.arrays, KeptTables(2, 64, 16))) == repr(
                (step, sampling)
            )
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["gqa1_untied", "gqa2_tied_hub", "gqa4_tied"])
def test_tokens_of_two_gpus_equal_transformers(name: str, references: dict[str, Reference]) -> None:
    """Four, two and one KV head; the torch backend, whose float32 is the reference's."""
    reference = references[name]
    on_gpu = config(reference.folder, SHAPE_OF[name], device="cuda", attention_backend="torch")
    with Engine(on_gpu) as built:
        compare(reference, built)
        pids, port = ranks_of(built).pids, ranks_of(built)._store.port  # type: ignore[union-attr]
    check_nothing_is_left(pids, port)
