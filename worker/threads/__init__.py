"""Threads in which calls are made that may block, and how such a call is interrupted or given up."""
