"""Reads tables in formats other than Parquet: lines of text (CSV, TSV, JSONL) and Arrow's own files."""
