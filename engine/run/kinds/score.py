"""Score: requests that ask how likely each of several continuations of a prompt is."""

from engine.errors import InvalidPrompt, NoLmHead, SequenceFailed
from engine.run.kinds.request_kind import LoadedModel, NewRequest, RequestKind
from engine.sampling.request_kinds import NO_NEW_TOKEN, ScoringParams
from engine.schedule.outputs import Completion
from engine.schedule.prepared_prompt import PreparedPrompt
from engine.schedule.score_tree import ScoreTree, Targets, ends_needed, shape_of
from engine.schedule.sequence import Sequence, SequenceStatus
from engine.text.prompts import Prompt, Tail

#: The most tokens of all sequences of a scoring request together; each of them holds the prompt's tokens too.
MAX_TREE_TOKENS = 1 << 25


class Score(RequestKind[ScoringParams]):
    """Scores continuations: one sequence for each branch of their tree, and one completion for all."""

    params = ScoringParams

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._end_token_ids = tuple(sorted(loaded.sequences.eos_token_ids))

    def check(self, params: ScoringParams) -> None:
        """Raise NoLmHead if the model has no LM head."""
        if not self._loaded.generates:
            raise NoLmHead

    def prepare(self, prompt: Prompt, params: ScoringParams) -> PreparedPrompt:
        """Tokenize a prompt and its continuations, and make the tree of what is scored.

        Raises UnsupportedTask, InvalidPrompt or PromptTooLong.
        """
        self.check(params)
        continued = self._loaded.prompts.continued(
            prompt,
            params.continuations,
            truncate_prompt_tokens=params.truncate_prompt_tokens,
            num_ends=int(params.score_end is not False),
            are_labels=params.score_end == "auto",
        )
        token_ids = continued.token_ids
        end_token_ids = self._scored_ends(params, continued.tails)
        shape = shape_of(continued.tails, end_token_ids)
        num_tokens = sum(len(token_ids) + len(branch.token_ids) for branch in shape.branches)
        if num_tokens > MAX_TREE_TOKENS:
            raise InvalidPrompt(
                f"the prompt and its continuations make {len(shape.branches)} branches of {num_tokens} tokens in "
                f"all, more than the limit of {MAX_TREE_TOKENS}: ask for fewer at a time"
            )
        block_keys = self._loaded.keys_of(token_ids)
        return PreparedPrompt(token_ids, block_keys, shape, continued.num_prompt_tokens)

    def _scored_ends(self, params: ScoringParams, tails: tuple[Tail, ...]) -> tuple[int, ...]:
        """Return the end tokens that are scored after each continuation; () for none. Raises InvalidPrompt."""
        scores_end = params.score_end
        if scores_end == "auto":
            _check_all_differ(tails)
            scores_end = ends_needed(tails)
        if not scores_end:
            return ()
        if not self._end_token_ids:
            raise InvalidPrompt(
                "no token ends this model's texts, so none can be scored behind a continuation"
            )
        return self._end_token_ids

    def is_prepared(self, prompt: PreparedPrompt, params: ScoringParams) -> bool:
        """Return whether the prompt has a tree of continuations."""
        return prompt.continued is not None

    def sequences(self, request: NewRequest[ScoringParams]) -> list[Sequence]:
        """Make a sequence for each branch. Each but the first is held until its parent is finished."""
        prompt = request.prompt
        assert prompt.continued is not None
        tree = ScoreTree(prompt.num_prompt_tokens, prompt.continued)
        seqs: list[Sequence] = []
        for index, branch in enumerate(tree.shape.branches):
            seq = Sequence(
                request.request_id,
                [*prompt.token_ids, *branch.token_ids],
                NO_NEW_TOKEN,
                index=index,
                lane=request.lane,
                block_keys=prompt.block_keys,
                targets=Targets(branch.places + len(prompt.token_ids), branch.scored_ids),
                tree=tree,
                pictures=prompt.pictures,
            )
            if branch.parent is not None:
                seq.status = SequenceStatus.HELD
                seqs[branch.parent].followers.append(seq)
            seqs.append(seq)
        return seqs

    def completion(self, seq: Sequence) -> Completion | None:
        """Make the completion of all branches; return None while the scores of other branches are missing."""
        tree = seq.tree
        assert tree is not None
        if seq.error is not None:
            return Completion.refused(seq.request_id, SequenceFailed(seq.error))
        logprobs: list[float] = []
        ranks: list[int] = []
        for part in seq.prompt_logprobs:
            logprobs += part.logprobs.tolist()
            ranks += part.ranks.tolist()
        if seq.index == 0:
            tree.num_cached_tokens = min(seq.num_cached_tokens or 0, tree.num_prompt_tokens)
        if not tree.take(seq.index, logprobs, ranks):
            return None
        return Completion(
            request_id=seq.request_id,
            index=0,
            token_ids=[],
            text="",
            finish_reason="stop",
            num_prompt_tokens=tree.num_prompt_tokens,
            num_cached_tokens=tree.num_cached_tokens,
            loglikelihoods=tree.results(),
        )


def _check_all_differ(tails: tuple[Tail, ...]) -> None:
    """Raise InvalidPrompt if two continuations are the same tokens."""
    first_numbers: dict[Tail, int] = {}
    for number, tail in enumerate(tails):
        first = first_numbers.setdefault(tail, number)
        if first != number:
            raise InvalidPrompt(
                f"continuations {first} and {number} are the same tokens: one of them is enough"
            )
