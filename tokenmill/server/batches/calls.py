"""The calls of `/v1/files` and `/v1/batches`.

Source: OpenAI's API reference, "Files" and "Batch".
"""

import re
from functools import partial
from typing import IO

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tokenmill.server.batches.batch_runs import EMBEDDINGS, Batches
from tokenmill.server.batches.file_store import FileStore, list_object, missing, page_of
from tokenmill.server.batches.sent_file import SentFile
from tokenmill.server.batches.uploads import Upload
from tokenmill.server.errors import ApiError
from tokenmill.server.idempotency import IdempotencyKeys, key_of
from tokenmill.server.projects import Project
from tokenmill.server.queued_tokens import BATCH_S, QueuedTokens, tokens_of_batch
from tokenmill.server.request_bodies import Bodies

#: The most bytes of an uploaded file.
MAX_FILE_BYTES = 4 << 30
#: OpenAI's limits: the most entries of a page, and the entries of a page without the parameter `limit`.
MAX_PAGE = {"files": 10_000, "batches": 100}
DEFAULT_PAGE = {"files": 10_000, "batches": 20}
MAX_PURPOSE_CHARS = 64
#: OpenAI's limits: the seconds after which a file may expire.
MIN_LIFE_S = 3600
MAX_LIFE_S = 30 * 24 * 3600


class BatchCalls:
    """Answers the calls of files and batches. Each call is for the project of its request."""

    def __init__(
        self,
        files: FileStore,
        batches: Batches,
        bodies: Bodies,
        keys: IdempotencyKeys,
        tokens: QueuedTokens,
    ) -> None:
        self._files = files
        self._batches = batches
        self._bodies = bodies
        self._keys = keys
        self._tokens = tokens

    async def upload(self, request: Request, project: Project) -> Response:
        """Store the file of a multipart body as it comes. Respond with its OpenAI object."""
        max_bytes = await run_in_threadpool(self._room, project)
        new_file = await run_in_threadpool(self._files.begin, project.name)
        try:
            content_type = request.headers.get("content-type", "")
            is_hashed = key_of(request) is not None
            upload = Upload(content_type, new_file.draft, max_bytes, is_hashed=is_hashed)
            await upload.read(request.stream())
            purpose = upload.fields.get("purpose")
            if not purpose:
                raise ApiError(400, "purpose is missing: send 'batch'", param="purpose")
            if len(purpose) > MAX_PURPOSE_CHARS:
                raise ApiError(
                    400, f"purpose has more than {MAX_PURPOSE_CHARS} characters", param="purpose"
                )
            life_s = _life_s(upload.fields)
            name = upload.file_name or "upload"
            content = [name, upload.fields, upload.file_digest]
            made = await self._keys.made(request, project.name, content, new_file.id)
            file = await run_in_threadpool(
                self._files.finish, project.name, new_file, name, purpose, life_s, as_id=made.id
            )
        finally:
            await run_in_threadpool(new_file.draft.drop)
        return JSONResponse(file.to_object())

    def _room(self, project: Project) -> int:
        """Return the most bytes that a project's next upload may have. Raises ApiError if the project has no room."""
        most = project.limits.stored_bytes
        if most is None:
            return MAX_FILE_BYTES
        num_stored = sum(file.bytes for file in self._files.uploads(project.name))
        if num_stored >= most:
            raise ApiError(
                429,
                f"project {project.name!r} has {num_stored} of {most} bytes: delete files",
                code="storage_limit_exceeded",
            )
        return min(MAX_FILE_BYTES, most - num_stored)

    async def list_files(self, request: Request, project: Project) -> Response:
        """List a project's uploads, the latest first."""
        files = await run_in_threadpool(self._files.uploads, project.name)
        purpose = request.query_params.get("purpose")
        wanted = [file for file in files if purpose in (None, file.purpose)]
        if request.query_params.get("order") == "asc":
            wanted.reverse()
        after, limit = _cursor(request, "files")
        page, has_more = page_of(wanted, after, limit)
        return JSONResponse(list_object([file.to_object() for file in page], has_more=has_more))

    async def show_file(self, request: Request, project: Project) -> Response:
        """Respond with the OpenAI object of a file."""
        file = await run_in_threadpool(self._files.find, project.name, request.path_params["id"])
        return JSONResponse(file.to_object())

    async def file_content(self, request: Request, project: Project) -> Response:
        """Respond with the bytes of a file, or with the range of them that the request's header `Range` names."""
        file_id = request.path_params["id"]
        file = await run_in_threadpool(self._files.find, project.name, file_id)
        try:
            source = await run_in_threadpool(self._files.folder.open, file.content)
        except FileNotFoundError:  # it was deleted meanwhile
            raise missing("file", file_id) from None
        return SentFile(source, file.bytes, request.headers.get("range"))

    async def delete_file(self, request: Request, project: Project) -> Response:
        """Remove a file."""
        file_id = request.path_params["id"]
        await run_in_threadpool(self._files.delete, project.name, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def create_batch(self, request: Request, project: Project) -> Response:
        """Make a batch. Respond with its OpenAI object."""

        def admit(batch_id: str, lines: IO[bytes], endpoint: str) -> None:
            """Count the batch's tokens against the project's limit, if it has one. Raises ApiError."""
            if project.limits.tokens_queued is not None:
                num_tokens = tokens_of_batch(lines, generates=endpoint != EMBEDDINGS)
                self._tokens.admit(project, batch_id, num_tokens, BATCH_S)

        with self._bodies.held() as body:
            await body.read(request)
            new_id = self._batches.new_id()
            made = await self._keys.made(request, project.name, body.value, new_id)
            create = partial(
                self._batches.create,
                project.name,
                body.value,
                max_open=project.limits.open_batches,
                batch_id=made.id,
                admit=admit,
            )
            try:
                batch = await run_in_threadpool(create)
            except ApiError as error:
                await self._keys.forget(made, error)
                raise
        return JSONResponse(batch)

    async def list_batches(self, request: Request, project: Project) -> Response:
        """List a project's batches, the latest first."""
        after, limit = _cursor(request, "batches")
        data, has_more = await run_in_threadpool(self._batches.page, project.name, after, limit)
        return JSONResponse(list_object(data, has_more=has_more))

    async def show_batch(self, request: Request, project: Project) -> Response:
        """Respond with the OpenAI object of a batch."""
        batch_id = request.path_params["id"]
        batch = await run_in_threadpool(self._batches.retrieve, project.name, batch_id)
        return JSONResponse(batch)

    async def cancel_batch(self, request: Request, project: Project) -> Response:
        """Cancel a batch. Respond with its OpenAI object."""
        batch_id = request.path_params["id"]
        batch = await run_in_threadpool(self._batches.cancel, project.name, batch_id)
        return JSONResponse(batch)


def _cursor(request: Request, kind: str) -> tuple[str | None, int]:
    """Return a request's `after` (None if it has none) and `limit`. Raises ApiError. kind: "files" or "batches"."""
    text = request.query_params.get("limit", str(DEFAULT_PAGE[kind]))
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII) or not 1 <= int(text) <= MAX_PAGE[kind]:
        raise ApiError(
            400, f"limit is {text[:80]!r}, expected 1 to {MAX_PAGE[kind]}", param="limit"
        )
    return request.query_params.get("after"), int(text)


def _life_s(fields: dict[str, str]) -> int | None:
    """Return the seconds after which an upload expires; None if it does not expire. Raises ApiError.

    fields: the form fields of the upload.
    """
    anchor = fields.get("expires_after[anchor]")
    text = fields.get("expires_after[seconds]")
    if anchor is None and text is None:
        return None
    seconds = 0
    if text is not None and re.fullmatch(r"\d{1,9}", text, re.ASCII):
        seconds = int(text)
    if anchor != "created_at" or not MIN_LIFE_S <= seconds <= MAX_LIFE_S:
        raise ApiError(
            400,
            f"expires_after needs the anchor 'created_at' and {MIN_LIFE_S} to {MAX_LIFE_S} seconds",
            param="expires_after",
        )
    return seconds
