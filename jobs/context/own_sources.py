"""Finds and hashes the files that a user's module imports from its own package."""

import ast
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

#: The most files that are returned. In a larger package, only the files that are found first are returned.
MAX_FILES = 1000

_INSTALLED = ("site-packages", "dist-packages")


def own_files(module: str, path: Path) -> list[Path]:
    """Return a module's file, and all files that the module imports from its own package, directly or not.

    A module without a package may import modules from its folder. The files of these modules are returned too, unless
    `module` is installed. Files of other packages are not returned. Only import statements are followed, wherever
    they stand in a file.
    """
    *packages, _ = module.split(".")
    num_folders = len(packages)  # the folders between the root of imports and the file
    if path.name == "__init__.py":
        num_folders += 1
    root = path.parents[num_folders]
    package = None
    if num_folders > 0:
        package, _, _ = module.partition(".")
    if package is None and root.name in _INSTALLED:
        return [path]
    files: set[Path] = set()
    # The import of a module also runs the __init__ of each package around it.
    to_visit = [path, *_files_of(root, module.split("."), package)]
    while to_visit and len(files) < MAX_FILES:
        file = to_visit.pop()
        if file in files:
            continue
        files.add(file)
        for name in _imports(file, root):
            to_visit.extend(_files_of(root, name, package))
    return sorted(files)


def hash_of(files: list[Path]) -> str:
    """Return a hash of the present contents of files. A file that cannot be read counts as missing."""
    digest = blake2b(digest_size=16)
    for file in files:
        try:
            content = file.read_bytes()
        except OSError:
            content = b"missing"
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def _imports(file: Path, root: Path) -> Iterator[list[str]]:
    """Yield each name that a file imports, split at its dots.

    `from a import b` yields the name a.b, because b may be a module.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        # The import of this file will raise the error.
        return
    package = file.parent.relative_to(root).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            parts: list[str] = []
            if node.level > 0:  # each dot after the first one goes up one package
                num_packages = len(package) - (node.level - 1)
                parts += package[:num_packages]
            if node.module:
                parts += node.module.split(".")
            for alias in node.names:
                yield [*parts, alias.name]


def _files_of(root: Path, parts: list[str], package: str | None) -> Iterator[Path]:
    """Yield the files that run when a name is imported: the files of its packages, and its own file.

    package: the only package whose files are yielded; None for any.
    """
    if not parts:
        return
    if package is not None and parts[0] != package:
        return
    folder = root
    for part in parts:
        for file in (folder / f"{part}.py", folder / part / "__init__.py"):
            if file.is_file():
                yield file
        folder = folder / part
