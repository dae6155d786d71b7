"""Grammars of a completion's text, and the tokens that may come next."""
