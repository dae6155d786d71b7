"""Reads tables, in child processes, and turns their columns into Python's values."""
