"""First on the path of the tests' workers: the extra `worker` has no pandas, and pyarrow's import of it is slow."""

raise ImportError("the tests' workers have no pandas")
