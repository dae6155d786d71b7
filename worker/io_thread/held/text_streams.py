"""Writes the growing texts of jobs to Redis, for the clients that follow these jobs."""

from typing import NamedTuple

from engine import PartialText
from worker.engine_thread.orders import Texts
from worker.io_thread.held.held_jobs import HeldJob, HeldJobs
from worker.io_thread.held.job_guard import JobGuard
from worker.store.job_store import JobStore
from worker.store.records.claimed_job import ClaimedJob
from worker.store.records.text_piece import TextPiece

MAX_WAITING = 10_000
"""The most pieces that wait while Redis does not answer. Further text becomes a piece once there is room again."""


_NO_TEXT = PartialText(reasoning=None, text="", token_ids=())


class WaitingPiece(NamedTuple):
    """A piece that is not written yet, and its job."""

    claimed: ClaimedJob
    piece: TextPiece


class TextStreams:
    """Writes growing texts to Redis in pieces. Used by the I/O thread only.

    Each piece says at which character of the text it begins, and readers skip the text that they have already. So a
    piece may be written twice, and a worker that takes over a job may begin from the start.

    Each piece also has the tokens of its text. A worker that takes over the job continues after these tokens. So the
    text that was sent stays the beginning of the answer.
    """

    def __init__(self, jobs: HeldJobs, guard: JobGuard, store: JobStore) -> None:
        self._jobs = jobs
        self._guard = guard
        self._store = store
        self._waiting: list[WaitingPiece] = []

    def note(self, texts: Texts) -> None:
        """Make pieces of the text that each sample has gained. `write` writes the pieces later."""
        for request_id, samples in texts.samples.items():
            job, _ = self._jobs.of_request(request_id)
            if job is None or job.is_ending:
                continue
            with self._guard.around(job):
                for sample, text_so_far in samples.items():
                    self._note_sample(job, sample, text_so_far)

    def _note_sample(self, job: HeldJob, sample: int, text_so_far: PartialText) -> None:
        """Make pieces of what was added to a sample's text since its last piece, unless too many pieces wait."""
        if len(self._waiting) >= MAX_WAITING:
            return
        sent_text = job.streamed.get(sample, _NO_TEXT)
        num_tokens_before = len(sent_text.token_ids)
        new_token_ids = text_so_far.token_ids[num_tokens_before:]

        # For each part of the answer: its name, the text that was sent before, and the whole text now.
        parts = (
            ("reasoning", sent_text.reasoning or "", text_so_far.reasoning or ""),
            ("text", sent_text.text, text_so_far.text),
        )

        for part, old_text, text in parts:
            if len(text) <= len(old_text):
                continue
            piece = TextPiece(
                sample=sample,
                part=part,
                offset=len(old_text),
                text=text[len(old_text) :],
                num_tokens_before=num_tokens_before,
                token_ids=new_token_ids,
                owner=job.owner_digest,
            )
            self._waiting.append(WaitingPiece(job.claimed, piece))
            job.streamed[sample] = text_so_far

    def write(self, moment: float) -> None:
        """Write the waiting pieces to Redis. After a RedisError they still wait.

        moment: not used; the I/O loop passes it to all its duties.
        """
        if self._waiting:
            self._store.write_texts(self._waiting)
            self._waiting = []
