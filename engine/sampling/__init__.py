"""How a row's next token is chosen: the parameters of a request, the random numbers, and the sampler."""
