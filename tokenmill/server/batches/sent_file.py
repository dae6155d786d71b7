"""Sends a file that may be deleted meanwhile."""

import logging
from pathlib import Path

from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from tokenmill.server.errors import ApiError

logger = logging.getLogger("tokenmill")


class SentFile(FileResponse):
    """A file, or the range of it that is asked for. gone: the answer if it is deleted before its first byte."""

    def __init__(self, path: Path, gone: ApiError) -> None:
        super().__init__(path, media_type="application/octet-stream")
        self._gone = gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. If it is deleted while it is sent, the connection is closed before its end."""
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await super().__call__(scope, receive, noted)
        # starlette raises a RuntimeError for a file that is gone before it looks at it.
        except (FileNotFoundError, RuntimeError) as error:
            if Path(self.path).exists():
                raise
            logger.warning("a file was deleted before it was sent: %s", type(error).__name__)
            if not has_begun:
                response = self._gone.response
                response.headers["x-request-id"] = self.headers.get("x-request-id", "")
                await response(scope, receive, send)
