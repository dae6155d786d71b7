"""AdmissionGate: when a backlog is admitted from, where a step without prefills is much cheaper.

A step that decodes alone runs from a recorded graph, one with a prefill does not. Where all slots or blocks
are held and sequences wait, each one that ends would let the next one in, and a large part of the steps would
be mixed: 37 % with 256 sequences of 560 tokens. So the places that become free are given together.
"""

from __future__ import annotations

LEFT_SHARE = 16  # places are given together when one in so many of the running sequences has left
MAX_HELD_STEPS = 16  # and at the latest after so many steps


class AdmissionGate:
    """Closed to a lane, and to less urgent ones, by a sequence of it that finds no room.

    It opens when a sixteenth of the running sequences has left, so that fewer than sixteen never wait for
    more than one to leave, and after sixteen steps in any case. More urgent lanes never wait for it.
    """

    def __init__(self, *, batches: bool) -> None:
        """batches: whether to hold anyone at all."""
        self._batches = batches
        self._lane: int | None = None  # the most urgent lane that it is closed to
        self._num_left = 0
        self._num_steps = 0

    def close(self, lane: int) -> None:
        """A sequence that waits in this lane finds no room."""
        if not self._batches:
            return
        if self._lane is None:
            self._num_left = self._num_steps = 0
        self._lane = lane if self._lane is None else min(lane, self._lane)

    def count_left(self, num_seqs: int) -> None:
        """So many running sequences have ended."""
        self._num_left += num_seqs

    def begin_step(self, num_running: int) -> None:
        """A step is about to be scheduled: it may open for it."""
        self._num_steps += 1
        if self._num_left * LEFT_SHARE >= num_running or self._num_steps > MAX_HELD_STEPS:
            self._lane = None

    def holds(self, lane: int) -> bool:
        """Whether a sequence of this lane, which may take no room from others, goes on waiting."""
        return self._lane is not None and lane >= self._lane
