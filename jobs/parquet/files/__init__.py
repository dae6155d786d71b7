"""Where files lie: a disk below data roots, or an object store."""
