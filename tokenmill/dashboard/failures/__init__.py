"""Failed jobs, grouped by what they failed with."""
