"""What pages show, read from Redis. What other programs show too is read in `jobs`."""
