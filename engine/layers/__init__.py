"""The layers models are built from, each ready to hold one rank's share of its weights."""
