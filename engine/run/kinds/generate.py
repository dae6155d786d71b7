"""Generate: requests whose prompts are continued by sampled tokens."""

import logging
import random
from array import array
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from hashlib import blake2b
from typing import Any

from engine.errors import InvalidRequest, InvalidSampling
from engine.run.completions import Completions
from engine.run.kinds.request_kind import LoadedModel, NewRequest, RequestKind
from engine.sampling.sampling_params import SamplingParams, check_params
from engine.schedule.outputs import Completion
from engine.schedule.prepared_prompt import PreparedPrompt
from engine.schedule.sequence import Sequence
from engine.text.prompts import Prompt

logger = logging.getLogger(__name__)

#: The most log probabilities that one request may ask for. Each takes about 150 bytes until its completion is given.
MAX_LOGPROB_ENTRIES = 1 << 21


class Generate(RequestKind[SamplingParams]):
    """Completes prompts: one sequence and one completion for each of `params.n` samples."""

    params = SamplingParams
    generates = True

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._prompts = loaded.prompts
        self._new_sequences = loaded.sequences
        self._completions = Completions(loaded.tokenizer, loaded.sequences.reasoner)
        self._seeds = Seeds(loaded.config.seed, from_prompts=loaded.config.deterministic)

    def check(self, params: SamplingParams) -> None:
        """Raise UnsupportedTask if there is no LM head, InvalidSampling for token ids outside the vocabulary."""
        check_params(params, self._loaded.model.vocab_size)
        self._loaded.check_generates()

    def prepare(self, prompt: Prompt, params: SamplingParams) -> PreparedPrompt:
        """Tokenize a prompt and keep the last tokens that it is cut to. Needs no LM head."""
        token_ids = self._prompts.token_ids(
            prompt, truncate_prompt_tokens=params.truncate_prompt_tokens
        )
        return PreparedPrompt(token_ids, self._loaded.keys_of(token_ids))

    def is_prepared(self, prompt: PreparedPrompt, params: SamplingParams) -> bool:
        """Return whether the prompt is short enough. Every prepared prompt leaves room for one new token."""
        most = params.truncate_prompt_tokens
        return most is None or most == -1 or len(prompt.token_ids) <= most

    def prepare_grammar(self, params: SamplingParams) -> Future[Any] | None:
        """Start compiling the grammar of a text's form, once for equal ones; return None for free text."""
        return self._new_sequences.grammars.prepare(params)

    def sequences(self, request: NewRequest[SamplingParams]) -> list[Sequence]:
        """Make a sequence for each sample. Resumed samples go on where they were in another engine."""
        token_ids = request.prompt.token_ids
        params = request.params
        self._prompts.check_continued(token_ids, request.continued)
        check_logprobs(params, len(token_ids), self._prompts.max_model_len)
        seed = params.seed if params.seed is not None else self._seeds.draw(token_ids)

        seqs = self._make(request, seed)
        if request.resumed and not self._resume(seqs, request.resumed):
            seqs = self._make(request, seed)
        return seqs

    def _make(self, request: NewRequest[SamplingParams], seed: int) -> list[Sequence]:
        seqs = self._new_sequences.make(
            request.request_id,
            request.prompt,
            request.params,
            lane=request.lane,
            seed=seed,
            continued=request.continued,
        )
        if request.params.tools and not request.params.parallel_tool_calls:
            for seq in seqs:
                seq.ends_call = self._completions.call_watch(seq)
        return seqs

    def _resume(self, seqs: list[Sequence], resumed: Mapping[int, Collection[int]]) -> bool:
        """Give sequences the tokens that they had elsewhere; return False if one cannot have had them."""
        try:
            for index, token_ids in resumed.items():
                self._prompts.check_ids(token_ids)
                seqs[index].resume(token_ids, self._prompts.max_model_len)
        except (InvalidRequest, IndexError) as error:
            logger.warning(
                "request %s begins anew, it cannot go on where it was: %s",
                seqs[0].request_id,
                error,
            )
            return False
        return True

    def is_complete(self, seq: Sequence) -> bool:
        """Return whether a sample's completion is whole; the first sample may still score the prompt for all."""
        if seq.params.prompt_logprobs is None or seq.error is not None:
            return True
        num_scored = sum(len(part.ranks) for part in seq.prompt_logprobs)
        return num_scored >= seq.num_prompt_tokens - 1

    def completion(self, seq: Sequence) -> Completion:
        """Make the completion of a sample: its text, reasoning, tool calls and log probabilities."""
        return self._completions.of(seq)


def check_logprobs(params: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> None:
    """Raise InvalidSampling if a request's log probabilities alone could fill the engine's memory."""
    num_entries = 0
    if params.prompt_logprobs is not None:
        num_entries += num_prompt_tokens * (params.prompt_logprobs + 1)
    if params.logprobs is not None:
        longest = min(params.max_tokens, max_model_len - num_prompt_tokens)
        num_entries += params.n * longest * (params.logprobs + 1)
    if num_entries > MAX_LOGPROB_ENTRIES:
        raise InvalidSampling(
            f"the request may have {num_entries} log probabilities, more than the limit of {MAX_LOGPROB_ENTRIES}: ask "
            "for fewer by logprobs or prompt_logprobs, a lower max_tokens or n, or a shorter prompt"
        )


class Seeds:
    """Draws seeds, from one generator, or from the prompt if results must depend on the request alone."""

    def __init__(self, seed: int, *, from_prompts: bool) -> None:
        self._seed = seed
        self._from_prompts = from_prompts
        self._generator = random.Random(seed)

    def draw(self, token_ids: list[int]) -> int:
        """Draw a seed of 64 bits. token_ids: of the prompt."""
        if not self._from_prompts:
            return self._generator.getrandbits(64)
        digest = blake2b(f"{self._seed}:".encode(), digest_size=8)
        digest.update(array("q", token_ids).tobytes())
        return int.from_bytes(digest.digest(), "little")
