"""One trace for each job, from its enqueueing to its written end. Its spans are made when it has ended."""
