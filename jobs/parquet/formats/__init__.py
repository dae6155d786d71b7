"""Tables in other formats than Parquet: lines of text (CSV, TSV, JSONL) and Arrow's own files."""
