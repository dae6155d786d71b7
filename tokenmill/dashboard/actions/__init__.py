"""What the buttons of pages do."""
