"""The running sequences, lane by lane, and which lanes are kept out for a while."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.schedule.sequence import Sequence


@dataclass(frozen=True)
class SlotGroup:
    """Some running sequences, in order; immutable. slots: [seqs] int64, the slot of each."""

    seqs: list[Sequence]
    slots: NDArray[np.int64]

    def select(self, wanted: NDArray[np.bool_]) -> SlotGroup:
        """Return the members for which `wanted`, [seqs] bool, is true."""
        if wanted.all():
            return self
        return SlotGroup(
            [self.seqs[i] for i in np.flatnonzero(wanted).tolist()], self.slots[wanted]
        )


class RunningList:
    """Running sequences by (lane, arrival): the last one is the first to be preempted."""

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []
        self._lanes: dict[int, SlotGroup] | None = {}  # None: to be made anew after a change

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    @property
    def last(self) -> Sequence:
        """The least urgent sequence."""
        return self._seqs[-1]

    @property
    def lanes(self) -> dict[int, SlotGroup]:
        """The sequences by lane, the most urgent lane first."""
        if self._lanes is None:
            by_lane: dict[int, list[Sequence]] = {}
            for seq in self._seqs:
                by_lane.setdefault(seq.lane, []).append(seq)
            self._lanes = {}
            for lane, seqs in by_lane.items():
                slots = np.array([seq.slot for seq in seqs], np.int64)
                self._lanes[lane] = SlotGroup(seqs, slots)
        return self._lanes

    def add(self, seq: Sequence) -> None:
        """Insert a sequence in its place; it has its slot already."""
        if self._seqs and urgency(self._seqs[-1]) > urgency(seq):
            insort(self._seqs, seq, key=urgency)
        else:
            self._seqs.append(seq)
        self._lanes = None

    def remove(self, gone: Iterable[Sequence]) -> None:
        """Take out these sequences, which must all be in the list."""
        leaving = set(gone)
        self._seqs = [seq for seq in self._seqs if seq not in leaving]
        self._lanes = None

    def pop(self) -> Sequence:
        self._lanes = None
        return self._seqs.pop()

    def clear(self) -> None:
        self._seqs = []
        self._lanes = {}

    def move(self, seq: Sequence, lane: int) -> None:
        """Move a running sequence to another lane."""
        self._seqs.remove(seq)
        seq.lane = lane
        self.add(seq)


def urgency(seq: Sequence) -> tuple[int, int]:
    """Return a sort key that puts the most urgent sequence first."""
    return seq.lane, seq.arrival


LEFT_SHARE = 16  # the gate opens when 1 / LEFT_SHARE of the running sequences has left
MAX_HELD_STEPS = 16  # or after this number of steps


class AdmissionGate:
    """Admits no sequence of a lane, or of less urgent lanes, after one of its sequences has found no room.

    The gate opens when a sixteenth of the running sequences has left, and after sixteen steps in any case.
    """

    def __init__(self, *, batches: bool) -> None:
        """batches: admit sequences in batches; without it the gate never closes."""
        self._batches = batches
        self._lane: int | None = None  # the most urgent lane kept out; None while the gate is open
        self._num_left = 0
        self._num_steps = 0

    def close(self, lane: int) -> None:
        """Close the gate to a lane in which a sequence has found no room, and to less urgent lanes."""
        if not self._batches:
            return
        if self._lane is None:
            self._num_left = 0
            self._num_steps = 0
            self._lane = lane
        self._lane = min(lane, self._lane)

    def count_left(self, num_seqs: int) -> None:
        """Count running sequences that have ended."""
        self._num_left += num_seqs

    def begin_step(self, num_running: int) -> None:
        """Open the gate, if it is time, before a step is scheduled."""
        self._num_steps += 1
        if self._num_left * LEFT_SHARE >= num_running or self._num_steps > MAX_HELD_STEPS:
            self._lane = None

    def holds(self, lane: int) -> bool:
        """Whether sequences of this lane have to wait."""
        return self._lane is not None and lane >= self._lane
