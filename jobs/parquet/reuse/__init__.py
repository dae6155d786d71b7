"""Answers of earlier runs. They are found again by what was asked."""
