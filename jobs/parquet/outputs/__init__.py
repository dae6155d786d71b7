"""Writes and reads a run's folder: its plan, its parts and its output file."""
