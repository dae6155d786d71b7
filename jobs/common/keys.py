"""Every Redis key that Tokenmill adds to RQ's keys. A line names a key, its type and its content.

tokenmill:worker:<name>        string, JSON: the model that the worker serves, and its statistics
tokenmill:samples:<name>       list: JSON points of that worker's last hour, the latest first (common/workers.py)
tokenmill:run:<run>            hash: what the CLI shows of a run, its last submission, and its last cancelled submission
tokenmill:run:<run>:parts      hash: shard number -> JSON statistics of its part; `total` -> number of shards
tokenmill:run:folder:<hash>    string: the run that was last submitted for an output folder
tokenmill:run:<run>:turn       string: submit, planning and cancel write it and watch it, to notice each other
tokenmill:run:<run>:errors     hash: shard number -> JSON: the commonest reasons why rows of its part have an error
tokenmill:run:<run>:failed     set: shards whose jobs have failed for good. Only runs with a webhook have this key
tokenmill:run:index            sorted set: run -> Unix time in ms of its last submission
tokenmill:run:api-batches      sorted set: JSON of a batch -> Unix time of its creation (watching/api_records.py)
tokenmill:run:api-limited      hash: `<project> <limit>` -> Unix time of its last refusal (watching/api_records.py)
tokenmill:dashboard:actions    list, JSON: who did what in the dashboard (tokenmill/dashboard/actions/log.py)
tokenmill:dashboard:history:<kind>:<hash>  string: values of a queue, worker or run, for a week (history/rings.py)
tokenmill:dashboard:history:index:<kind>   sorted set: name -> Unix time at which its history was last written
tokenmill:dashboard:history:marks    sorted set: JSON of a worker that came, left or died -> Unix time
tokenmill:dashboard:history:present  hash: worker -> Unix time of its start, as the dashboard has last seen it
tokenmill:dashboard:history:turn     string: the dashboard that writes the history
tokenmill:api-limits           hash: project -> JSON: the limits of its clients (api_keys.py)
tokenmill:api-rate:<project>:<minute>  string: how many requests its clients have made in this minute
tokenmill:api-tokens:<project> hash: job or batch -> its tokens, and until when they count (server/queued_tokens.py)
tokenmill:api-once:<project>:<hash>    string, JSON: what a request with an Idempotency-Key has made, for a day
tokenmill:api-keys             hash: SHA-256 of a client's key -> JSON: its project and name (api_keys.py)

The keys below belong to worker/store/. They say which worker has a job, or which worker does a shared task:

tokenmill:held:<queue>         hash: `<job>:<execution>` that is claimed -> facts about the claim (holding.lua)
tokenmill:deaths:<job>         string: how many workers have died with the job, for a week
tokenmill:worker-deaths        list, JSON: which workers died while they held jobs (common/worker_deaths.py)
tokenmill:fleet:<queue>        sorted set: name of a worker of the queue -> Unix time of its last sign of life
tokenmill:served:<name>        string, JSON: what a worker serves, as long as it lives (common/workers.py)
tokenmill:journal:<job>        string: how far a job of prompts is, while it runs (context/job_journal.py)
tokenmill:text:<job>           stream: pieces of a followed job's text, until its end (held/text_streams.py)
tokenmill:claim:<token>        list: job ids that one claim has taken, until the next claim or for 10 minutes
tokenmill:removed:<execution>  string: id of a job that ended and was not to be kept, for 2 minutes
tokenmill:epochs               list: marks of the last claims. A worker's mark is missing if Redis lost data (claim.lua)
tokenmill:epoch-made           string: a mark for `epochs` was made within this second
tokenmill:restored             string: when a worker missed its mark, until `tokenmill restore-check --confirm`
tokenmill:maintenance:<queue>  string: the worker that looks for abandoned jobs of the queue in this period
tokenmill:fair:<queue>         string, JSON: what is remembered from one ordering to the next (store/order_memory.py)
tokenmill:fair-turn:<queue>    string: a worker has put the queue in order in this period
tokenmill:maintenance-stock:<queue>  string: the worker that looks for jobs that RQ's own workers left in the queue

With RQ_KEY_PREFIX=mine RQ's keys begin with `mine:` in the place of `rq:`, and ours with `mine:tokenmill:`.
"""

import os
from hashlib import blake2b

#: The beginning of RQ's keys. RQ reads the same variable when it is imported.
RQ = os.environ.get("RQ_KEY_PREFIX", "rq")
#: The beginning of our own keys.
OWN = "tokenmill" if RQ == "rq" else f"{RQ}:tokenmill"


def prefixed(key: str) -> str:
    """Return a key with the operator's prefix. key: begins with `rq:` or `tokenmill:`."""
    owner, _, name = key.partition(":")
    prefix = RQ if owner == "rq" else OWN
    return f"{prefix}:{name}"


def executions_key(job_id: str) -> str:
    """Return the key of RQ's registry of a job's executions. The registry exists while a worker holds the job.

    This function is not with RQ's other keys in rq_jobs.py, because jobs.context needs it without loading RQ.
    """
    return f"{RQ}:executions:{job_id}"


#: Raise this number by one if the meaning of something that workers share changes: plans, journals, the steps of items
#: (which journals hold), or payloads of jobs that Tokenmill enqueues. A worker leaves work with a higher number to
#: newer workers, and reads no journal or plan with a lower number.
FORMAT = 11
#: A field in RQ's job hash: the FORMAT of the version that enqueued the job. A job that a producer enqueued has no such
#: field.
FORMAT_FIELD = "tokenmill_format"
#: A field in RQ's job hash: how many sequences the job needs. So one worker does not claim every shard of a run.
SEQUENCES_FIELD = "sequences"
#: A field in RQ's job hash: what a worker must serve to run the job. The first line is one of ServedModel.names. Each
#: further line is a pinned adapter. Other workers leave the job queued.
MODEL_FIELD = "tokenmill_model"
#: A field in RQ's job hash: FUNCTION for a job that calls a function, FILE for a shard. A worker claims only a limited
#: number of jobs of each kind.
KIND_FIELD = "tokenmill_kind"
FUNCTION = "function"
FILE = "file"
#: A field in RQ's job hash: the progress of a running job, as JSON. It is not in `meta`, which belongs to the producer.
PROGRESS_FIELD = "tokenmill_progress"
#: In that JSON: when the worker wrote it, in Unix seconds.
REPORTED_AT = "reported_at"
#: A field in RQ's job hash: whether a client follows the job's text while it grows, by `text_stream_key`.
STREAM_FIELD = "tokenmill_stream"
#: A field in the hash of a shard's job: the submission of its run that enqueued the job, or took it over.
SUBMISSION_FIELD = "tokenmill_submission"
#: A run's keys are kept this long after the last write. The files are enough to resume the run.
RUN_TTL_S = 30 * 24 * 3600
#: The list of workers that died while they held jobs.
DEATHS_KEY = f"{OWN}:worker-deaths"
#: The list of marks by which workers notice that Redis came back with older data.
EPOCHS_KEY = f"{OWN}:epochs"
#: While this key is set, workers claim nothing.
RESTORED_KEY = f"{OWN}:restored"
#: The runs that were submitted within twice RUN_TTL_S. The key begins with `tokenmill:run:`, because producers may
#: write such keys.
RUNS_KEY = f"{OWN}:run:index"
#: What API servers record, for the dashboard. These keys begin like RUNS_KEY, so that the dashboard may read them.
API_BATCHES_KEY = f"{OWN}:run:api-batches"
API_LIMITED_KEY = f"{OWN}:run:api-limited"

#: The log of what people did in the dashboard. Only the dashboard's Redis user may write keys like this one.
ACTIONS_KEY = f"{OWN}:dashboard:actions"
#: The beginning of the keys of the values that dashboards keep for charts.
HISTORY_PREFIX = f"{OWN}:dashboard:history"

#: The keys of the API server's clients.
API_KEYS_KEY = f"{OWN}:api-keys"
#: What a project's clients may take.
API_LIMITS_KEY = f"{OWN}:api-limits"

WORKER_STATS_TTL_S = 3600
#: The scores of workers' entries in RQ's `started` registry lie this many seconds in the future, so that RQ's own
#: cleanup does not remove the entries.
FAR_S = 10 * 365 * 86_400
#: How long the journal of a job of prompts is kept. If its worker dies, another worker goes on from the journal.
JOURNAL_TTL_S = 24 * 3600
#: A worker writes its sample every two seconds. After this long without a sample, it is frozen, cut off or dead.
SILENT_S = 10


def worker_key(name: str) -> str:
    """Return the key of a worker's sample."""
    return f"{OWN}:worker:{name}"


def loading_key(name: str) -> str:
    """Return the key of the sample that a worker writes while it loads its model. Later samples are at `worker_key`."""
    return f"{worker_key(name)}:loading"


def served_key(name: str) -> str:
    """Return the key of what a worker serves. Producers may not write this key."""
    return f"{OWN}:served:{name}"


def fleet_key(queue: str) -> str:
    """Return the key of a queue's workers. RQ's own list is not used, because producers may write to it."""
    return f"{OWN}:fleet:{queue}"


def samples_key(name: str) -> str:
    """Return the key of a worker's points of the last hour."""
    return f"{OWN}:samples:{name}"


def journal_key(job_id: str) -> str:
    """Return the key of the journal of a job of prompts."""
    return f"{OWN}:journal:{job_id}"


def api_rate_key(project: str, minute: int) -> str:
    """Return the key of a project's number of API requests in one minute. minute: counted from 1970."""
    return f"{OWN}:api-rate:{project}:{minute}"


def api_tokens_key(project: str) -> str:
    """Return the key of the token counts of a project's unfinished calls and batches."""
    return f"{OWN}:api-tokens:{project}"


def api_once_key(project: str, digest: str) -> str:
    """Return the key of what a request with an Idempotency-Key has made. digest: the hash of the Idempotency-Key."""
    return f"{OWN}:api-once:{project}:{digest}"


def text_stream_key(job_id: str) -> str:
    """Return the key of the stream of a followed job's text."""
    return f"{OWN}:text:{job_id}"


#: The ids of all jobs with a journal. Maintenance uses them to find journals whose jobs are gone.
JOURNALS_KEY = f"{OWN}:journals"


def held_key(queue: str) -> str:
    """Return the key of a queue's claimed jobs."""
    return f"{OWN}:held:{queue}"


def run_key(run: str, kind: str = "") -> str:
    """Return the key of a run's hash. kind: "parts", "errors", "failed" or "turn" for another key of the run."""
    return f"{OWN}:run:{run}:{kind}" if kind else f"{OWN}:run:{run}"


def run_folder_key(folder: str) -> str:
    """Return the key of the run that was last submitted for an output folder."""
    path = folder.encode("utf-8", "surrogatepass")
    return run_key("folder", blake2b(path, digest_size=16).hexdigest())
