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
Found = tuple[int, int]  # a branch, and an index into its targets
MAX_KEPT_TOKENS = 4096  # of tails whose tree is remembered


@dataclass(slots=True, eq=False)
class Targets:
    """The tokens that a sequence scores, in the order of their places: several may share a place.

    places, token_ids: [targets] int64. A token's place is the number of tokens before it.
    num_top: how many likely tokens are wanted with each target.
    next: how many of the targets launched steps have scored, or are scoring.
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
    """A path from the tree's root to one of its leaves, computed by one sequence.

    token_ids: all tokens of the path.  parent: the earlier branch that computes the last token that this path shares
    with it; None for the first branch, which also computes the prompt.
    places, scored_ids: the branch's targets, as in Targets. Here a place is counted from the end of the prompt.
    """

    token_ids: tuple[int, ...]
    parent: int | None
    places: NDArray[np.int64]
    scored_ids: NDArray[np.int64]


@dataclass(frozen=True)
class TreeShape:
    """The tree for all prompts with the same tails.

    found: for each tail an entry for each scored token, which says where its score is found. If the end is scored, a
    last entry has one place for each end token.
    """

    branches: tuple[Branch, ...]
    found: tuple[tuple[tuple[Found, ...], ...], ...]


def shape_of(tails: tuple[Tail, ...], end_token_ids: tuple[int, ...]) -> TreeShape:
    """Make the tree of the tails. end_token_ids: scored behind each of them; () for none."""
    is_kept = sum(len(token_ids) for token_ids, _ in tails) <= MAX_KEPT_TOKENS
    if is_kept:
        return _shape_of(tails, end_token_ids)
    return _shape_of.__wrapped__(tails, end_token_ids)  # past the cache


@lru_cache(maxsize=256)
def _shape_of(tails: tuple[Tail, ...], end_token_ids: tuple[int, ...]) -> TreeShape:
    return _Nodes().shape(tails, end_token_ids)


def ends_needed(tails: Iterable[Tail]) -> bool:
    """Whether one of the tails is the beginning of another, so that only a scored end tells them apart."""
    in_order = sorted(token_ids for token_ids, _ in tails)
    # In this order a tail stands right before the ones that begin with it.
    return any(after[: len(before)] == before for before, after in pairwise(in_order))


class _Nodes:
    """Numbered nodes of a growing tree. A node stands behind a token; node 0 is the root, behind the prompt."""

    def __init__(self) -> None:
        self._children: dict[Scored, int] = {}
        self._depths = [0]  # of each node: the number of tokens between the root and it
        self._owners = [0]  # of each node: the branch that computes it

    def shape(self, tails: tuple[Tail, ...], end_token_ids: tuple[int, ...]) -> TreeShape:
        """Build the tree. The longest tails come first, so that no branch is the beginning of a later one."""
        # A tail's last token is computed only if a token behind it is scored.
        ways = [token_ids if end_token_ids else token_ids[:-1] for token_ids, _ in tails]
        branches: list[tuple[tuple[int, ...], int | None]] = []  # a way, and its parent branch
        for way in sorted(ways, key=len, reverse=True):
            parent = self._add(way, len(branches))
            if not branches or parent is not None:
                branches.append((way, parent))
        scored = [self._scored(tail, end_token_ids) for tail in tails]
        wanted = {pair for entries in scored for entry in entries for pair in entry}
        targets: list[list[Scored]] = [[] for _ in branches]
        place_of: dict[Scored, Found] = {}
        for node, token_id in sorted(wanted, key=lambda pair: (self._depths[pair[0]], pair)):
            branch = self._owners[node]
            place_of[node, token_id] = branch, len(targets[branch])
            targets[branch].append((node, token_id))
        shaped = []
        for (way, parent), branch_targets in zip(branches, targets, strict=True):
            depths = np.array([self._depths[node] for node, _ in branch_targets], np.int64)
            token_ids = np.array([token_id for _, token_id in branch_targets], np.int64)
            shaped.append(Branch(way, parent, depths, token_ids))
        found = []
        for entries in scored:
            found.append(tuple(tuple(place_of[pair] for pair in entry) for entry in entries))
        return TreeShape(tuple(shaped), tuple(found))

    def _add(self, way: tuple[int, ...], branch: int) -> int | None:
        """Add the nodes of a branch that are not there yet, and return its parent branch.

        None if there are no new nodes, so that it is no branch, or if it is the first branch.
        """
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
        """Return an entry for each scored token of a tail, then one for the end tokens, if the end is scored."""
        token_ids, first_scored = tail
        node = 0
        scored = []
        for place, token_id in enumerate(token_ids):
            if place >= first_scored:
                scored.append([(node, token_id)])
            # The last token has no node if no token behind it is scored.
            node = self._children.get((node, token_id), -1)
        if end_token_ids:
            scored.append([(node, end) for end in end_token_ids])
        return scored


@dataclass
class ScoreTree:
    """The tree of one request, and its known scores."""

    num_prompt_tokens: int
    shape: TreeShape
    num_cached_tokens: int = 0
    # Log probabilities and ranks of a branch's targets, by branch.
    _known: dict[int, tuple[list[float], list[int]]] = field(default_factory=dict)

    def take(self, branch: int, logprobs: list[float], ranks: list[int]) -> bool:
        """Take a branch's scores; return whether all are known."""
        self._known[branch] = logprobs, ranks
        return len(self._known) == len(self.shape.branches)

    def results(self) -> list[LogLikelihood]:
        """Return the likelihood of each tail, once all scores are known."""
        return [self._of(entries) for entries in self.shape.found]

    def _of(self, entries: tuple[tuple[Found, ...], ...]) -> LogLikelihood:
        """Return one tail's likelihood. entries: of TreeShape.found."""
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
