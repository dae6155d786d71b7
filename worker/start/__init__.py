"""What is set and imported before there are threads."""
