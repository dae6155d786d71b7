"""rq-dashboard's pages of single jobs, beside ours."""

from .pages import rq_app

__all__ = ["rq_app"]
