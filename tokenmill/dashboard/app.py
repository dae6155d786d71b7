"""The dashboard as an application: its paths, and how each is answered."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

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
from tokenmill.dashboard.actions.forms import Form
from tokenmill.dashboard.actions.runner import Action, ActionRunner
from tokenmill.dashboard.actions.table import ACTIONS
from tokenmill.dashboard.failures.index import FailureIndex
from tokenmill.dashboard.failures.rows import FailedRows
from tokenmill.dashboard.guard import (
    METRICS_PATH,
    NO_LOGIN,
    SESSION_COOKIE,
    SESSION_S,
    Guard,
    Sessions,
    TriesInTurn,
)
from tokenmill.dashboard.history.charts import Charts
from tokenmill.dashboard.history.recorder import Recorder
from tokenmill.dashboard.seen.run_asked import quoted
from tokenmill.dashboard.seen.runs_seen import RunsSeen
from tokenmill.dashboard.seen.watcher import Watcher
from tokenmill.dashboard.views.runs import time_left, why
from tokenmill.dashboard.views.site import Missing, Moved, Site
from tokenmill.dashboard.views.table import PAGES, View, missing
from tokenmill.serving import Hosts

#: The most bytes of a form, and the most seconds until it is here. Our own forms are far smaller.
MAX_FORM_BYTES = 1 << 16
FORM_S = 10.0

#: Seconds for which a browser waits for an action. One that takes longer goes on by itself.
ACTION_S = 4.0

Answer = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Options:
    """How the dashboard is shown.

    hosts: further names of the dashboard.
    is_local: whether it listens on this machine alone.
    tokens: browsers log in with one of them, by the names of the logins; empty if everybody on this machine may look.
    show_prompts: whether jobs' arguments are shown.
    queues: the queues that /metrics counts. Without any there is no /metrics.
    """

    hosts: Collection[str] = ()
    is_local: bool = True
    tokens: Mapping[str, str] = field(default_factory=dict)
    show_prompts: bool = False
    queues: Sequence[str] = ()


class Dashboard:
    """Answers all requests. Redis is read in threads, once for each page."""

    def __init__(self, connection: Redis, options: Options) -> None:
        self.watcher = Watcher(connection)
        self.recorder = Recorder(self.watcher)
        self._charts = Charts(connection)
        self._options = options
        self._sessions = Sessions(options.tokens) if options.tokens else None
        failures = FailureIndex(connection)
        self._site = Site(
            self.watcher,
            failures,
            FailedRows(connection),
            RunsSeen(connection),
            options.show_prompts,
        )
        self._actions = ActionRunner(connection, failures)
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
        for name in ("number", "rate", "percent", "duration", "moment", "iso", "size"):
            self._templates.filters[name] = getattr(display, name)
        self._templates.filters["safe_name"] = safe_name
        self._templates.filters["quoted"] = quoted
        self._templates.globals.update(
            share=display.share,
            form_token=self._form_token,
            time_left=time_left,
            why=why,
            release_text=release_text,
        )

    def app(self) -> ASGIApp:
        """Return the application."""
        pages = [Route(path, self._page(view)) for path, view in PAGES.items()]
        actions = [
            Route(path, self._action(act), methods=["POST"]) for path, act in ACTIONS.items()
        ]
        app = Starlette(
            lifespan=self._lifespan,
            routes=[
                Route("/series.json", self._series),
                Route("/livez", self._livez),
                *([Route(METRICS_PATH, self._tell)] if self._options.queues else []),
                Route("/login", self._show_login, methods=["GET"]),
                Route("/login", self._log_in, methods=["POST"]),
                Route("/logout", self._log_out, methods=["POST"]),
                Mount("/static", StaticFiles(directory=Path(__file__).parent / "static")),
                *actions,
                *pages,
                Route("/{path:path}", self._page(missing)),
            ],
        )
        return Guard(
            app, Hosts(self._options.hosts, is_local=self._options.is_local), self._sessions
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(self.close)

    def close(self) -> None:
        """Begin nothing more, and read no more failed jobs."""
        self._actions.close()
        self._site.failures.close()

    def _page(self, view: View) -> Answer:
        connection = self.watcher.connection

        async def answer(request: Request) -> Response:
            def read() -> dict[str, Any]:
                page = view(self._site, request)
                return {**page, "troubles": [safe_name(text, 500) for text in troubles(connection)]}

            try:
                facts = await run_in_threadpool(read)
            except Moved as moved:
                return RedirectResponse(str(moved), 303)
            except Missing as missing:
                return self._render(request, "missing", 404, text=str(missing))
            except RedisError as error:
                return self._away(request, error)
            return self._render(request, view.__name__, 200, **facts)

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
            notice=self._actions.outcome(request.query_params.get("done", "")),
            work=self._actions.long_texts(),
            searched=request.query_params.get("q", ""),
            login=_login(request),
            **{"problem": None, "detail": None, "troubles": (), **facts},
        )
        return HTMLResponse(html, 200 if update else status)

    async def _series(self, request: Request) -> Response:
        """Answer with a page's charts. Parameters: of, name (of the queue, worker or run), range."""
        asked = request.query_params
        words = asked.get("of", "overview"), asked.get("name", ""), asked.get("range", "1h")
        try:
            charts = await run_in_threadpool(self._charts.read, *words)
        except RedisError as error:
            problem = f"{type(error).__name__}: {error}"
            return JSONResponse({"problem": safe_name(problem, 300)}, 503)
        if charts is None:
            return JSONResponse({"problem": "There are no such charts."}, 404)
        return JSONResponse({**charts, "problem": safe_name(self.recorder.problem, 300)})

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

    def _action(self, act: Action) -> Answer:
        """Return what carries out the form of one of our pages, then leads back to that page."""

        async def answer(request: Request) -> Response:
            form = await _form(request)
            if not _same(form.get("form_token"), self._form_token):
                text = "This page is from an earlier dashboard: load it again, then try once more."
                return self._render(request, "missing", 403, text=text)
            running = self._actions.begin(act, _login(request), form)
            done = ""
            try:
                waited = asyncio.shield(asyncio.wrap_future(running.future))
                done = await asyncio.wait_for(waited, ACTION_S)
            except TimeoutError:
                self._actions.leave(running)
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
        name = self._sessions.name_of(form.get("token"))
        self._tries.note(is_right=name is not None)
        if name is None:
            return await self._show_login(
                request, "That is not the token that the dashboard was started with."
            )
        to = form.get("to", "/")
        response = RedirectResponse(to if _is_ours(to) else "/", 303)
        response.set_cookie(
            SESSION_COOKIE,
            self._sessions.open(name, time.time()),
            max_age=SESSION_S,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    async def _log_out(self, request: Request) -> Response:
        form = await _form(request)
        response = RedirectResponse("/login" if self._sessions else "/", 303)
        if _same(form.get("form_token"), self._form_token):
            response.delete_cookie(SESSION_COOKIE)
        return response


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


def _login(request: Request) -> str:
    """Return the name of the login that a request comes with."""
    name: str = getattr(request.state, "who", NO_LOGIN)
    return name


async def _form(request: Request) -> Form:
    """Return the fields of a form. They are empty if it is too large or comes too slowly."""
    body = b""
    try:
        async with asyncio.timeout(FORM_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_FORM_BYTES:
                    return Form()
    except (TimeoutError, ClientDisconnect):
        return Form()
    return Form.from_body(body)
