"""Plans a run: finds its files, looks at them, and cuts them into shards."""
