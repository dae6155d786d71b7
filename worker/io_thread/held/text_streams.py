"""Writes the growing texts of followed jobs to Redis, where clients read them."""

from worker.engine_thread.orders import Texts
from worker.io_thread.held.held_jobs import HeldJob, HeldJobs
from worker.io_thread.held.job_guard import JobGuard
from worker.store.job_store import JobStore
from worker.store.records.text_piece import TextPiece

MAX_WAITING = 10_000
"""The most pieces that wait while Redis is away. Readers find the whole text in the job's result too."""


class TextStreams:
    """The pieces that are not written yet. Used by the I/O thread only.

    Each piece says where in its text it begins. So a piece may be written twice, and a worker that takes over a job may
    begin from the start: readers skip what they have.
    """

    def __init__(self, jobs: HeldJobs, guard: JobGuard, store: JobStore) -> None:
        self._jobs = jobs
        self._guard = guard
        self._store = store
        self._waiting: list[TextPiece] = []

    def note(self, texts: Texts) -> None:
        """Note the new parts of growing texts."""
        for request_id, samples in texts.samples.items():
            job, _ = self._jobs.of_request(request_id)
            if job is None or job.is_ending:
                continue
            with self._guard.around(job):
                for sample, partial in samples.items():
                    self._note_sample(job, sample, partial.reasoning or "", partial.text)

    def _note_sample(self, job: HeldJob, sample: int, reasoning: str, text: str) -> None:
        num_reasoning, num_text = job.streamed_chars.get(sample, (0, 0))
        pieces = (
            ("reasoning", num_reasoning, reasoning[num_reasoning:]),
            ("text", num_text, text[num_text:]),
        )
        job_id = job.claimed.job_id
        for part, offset, new_text in pieces:
            if new_text and len(self._waiting) < MAX_WAITING:
                self._waiting.append(TextPiece(job_id, sample, part, offset, new_text))
        num_chars = (max(num_reasoning, len(reasoning)), max(num_text, len(text)))
        job.streamed_chars[sample] = num_chars

    def write(self, moment: float) -> None:
        """Write the waiting pieces. Raises RedisError; then they wait on."""
        if self._waiting:
            self._store.write_texts(self._waiting)
            self._waiting = []
