"""A run's files. Only this package imports pyarrow. This file does not."""
