"""The dashboard as an application: its routes, and the functions that answer them."""

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
    LoginThrottle,
    Sessions,
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

#: The most bytes of a form, and the most seconds in which it must come. The dashboard's own forms are far smaller.
MAX_FORM_BYTES = 1 << 16
FORM_S = 10.0

#: The most seconds for which a browser waits for an action. An action that takes longer goes on without it.
ACTION_S = 4.0

#: The functions of `display` that templates use as filters.
_FILTERS = ("number", "rate", "percent", "duration", "moment", "iso", "size")

#: A function that answers a request.
Answer = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Options:
    """The options of the dashboard.

    hosts: the names of proxies through which the dashboard may be reached (see Hosts).
    is_local: whether only this machine reaches the dashboard.
    tokens: by the name of each login, its token; {} for a dashboard without logins.
    show_prompts: whether the arguments of jobs are shown.
    queues: the queues whose metrics /metrics has. Without queues, there is no /metrics.
    """

    hosts: Collection[str] = ()
    is_local: bool = True
    tokens: Mapping[str, str] = field(default_factory=dict)
    show_prompts: bool = False
    queues: Sequence[str] = ()


class Dashboard:
    """Answers all requests. Redis is read in threads."""

    def __init__(self, connection: Redis, options: Options) -> None:
        self.watcher = Watcher(connection)
        self.recorder = Recorder(self.watcher)
        self._charts = Charts(connection)
        self._options = options
        self._sessions = Sessions(options.tokens) if options.tokens else None
        failures = FailureIndex(connection)
        self._site = Site(
            watcher=self.watcher,
            failures=failures,
            failed_rows=FailedRows(connection),
            runs=RunsSeen(connection),
            show_prompts=options.show_prompts,
        )
        self._actions = ActionRunner(connection, failures)
        self._login_throttle = LoginThrottle()
        self._metrics = QueueMetrics(connection, options.queues)
        # Each process makes its own. An open page of an earlier process gets the new token with its next update.
        self._form_token = secrets.token_urlsafe(32)
        self._templates = self._template_environment()

    def _template_environment(self) -> Environment:
        """Return the environment of the templates, with their filters and global names."""
        environment = Environment(
            loader=PackageLoader("tokenmill.dashboard"),
            autoescape=select_autoescape(default=True, default_for_string=True),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        for name in _FILTERS:
            environment.filters[name] = getattr(display, name)
        environment.filters["safe_name"] = safe_name
        environment.filters["quoted"] = quoted
        environment.globals.update(
            share=display.share,
            form_token=self._form_token,
            time_left=time_left,
            why=why,
            release_text=release_text,
        )
        return environment

    def app(self) -> ASGIApp:
        """Return the application with all its routes, behind the guard."""
        routes: list[Route | Mount] = [
            Route("/series.json", self._show_charts),
            Route("/livez", self._livez),
            Route("/login", self._show_login, methods=["GET"]),
            Route("/login", self._log_in, methods=["POST"]),
            Route("/logout", self._log_out, methods=["POST"]),
            Mount("/static", StaticFiles(directory=Path(__file__).parent / "static")),
        ]
        if self._options.queues:
            routes.append(Route(METRICS_PATH, self._show_metrics))
        for path, action in ACTIONS.items():
            routes.append(Route(path, self._action(action), methods=["POST"]))
        for path, view in PAGES.items():
            routes.append(Route(path, self._page(view)))
        routes.append(Route("/{path:path}", self._page(missing)))
        app = Starlette(lifespan=self._lifespan, routes=routes)
        hosts = Hosts(self._options.hosts, is_local=self._options.is_local)
        return Guard(app, hosts, self._sessions)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Close the dashboard when the application ends."""
        yield
        await run_in_threadpool(self.close)

    def close(self) -> None:
        """Begin no more actions, and stop reading failed jobs."""
        self._actions.close()
        self._site.failures.close()

    def _page(self, view: View) -> Answer:
        """Return a function that answers with a page. view: reads what the page shows."""
        connection = self.watcher.connection

        async def answer(request: Request) -> Response:
            def read() -> dict[str, Any]:
                facts = view(self._site, request)
                facts["troubles"] = [safe_name(text, 500) for text in troubles(connection)]
                return facts

            try:
                facts = await run_in_threadpool(read)
            except Moved as moved:
                return RedirectResponse(str(moved), 303)
            except Missing as missing:
                return self._render(request, "missing", 404, text=str(missing))
            except RedisError as error:
                return self._render_away(request, error)
            return self._render(request, view.__name__, 200, **facts)

        return answer

    def _render_away(self, request: Request, error: RedisError) -> Response:
        """Return a page that says that Redis does not answer. An open page does not show it, and goes on updating."""
        is_away = isinstance(error, (RedisConnectionError, RedisTimeoutError))
        problem = "Redis does not answer." if is_away else "Redis refused what the page asked for."
        detail = f"{type(error).__name__}: {safe_name(str(error), 300)}"
        response = self._render(request, "away", 503, problem=problem, detail=detail)
        if _is_update(request):
            response.headers["HX-Reswap"] = "none"
        return response

    def _render(self, request: Request, template: str, status: int, **facts: Any) -> HTMLResponse:
        """Return a page, or only its inner part for an open page that updates itself.

        An update has the status 200 even if it reports a problem, because browsers log any other status as an error.
        """
        is_update = _is_update(request)
        values: dict[str, Any] = {
            "layout": "parts/update.html" if is_update else "parts/base.html",
            "now": time.time(),
            "path": request.url.path,
            "here": _here(request),
            "has_login": self._sessions is not None,
            "notice": self._actions.outcome(request.query_params.get("done", "")),
            "work": self._actions.long_texts(),
            "searched": request.query_params.get("q", ""),
            "login": _login(request),
            "problem": None,
            "detail": None,
            "troubles": (),
        }
        values.update(facts)
        html = self._templates.get_template(f"pages/{template}.html").render(values)
        return HTMLResponse(html, 200 if is_update else status)

    async def _show_charts(self, request: Request) -> Response:
        """Respond with a page's charts as JSON. Parameters: of, name (of the queue, worker or run), range."""
        parameters = request.query_params
        of = parameters.get("of", "overview")
        name = parameters.get("name", "")
        range_ = parameters.get("range", "1h")
        try:
            charts = await run_in_threadpool(self._charts.read, of, name, range_)
        except RedisError as error:
            problem = f"{type(error).__name__}: {error}"
            return JSONResponse({"problem": safe_name(problem, 300)}, 503)
        if charts is None:
            return JSONResponse({"problem": "There are no such charts."}, 404)
        return JSONResponse({**charts, "problem": safe_name(self.recorder.problem, 300)})

    async def _livez(self, request: Request) -> Response:
        """Respond as long as the process lives, whether or not Redis answers: a restart would not bring Redis back."""
        return PlainTextResponse("ok\n")

    async def _show_metrics(self, request: Request) -> Response:
        """Respond with the metrics of the queues, for Prometheus."""
        try:
            accept = request.headers.get("accept", "")
            body, content_type = await run_in_threadpool(self._metrics.exposition, accept)
        except RedisError as error:
            return PlainTextResponse(f"Redis does not answer: {safe_name(str(error), 300)}\n", 503)
        return Response(body, media_type=content_type)

    def _action(self, action: Action) -> Answer:
        """Return a function that carries out a page's form, and then leads the browser back to that page."""

        async def answer(request: Request) -> Response:
            form = await _read_form(request)
            if not _is_same_token(form.get("form_token"), self._form_token):
                text = "This page is from an earlier dashboard: load it again, then try once more."
                return self._render(request, "missing", 403, text=text)
            running = self._actions.begin(action, _login(request), form)
            outcome_id = ""
            try:
                future = asyncio.shield(asyncio.wrap_future(running.future))
                outcome_id = await asyncio.wait_for(future, ACTION_S)
            except TimeoutError:
                self._actions.leave(running)
            except RedisError as error:
                return self._render_away(request, error)
            back = _own_path(form.get("back", "/"))
            separator = "&" if "?" in back else "?"
            return RedirectResponse(f"{back}{separator}done={outcome_id}", 303)

        return answer

    async def _show_login(self, request: Request, wrong: str = "") -> Response:
        """Respond with the page for logging in. wrong: why the last try failed."""
        to = _own_path(request.query_params.get("to", "/"))
        html = self._templates.get_template("pages/login.html").render(wrong=wrong, to=to)
        return HTMLResponse(html, 403 if wrong else 200)

    async def _log_in(self, request: Request) -> Response:
        """Check the token of a form. If it is right, set the session's cookie and lead to the wanted page."""
        form = await _read_form(request)
        if self._sessions is None:
            return RedirectResponse("/", 303)
        if not await self._login_throttle.wait():
            text = "Too many wrong tokens were tried: wait a moment, then try again.\n"
            return PlainTextResponse(text, 429, {"Retry-After": "5"})
        name = self._sessions.name_of(form.get("token"))
        self._login_throttle.record(is_right=name is not None)
        if name is None:
            return await self._show_login(
                request, "That is not the token that the dashboard was started with."
            )
        response = RedirectResponse(_own_path(form.get("to", "/")), 303)
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
        """Delete the session's cookie, if the form is from one of our pages."""
        form = await _read_form(request)
        response = RedirectResponse("/login" if self._sessions else "/", 303)
        if _is_same_token(form.get("form_token"), self._form_token):
            response.delete_cookie(SESSION_COOKIE)
        return response


def _here(request: Request) -> str:
    """Return the path and query of a page, without the parameter `done`, which an action has added."""
    parameters = [item for item in request.query_params.multi_items() if item[0] != "done"]
    path = quote(request.url.path)
    return f"{path}?{urlencode(parameters)}" if parameters else path


def _is_update(request: Request) -> bool:
    """Whether an open page requests its own update."""
    return "hx-request" in request.headers


def _own_path(path: str) -> str:
    """Return a path from a request; "/" if it does not lead to this site. Browsers take // and /\\ for other hosts."""
    is_own = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_own else "/"


def _is_same_token(sent: str, expected: str) -> bool:
    """Whether two tokens are the same. The time that this takes does not tell where they differ."""
    return secrets.compare_digest(sent.encode(errors="surrogatepass"), expected.encode())


def _login(request: Request) -> str:
    """Return the name of the login of a request."""
    name: str = getattr(request.state, "who", NO_LOGIN)
    return name


async def _read_form(request: Request) -> Form:
    """Return the form of a request; an empty form if it is too large or comes too slowly."""
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
