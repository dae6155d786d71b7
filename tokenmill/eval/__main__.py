"""Runs `lm_eval` with the model `tokenmill`, for releases of the harness that read no entry points."""

import sys


def main() -> None:
    """Run the command of lm-evaluation-harness with this process's arguments."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        sys.exit(
            f"lm-evaluation-harness cannot be imported ({error}): pip install 'tokenmill[eval]'"
        )
    import tokenmill.eval.model  # noqa: F401 - registers the model

    cli_evaluate()


if __name__ == "__main__":
    main()
