"""Copies a step to the device, pools its hidden states there, and copies its tokens back."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionMetadata, ForwardBatch, KernelBackend
from engine.attention.state_pool import state_parts
from engine.kernels.upload import upload
from engine.run.forward.row_logprobs import DeviceLogprobs
from engine.run.forward.runner import PendingTokens, Sampled
from engine.sampling.sampling_batch import SamplingBatch
from engine.sampling.sampling_rows import SamplingRows
from engine.schedule.step_batch import StepBatch


def to_device(
    step: StepBatch,
    backend: KernelBackend,
    sampled: Sampled | None = None,
    sampling: SamplingBatch | None = None,
) -> tuple[ForwardBatch, SamplingRows | None]:
    """Copy a step's arrays to the model's device, with the backend's metadata and sampling values.

    sampled: the tokens of the step launched before, for the pending rows.
    """
    pending = step.pending_rows
    places = step.pending_samples
    if len(pending):
        assert sampled is not None, "only a step that follows another has pending rows"
        places = sampled.places[places]
    arrays = [step.token_ids, step.positions, step.slot_mapping, step.sample_rows, pending, places]
    columns = {} if sampling is None else sampling.columns()
    attention, tensors = backend.build_metadata(
        step.block_tables, step.context_lens, step.query_lens, [*arrays, *columns.values()]
    )
    token_ids, positions, slot_mapping, sample_rows, fill_rows, fill_places, *values = tensors
    if sampled is not None and len(pending):
        backend.fill_pending(token_ids, fill_rows, sampled.token_ids, fill_places)
    states = state_parts(step.state_parts, token_ids.device) if len(step.state_parts) else None
    batch = ForwardBatch(token_ids, positions, slot_mapping, sample_rows, attention, states)
    if sampling is None:
        return batch, None
    return batch, SamplingRows(**dict(zip(columns, values, strict=True)))


def with_blocks(
    step: StepBatch, blocks: NDArray[np.int64], backend: KernelBackend
) -> AttentionMetadata:
    """Return metadata in which a block's rows see each other: each such row counts as a sequence of its own.

    The context of that sequence ends with the block, not with the row.

    blocks: of StepPictures.
    """
    ends = np.cumsum(step.query_lens)
    parts: list[tuple[int, int, int]] = []  # sequence, context length, query length
    row = 0
    num_rows = int(ends[-1])
    # the empty block at the end is for the rows behind the last block
    for first, end in [*blocks.tolist(), (num_rows, num_rows)]:
        while row < first:
            seq = int(np.searchsorted(ends, row, side="right"))
            until = min(first, int(ends[seq]))
            parts.append((seq, int(step.context_lens[seq] - ends[seq]) + until, until - row))
            row = until
        if row < end:
            seq = int(np.searchsorted(ends, row, side="right"))
            parts += [(seq, int(step.context_lens[seq] - ends[seq]) + end, 1)] * (end - row)
            row = end
    seqs, contexts, queries = np.array(parts, np.int64).T
    return backend.build_metadata(step.block_tables[seqs], contexts.copy(), queries.copy())[0]


def pool(
    hidden: Tensor, counts: NDArray[np.int64], positions: NDArray[np.int64], modes: tuple[str, ...]
) -> Tensor:
    """Pool each sequence's rows by each mode; return [seqs, modes * hidden] float32, for its PooledStates.

    hidden: [rows, hidden], final states, sequence after sequence.  counts: [seqs] int64, rows of each.
    positions: [rows] int64, each row's place in its sequence.
    """
    ends = np.cumsum(counts)
    firsts, lasts, weights = upload([ends - counts, ends - 1, positions + 1], hidden.device)
    parts = torch.tensor_split(hidden, ends[:-1].tolist())
    pooled = []
    for mode in modes:
        if mode == "lasttoken":
            pooled.append(hidden[lasts].float())
        elif mode == "cls":
            pooled.append(hidden[firsts].float())
        elif mode == "max":
            pooled.append(torch.stack([part.amax(0) for part in parts]).float())
        elif mode == "weightedmean":
            part_weights = torch.tensor_split(weights[:, None].float(), ends[:-1].tolist())
            sums = [
                (part * of_part).sum(0) for part, of_part in zip(parts, part_weights, strict=True)
            ]
            pooled.append(torch.stack(sums))
        else:
            pooled.append(torch.stack([part.sum(0, dtype=torch.float32) for part in parts]))
    return torch.cat(pooled, dim=1)


class DeviceTokens(PendingTokens):
    """Tokens on their way from the device, copied into pinned memory after their step."""

    def __init__(
        self, sampled: Sampled, logprobs: DeviceLogprobs | None = None, pooled: Tensor | None = None
    ) -> None:
        token_ids = sampled.token_ids
        self._places = sampled.places
        self._logprobs = logprobs
        self._has_pooled = pooled is not None
        tensors = [token_ids]
        if logprobs is not None:
            tensors += logprobs.tensors
        if pooled is not None:
            tensors.append(pooled)
        self._event: torch.cuda.Event | None = None
        if not token_ids.is_cuda:
            self._host = [token_ids.clone(), *tensors[1:]]
        else:
            self._host = [
                torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors
            ]
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._event.record(torch.cuda.current_stream(token_ids.device))

    def wait(self) -> NDArray[np.int64]:
        if self._event is not None:
            self._event.synchronize()
        if self._has_pooled:
            self.pooled = self._host[-1].numpy()
        if self._logprobs is not None:
            logprob_tensors = self._host[1:-1] if self._has_pooled else self._host[1:]
            self.logprobs = self._logprobs.on_host(logprob_tensors)
        token_ids: NDArray[np.int64] = self._host[0].numpy()[self._places]
        return token_ids
