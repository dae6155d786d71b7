"""Tables in other formats than Parquet: lines of text (CSV, TSV, JSONL) and Arrow's own files.

Neither has an index with rows and types, so planning looks through each file once, and the plan keeps what
it found: where blocks of lines begin, and what their columns hold.
"""
