"""The arguments of a run, and the plan that is made of them."""
