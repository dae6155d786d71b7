"""Kinds of scoring. Scoring gives each prompt or row numbers, and generates no text."""
