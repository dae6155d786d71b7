"""What is read of Redis to be shown: workers, queues and runs, now and over time.

It needs no torch, no pyarrow and no web library; whatever shows something of them reads it here.
"""
