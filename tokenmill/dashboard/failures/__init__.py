"""Failed jobs, grouped by the cause of their failure."""
