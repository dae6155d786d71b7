"""Answers of earlier runs, found again by what was asked."""
