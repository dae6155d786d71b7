"""Reads and writes a run's files.

The modules of this package import pyarrow. The package alone can be imported without pyarrow.
"""
