"""Figures of the project's size and shape."""
