"""What `tokenmill doctor` looks at without worker and engine. Nothing here changes what lasts."""
