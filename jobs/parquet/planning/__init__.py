"""How a run is planned: files found, looked at, and cut into shards."""
