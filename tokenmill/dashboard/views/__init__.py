"""Reads what pages show. Each page has a function."""
