"""Jinja templates, rendered in child processes."""
