"""How far the requests in the batch are."""

from __future__ import annotations

from collections.abc import Iterable

from engine.schedule.sequences.outputs import RequestProgress
from engine.schedule.sequences.sequence import Sequence


def request_progress(running: Iterable[Sequence]) -> dict[str, RequestProgress]:
    """Return by request id how far each is. running: the sequences in the batch.

    Samples of one request have the same prompt: it counts once, as far as the first of them is.
    """
    found: dict[str, RequestProgress] = {}
    for seq in running:
        prompt, known = seq.num_prompt_tokens, found.get(seq.request_id)
        computed = min(seq.num_computed_tokens, prompt) if known is None else known.prompt_tokens
        earlier = 0 if known is None else known.generation_tokens
        generated = earlier + len(seq.token_ids) - prompt
        found[seq.request_id] = RequestProgress(computed, prompt - computed, generated)
    return found
