"""Ways from a prompt to its answer, beside asking it once: one file for each."""
