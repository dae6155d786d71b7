"""The actions behind the buttons of pages."""
