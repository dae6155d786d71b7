"""ScoreTree: continuations of one prompt; tokens that several share are computed and scored once.

Each way through the tree is a sequence that computes its own tokens only. The row of a node's last token scores
the token behind it: for labels of one token each, only the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from engine.schedule.outputs import LogLikelihood
from engine.text.prompts import Tail

Scored = tuple[int, int]  # the node before a token, and the token
MAX_KEPT_TOKENS = 4096  # of tails whose tree is remembered


@dataclass(slots=True, eq=False)
class Targets:
    """The tokens that a sequence scores, in the order of their places: several may share a place.

    places, token_ids: [targets] int64. A place is the number of tokens before it. num_top: how many likely tokens are
    wanted with each. next: how many targets are known, or being computed.
    """

    places: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    num_top: int = 0
    next: int = 0

    @classmethod
    def of(cls, token_ids: list[int], first: int, num_top: int) -> Targets:
        """Score known tokens from place `first` on."""
        return cls(np.arange(first, len(token_ids)), np.array(token_ids[first:], np.int64), num_top)

    def until(self, num_tokens: int) -> slice:
        """Return the targets that become known once num_tokens tokens are computed."""
        return slice(self.next, int(np.searchsorted(self.places, num_tokens, side="right")))


@dataclass(frozen=True)
class Branch:
    """One way through the tree, computed by one sequence: its tokens, and its targets.

    parent: the branch that computes what this one shares with earlier ones.
    places: as of Targets, counted behind the shared tokens.
    """

    token_ids: tuple[int, ...]
    parent: int | None
    places: NDArray[np.int64]
    scored_ids: NDArray[np.int64]


@dataclass(frozen=True)
class TreeShape:
    """The tree for all prompts with the same tails.

    found: each tail's scored tokens, as a branch and a place among its targets; the last entry has several if the end
    is scored, one for each end token.
    """

    branches: tuple[Branch, ...]
    found: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]


def shape_of(tails: tuple[Tail, ...], end_token_ids: tuple[int, ...]) -> TreeShape:
    """Make the tree of the tails. end_token_ids: scored behind each of them; () for none."""
    is_kept = sum(len(token_ids) for token_ids, _ in tails) <= MAX_KEPT_TOKENS
    return (_shape_of if is_kept else _shape_of.__wrapped__)(tails, end_token_ids)


@lru_cache(maxsize=256)
def _shape_of(tails: tuple[Tail, ...], end_token_ids: tuple[int, ...]) -> TreeShape:
    return _Nodes().shape(tails, end_token_ids)


def ends_needed(tails: Iterable[Tail]) -> bool:
    """Whether one of the tails is the beginning of another."""
    ways = sorted(token_ids for token_ids, _ in tails)
    return any(after[: len(way)] == way for way, after in pairwise(ways))


class _Nodes:
    """Numbered nodes of a growing tree: each is the place before a token, node 0 the root."""

    def __init__(self) -> None:
        self._children: dict[Scored, int] = {}
        self._depths = [0]
        self._owners = [0]

    def shape(self, tails: tuple[Tail, ...], end_token_ids: tuple[int, ...]) -> TreeShape:
        """Build the tree, the longest tails first, so that none is the beginning of a later one."""
        ways = [token_ids if end_token_ids else token_ids[:-1] for token_ids, _ in tails]
        branches: list[tuple[tuple[int, ...], int | None]] = []
        for way in sorted(ways, key=len, reverse=True):
            parent = self._add(way, len(branches))
            if not branches or parent is not None:
                branches.append((way, parent))
        scored = [self._scored(tail, end_token_ids) for tail in tails]
        wanted = {pair for entries in scored for entry in entries for pair in entry}
        targets: list[list[Scored]] = [[] for _ in branches]
        place_of: dict[Scored, tuple[int, int]] = {}
        for node, token_id in sorted(wanted, key=lambda pair: (self._depths[pair[0]], pair)):
            target = targets[self._owners[node]]
            place_of[node, token_id] = self._owners[node], len(target)
            target.append((node, token_id))
        shaped = []
        for (way, parent), target in zip(branches, targets, strict=True):
            depths = np.array([self._depths[node] for node, _ in target], np.int64)
            token_ids = np.array([token_id for _, token_id in target], np.int64)
            shaped.append(Branch(way, parent, depths, token_ids))
        found = []
        for entries in scored:
            found.append(tuple(tuple(place_of[pair] for pair in entry) for entry in entries))
        return TreeShape(tuple(shaped), tuple(found))

    def _add(self, way: tuple[int, ...], branch: int) -> int | None:
        """Return the parent branch of a new one; None if it has no node of its own, or is the first."""
        node = 0
        parent = None
        for depth, token_id in enumerate(way, start=1):
            child = self._children.get((node, token_id))
            if child is None:
                if parent is None:
                    parent = self._owners[node]
                child = self._children[node, token_id] = len(self._depths)
                self._depths.append(depth)
                self._owners.append(branch)
            node = child
        return parent if branch else None

    def _scored(self, tail: Tail, end_token_ids: tuple[int, ...]) -> list[list[Scored]]:
        """List a tail's tokens from its place on, each with the node before it; then the end tokens."""
        token_ids, first = tail
        node = 0
        scored = []
        for place, token_id in enumerate(token_ids):
            if place >= first:
                scored.append([(node, token_id)])
            node = self._children.get((node, token_id), -1)  # none behind the last one
        return scored + ([[(node, end) for end in end_token_ids]] if end_token_ids else [])


@dataclass
class ScoreTree:
    """The tree of one request, and its known scores."""

    num_prompt_tokens: int
    shape: TreeShape
    num_cached_tokens: int = 0
    _known: dict[int, tuple[list[float], list[int]]] = field(default_factory=dict)

    def take(self, branch: int, logprobs: list[float], ranks: list[int]) -> bool:
        """Take a branch's scores; return whether all are known."""
        self._known[branch] = logprobs, ranks
        return len(self._known) == len(self.shape.branches)

    def results(self) -> list[LogLikelihood]:
        """Return the likelihood of each tail, once all scores are known."""
        return [self._of(entries) for entries in self.shape.found]

    def _of(self, entries: tuple[tuple[tuple[int, int], ...], ...]) -> LogLikelihood:
        logprobs = []
        is_greedy = []
        for entry in entries:
            entry_logprobs = []
            entry_ranks = []
            for branch, place in entry:
                branch_logprobs, branch_ranks = self._known[branch]
                entry_logprobs.append(branch_logprobs[place])
                entry_ranks.append(branch_ranks[place])
            logprobs.append(_either(entry_logprobs))
            is_greedy.append(1 in entry_ranks)
        return LogLikelihood.of(tuple(logprobs), tuple(is_greedy))


def _either(logprobs: list[float]) -> float:
    """Return the log of the probability of any of several tokens."""
    if len(logprobs) == 1:
        return logprobs[0]
    highest = max(logprobs)
    if highest == -np.inf:
        return highest
    return highest + log(sum(exp(logprob - highest) for logprob in logprobs))
