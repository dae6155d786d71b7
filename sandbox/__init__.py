"""Child processes for what strangers wrote: started by exec, limited by the operating system, replaced.

`Pool` lends them; docs/security.md says what this boundary is for. Importing this loads the standard library
alone.
"""

from sandbox.pool import Pool
from sandbox.process import Child, ChildDied, ChildFailed, ChildOutOfMemory, ChildTooSlow, Limits
from sandbox.recent import Recent

__all__ = ["Child", "ChildDied", "ChildFailed", "ChildOutOfMemory", "ChildTooSlow", "Limits", "Pool", "Recent"]
