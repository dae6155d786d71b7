"""The kinds of requests: one file for each says how its prompts, sequences and completions are made."""
