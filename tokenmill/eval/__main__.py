"""`lm_eval` with the model `tokenmill`, for releases of it that read no entry points."""

import sys


def main() -> None:
    """Run lm-evaluation-harness's command with this process' arguments."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        sys.exit(
            f"lm-evaluation-harness cannot be imported ({error}): pip install 'tokenmill[eval]'"
        )
    import tokenmill.eval.model  # noqa: F401 - gives its name to the registry

    cli_evaluate()


if __name__ == "__main__":
    main()
