"""First on the path of the tests' workers, which do without pandas, as the extra `worker` installs them.

pyarrow imports it wherever it finds it, and that is a third of what a worker's start takes here.
"""

raise ImportError("the tests' workers have no pandas")
