"""The checks of `tokenmill doctor` that need neither worker nor engine. They change nothing."""
