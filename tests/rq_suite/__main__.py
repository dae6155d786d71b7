"""RQ's own test suite with BatchWorker in the place of RQ's workers: `python -m tests.rq_suite`."""

import argparse
import sys

from tests.rq_suite.runner import run, worker_files
from tests.rq_suite.sdist import CannotFetch, rq_tests


def main() -> int:
    """Run the suite, or some of its files; print what applies, what passed, and each departure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", nargs="*", help="such as test_retry.py; by default, all on workers"
    )
    parser.add_argument(
        "--quick", action="store_true", help="without the tests that RQ marks as slow"
    )
    options = parser.parse_args()
    try:
        suite = rq_tests()
    except CannotFetch as error:
        print(f"skipped: RQ's sdist cannot be fetched ({error})")
        return 0
    summary = run(suite, options.files or worker_files(suite), slow=not options.quick)
    print(summary.text())
    return 1 if summary.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
