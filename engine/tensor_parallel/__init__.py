"""One model over several processes: the driver schedules, and each rank computes its share of every layer.

The driver is the process that made the Engine. It owns scheduler, blocks and results, holds no weights and
joins no process group, so that whatever happens to a rank it can end them all and say why. Driver and ranks
speak over one socket pair each, in arrays (`messages`); the ranks among themselves use torch's collectives.
"""
