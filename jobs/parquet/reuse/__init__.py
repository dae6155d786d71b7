"""Takes answers of earlier runs. A key says what a row asks, and the row's answer is looked up by this key."""
