"""Child processes for what strangers wrote: started by exec, limited by the operating system, replaced.

`Pool` lends them; docs/security.md says what this boundary is for. Importing this loads the standard library
alone.
"""

from .pool import ChildDied, ChildFailed, ChildOutOfMemory, ChildTooSlow, Pool
from .process import Child

__all__ = ["Child", "ChildDied", "ChildFailed", "ChildOutOfMemory", "ChildTooSlow", "Pool"]
