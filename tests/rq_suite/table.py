"""Which of RQ's tests, as `file::class::test` with wildcards, do not apply to BatchWorker, and a chosen set."""

from fnmatch import fnmatchcase

NOT_APPLICABLE: dict[str, tuple[str, ...]] = {
    "there is no work horse: a function runs in a thread of the worker": (
        "*work_horse*",
        "*horse_killed*",
        "test_commands.py::*::test_kill_horse_command",
        "test_worker.py::*::test_heartbeat_busy",
        "test_worker.py::*::test_request_force_stop_ignores_consecutive_signals",
    ),
    "replaces a step inside RQ's own loop, and looks at what that leaves or how often it is taken": (
        "test_intermediate_queue.py::*::test_cleanup_intermediate_queue*",
        "test_intermediate_queue.py::*::test_no_cleanup_while_in_started_queue",
        "test_queue.py::*::test_intermediate_queue",
        "test_rate_limit.py::*::test_release_after_aborted_immediate_repeat",
        "test_repeat.py::*::test_repeat_state_survives_transaction_retry",
        "test_scheduler.py::*::test_work_burst_scheduler_cleans_up_on_error",  # ours: test_rq_semantics.py
        "test_worker.py::*::test_heartbeat_survives_lost_connection",
        "test_worker.py::*::test_heartbeat_survives_redis_timeout",
        "test_worker.py::*::test_horse_fails",
        "test_worker.py::*::test_job_dependency_race_condition",
        "test_worker.py::*::test_stopped_job_failed_even_if_stopped_callback_raises",
    ),
    "about another of RQ's worker classes": (
        "test_spawn_worker.py::*",
        "test_worker.py::HerokuWorkerShutdownTestCase::*",
        "test_worker.py::TestRoundRobinWorker::*",
        "test_worker.py::TestRandomWorker::*",
    ),
    "passes or returns objects that JSON cannot hold": (
        "test_cli.py::*::test_cli_enqueue_args",
        "test_cli.py::*::test_cli_enqueue_doc_test",
        "test_job_dependency.py::*::test_execution_order_*",
        "test_retry.py::*::test_handle_retry_result",
        "test_retry.py::*::test_handle_job_retry_max_retries_exceeded",
        "test_retry.py::*::test_worker_handles_max_retry",
    ),
    "needs a Redis that speaks TLS": ("*ssl*",),
}
"""Reason: the tests it holds for."""

DEPARTURES: dict[str, tuple[str, ...]] = {
    "a job that is cancelled while it runs is stopped; RQ lets it run to its end": (
        "test_worker.py::*::test_cancel_running_parent_job",
    ),
    "a `--job-class` is refused, and a `--queue-class` with keys of its own: scripts know those of RQ": (
        "test_cli.py::*::test_cli_enqueue_with_job_class",
        "test_cli.py::*::test_queue_class_argument",
        "test_worker_pool.py::*::test_queue_class_propagated_to_workers",
    ),
    "`--dequeue-strategy` is refused: queues are lanes, served in the order given": (
        "test_cli.py::*::test_worker_dequeue_strategy",
        "test_worker.py::*::test_dequeue_random_strategy",
        "test_worker.py::*::test_dequeue_round_robin",
    ),
    "logs have no description, which repeats a prompt, and no line for each job that went well": (
        "test_worker.py::*::test_log_job_description_on_success_true",
        "test_worker.py::*::test_log_result_lifespan_true",
    ),
    "a payload that cannot be read fails its job with a warning; RQ logs an error": (
        "test_worker.py::*::test_deserializing_failure_is_handled",
    ),
    "a worker that leaves shows as `draining`, then as `stopped`; RQ's as `busy` or `idle`": (
        "test_commands.py::*::test_stop_execution_command",
        "test_commands.py::*::test_stop_job_command",
    ),
    "a worker goes on listening for commands whatever goes wrong there; RQ's gives up on some errors": (
        "test_commands.py::*::test_pubsub_thread_exits_other_error",
    ),
}
"""Reason, which docs/operator.md repeats: the tests that show it."""

CHOSEN = (
    "test_callbacks.py",
    "test_dependencies.py",
    "test_executions.py",
    "test_rate_limit.py",
    "test_registry.py",
    "test_repeat.py",
    "test_results.py",
    "test_retry.py",
    "test_webhooks.py",
    "test_worker_registration.py",
)
"""Files of the set that runs with the test suite: what becomes of jobs, without long pauses."""


def reason(table: dict[str, tuple[str, ...]], test: str) -> str | None:
    """Why a test is in a table; None where it is not."""
    found = (
        why for why, patterns in table.items() if any(fnmatchcase(test, each) for each in patterns)
    )
    return next(found, None)
