"""What runs on pools of threads beside the loop."""
