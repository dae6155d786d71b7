"""Threads for calls that may block, and how a call is interrupted or given up."""
