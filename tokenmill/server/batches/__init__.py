"""The files and batches of `/v1/files` and `/v1/batches`."""
