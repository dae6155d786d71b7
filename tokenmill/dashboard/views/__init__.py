"""What each page shows: a function for each page."""
