"""The layers of models, each ready to hold one rank's share of its weights."""
