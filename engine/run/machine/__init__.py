"""What this machine has: its device, its memory, its threads, and the numbers it computes with."""
