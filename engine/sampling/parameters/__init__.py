"""What a request says of sampling, pooling and scoring, checked."""
