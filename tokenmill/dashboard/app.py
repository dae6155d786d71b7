"""The dashboard as an application: its paths, and how each is answered."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from jobs.common.display import safe_name
from jobs.common.release import release_text
from jobs.doctor.redis_server import troubles
from jobs.queues.metrics import QueueMetrics
from tokenmill.dashboard import display
from tokenmill.dashboard.actions.deeds import cancel_job, cancel_run, notice, retry_all, retry_one
from tokenmill.dashboard.guard import (
    METRICS_PATH,
    SESSION_COOKIE,
    SESSION_S,
    Guard,
    Sessions,
    TriesInTurn,
)
from tokenmill.dashboard.views.pages import PAGES, Missing, time_left
from tokenmill.dashboard.watcher import Watcher
from tokenmill.serving import Hosts

#: The most bytes of a form, and the most seconds until it is here. Our own forms are far smaller.
MAX_FORM_BYTES = 1 << 16
FORM_S = 10.0

Answer = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Options:
    """How the dashboard is shown.

    hosts: further names of the dashboard.
    is_local: whether it listens on this machine alone.
    token: browsers log in with it; None if everybody on this machine may look.
    show_prompts: whether jobs' arguments are shown.
    queues: the queues that /metrics counts. Without any there is no /metrics.
    """

    hosts: Collection[str] = ()
    is_local: bool = True
    token: str | None = None
    show_prompts: bool = False
    queues: Sequence[str] = ()


class Dashboard:
    """Answers all requests. Redis is read in threads, once for each page."""

    def __init__(self, connection: Redis, options: Options) -> None:
        self.watcher = Watcher(connection)
        self._options = options
        self._sessions = Sessions(options.token) if options.token else None
        self._tries = TriesInTurn()
        self._metrics = QueueMetrics(connection, options.queues)
        # Each process has its own. A page of an earlier process gets the new token with its next update.
        self._form_token = secrets.token_urlsafe(32)
        self._templates = Environment(
            loader=PackageLoader("tokenmill.dashboard"),
            autoescape=select_autoescape(default=True, default_for_string=True),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        for name in ("number", "rate", "percent", "duration", "moment", "iso"):
            self._templates.filters[name] = getattr(display, name)
        self._templates.filters["safe_name"] = safe_name
        self._templates.globals.update(
            share=display.share,
            form_token=self._form_token,
            time_left=time_left,
            release_text=release_text,
        )

    def app(self) -> ASGIApp:
        """Return the application."""
        pages = [Route(path, self._page(name)) for path, name in _PATHS.items()]
        app = Starlette(
            routes=[
                *pages,
                Route("/series.json", self._series),
                Route("/livez", self._livez),
                *([Route(METRICS_PATH, self._tell)] if self._options.queues else []),
                Route("/retry", self._action(retry_one), methods=["POST"]),
                Route("/retry-all", self._action(retry_all), methods=["POST"]),
                Route("/cancel-run", self._action(cancel_run), methods=["POST"]),
                Route("/cancel-job", self._action(cancel_job), methods=["POST"]),
                Route("/login", self._show_login, methods=["GET"]),
                Route("/login", self._log_in, methods=["POST"]),
                Route("/logout", self._log_out, methods=["POST"]),
                Mount("/static", StaticFiles(directory=Path(__file__).parent / "static")),
                Route("/{path:path}", self._page("missing")),
            ]
        )
        return Guard(
            app, Hosts(self._options.hosts, is_local=self._options.is_local), self._sessions
        )

    def _page(self, name: str) -> Answer:
        connection = self.watcher.connection

        async def answer(request: Request) -> Response:
            def read() -> dict[str, Any]:
                page = PAGES[name](self.watcher, request, show_prompts=self._options.show_prompts)
                return {**page, "troubles": [safe_name(text, 500) for text in troubles(connection)]}

            try:
                facts = await run_in_threadpool(read)
            except Missing as missing:
                return self._render(request, "missing", 404, text=str(missing))
            except RedisError as error:
                return self._away(request, error)
            return self._render(request, name, 200, **facts)

        return answer

    def _away(self, request: Request, error: RedisError) -> Response:
        """Say that Redis does not answer. An open page stays as it is, and asks again."""
        is_away = isinstance(error, (RedisConnectionError, RedisTimeoutError))
        problem = "Redis does not answer." if is_away else "Redis refused what the page asked for."
        detail = f"{type(error).__name__}: {safe_name(str(error), 300)}"
        response = self._render(request, "away", 503, problem=problem, detail=detail)
        if _is_update(request):
            response.headers["HX-Reswap"] = "none"
        return response

    def _render(self, request: Request, template: str, status: int, **facts: Any) -> HTMLResponse:
        """Answer with a page, or only with its inner part if an open page updates itself.

        An update has the status 200 even if it reports a problem. Browsers would log any other as an error.
        """
        update = _is_update(request)
        html = self._templates.get_template(f"pages/{template}.html").render(
            layout="parts/update.html" if update else "parts/base.html",
            now=time.time(),
            path=request.url.path,
            here=_here(request),
            has_login=self._sessions is not None,
            notice=notice(request.query_params.get("done", "")),
            **{"problem": None, "detail": None, "troubles": (), **facts},
        )
        return HTMLResponse(html, 200 if update else status)

    async def _series(self, request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(self.watcher.series))

    async def _livez(self, request: Request) -> Response:
        """Say that the process answers. Redis is not asked, because a restart would not bring it back."""
        return PlainTextResponse("ok\n")

    async def _tell(self, request: Request) -> Response:
        try:
            accept = request.headers.get("accept", "")
            body, kind = await run_in_threadpool(self._metrics.exposition, accept)
        except RedisError as error:
            return PlainTextResponse(f"Redis does not answer: {safe_name(str(error), 300)}\n", 503)
        return Response(body, media_type=kind)

    def _action(self, act: Callable[[Redis, dict[str, str]], str]) -> Answer:
        """Return what carries out the form of one of our pages, then leads back to that page."""

        async def answer(request: Request) -> Response:
            form = await _form(request)
            if not _same(form.get("form_token", ""), self._form_token):
                text = "This page is from an earlier dashboard: load it again, then try once more."
                return self._render(request, "missing", 403, text=text)
            try:
                done = await run_in_threadpool(act, self.watcher.connection, form)
            except RedisError as error:
                return self._away(request, error)
            back = form.get("back", "/")
            mark = "&" if "?" in back else "?"
            return RedirectResponse(f"{back if _is_ours(back) else '/'}{mark}done={done}", 303)

        return answer

    async def _show_login(self, request: Request, wrong: str = "") -> Response:
        to = request.query_params.get("to", "/")
        html = self._templates.get_template("pages/login.html").render(
            wrong=wrong, to=to if _is_ours(to) else "/"
        )
        return HTMLResponse(html, 403 if wrong else 200)

    async def _log_in(self, request: Request) -> Response:
        form = await _form(request)
        if self._sessions is None:
            return RedirectResponse("/", 303)
        if not await self._tries.take():
            text = "Too many wrong tokens were tried: wait a moment, then try again.\n"
            return PlainTextResponse(text, 429, {"Retry-After": "5"})
        is_right = self._sessions.is_token(form.get("token", ""))
        self._tries.note(is_right=is_right)
        if not is_right:
            return await self._show_login(
                request, "That is not the token that the dashboard was started with."
            )
        to = form.get("to", "/")
        response = RedirectResponse(to if _is_ours(to) else "/", 303)
        response.set_cookie(
            SESSION_COOKIE,
            self._sessions.open(time.time()),
            max_age=SESSION_S,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    async def _log_out(self, request: Request) -> Response:
        form = await _form(request)
        response = RedirectResponse("/login" if self._sessions else "/", 303)
        if _same(form.get("form_token", ""), self._form_token):
            response.delete_cookie(SESSION_COOKIE)
        return response


#: Path -> the page's name, in PAGES and among the templates.
_PATHS = {
    "/": "overview",
    "/failed": "failed",
    "/batches": "batches",
    "/runs/{run}": "run",
    "/jobs/{job_id}": "job",
}


def _here(request: Request) -> str:
    """Return the page's address without the word of the action that led to it."""
    items = [item for item in request.query_params.multi_items() if item[0] != "done"]
    query = urlencode(items)
    return quote(request.url.path) + (f"?{query}" if query else "")


def _is_update(request: Request) -> bool:
    return "hx-request" in request.headers


def _is_ours(path: str) -> bool:
    """Whether a path leads to this site. Browsers take // and /\\ for other hosts."""
    return path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()


def _same(sent: str, expected: str) -> bool:
    return secrets.compare_digest(sent.encode(errors="surrogatepass"), expected.encode())


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form. They are empty if it is too large or comes too slowly."""
    body = b""
    try:
        async with asyncio.timeout(FORM_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_FORM_BYTES:
                    return {}
    except (TimeoutError, ClientDisconnect):
        return {}
    try:
        fields = parse_qs(body.decode("ascii"), keep_blank_values=True, max_num_fields=20)
    except ValueError:
        return {}
    return {name: values[0] for name, values in fields.items()}
