"""One model over several processes: the driver schedules, and each rank computes its share of every layer.

The driver is the process that made the Engine. It holds no weights and joins no process group, so that it can end
the ranks whatever happens to one. It speaks with each over a socket pair, in arrays (`messages`); the ranks use
torch's collectives.
"""
