"""Kinds of scoring: nothing is generated, and a prompt or row gets numbers."""
