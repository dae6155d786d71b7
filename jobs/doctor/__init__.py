"""What `tokenmill doctor` looks at without worker and engine: Redis, files, what is installed.

Nothing here changes what lasts: commands of Redis that would write are never carried out, probe files are
removed. Every look has a time limit.
"""
