"""The choice of each row's next token: the parameters of a request, the random numbers, and the sampler."""
