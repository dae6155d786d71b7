"""Kinds of scoring. Scoring computes numbers for each prompt or row, and generates no text."""
