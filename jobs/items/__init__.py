"""Items, each of which asks one prompt, row or batch line, and the runner that drives the items of a job."""
