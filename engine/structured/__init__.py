"""What a completion's text has to be: grammars, and for each token which ones may come next."""
