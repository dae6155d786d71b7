"""A run's files. This room alone imports pyarrow, but not at the top of this package."""
