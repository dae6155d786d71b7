"""Child processes for code and data that strangers wrote.

They are started by exec, limited by the operating system, and replaced when they end. `Pool` lends them.
docs/security.md says what this boundary is for. Importing this package loads only the standard library.
"""

from sandbox.pool import Pool
from sandbox.process import Child, ChildDied, ChildFailed, ChildOutOfMemory, ChildTooSlow, Limits
from sandbox.recent import Recent

__all__ = [
    "Child",
    "ChildDied",
    "ChildFailed",
    "ChildOutOfMemory",
    "ChildTooSlow",
    "Limits",
    "Pool",
    "Recent",
]
