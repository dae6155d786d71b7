"""Checks of answers: what they may be, and the processes in which they run."""
