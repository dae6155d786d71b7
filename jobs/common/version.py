"""The installed version of this code."""

from importlib.metadata import PackageNotFoundError, version


def code_version() -> str:
    """Return the version, or "unknown" when the source tree is used without being installed."""
    try:
        return version("tokenmill")
    except PackageNotFoundError:
        return "unknown"
