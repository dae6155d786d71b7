"""Lists the actions by the path of their forms."""

from collections.abc import Mapping

from tokenmill.dashboard.actions import failed, queues, runs, workers
from tokenmill.dashboard.actions.runner import Action

ACTIONS: Mapping[str, Action] = {
    "/retry": failed.retry,
    "/delete": failed.delete,
    "/empty-queue": queues.empty,
    "/to-front": queues.to_front,
    "/cancel-job": queues.cancel,
    "/cancel-run": runs.cancel,
    "/suspend": workers.suspend,
    "/resume": workers.resume,
    "/drain": workers.drain,
    "/stop": workers.stop,
}
