"""What a run is asked to do, and the plan that follows from it."""
