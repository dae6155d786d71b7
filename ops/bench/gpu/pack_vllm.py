"""Packs wheels of vLLM and of what it imports into pieces that a machine without a network can be given.

    python -m ops.bench.gpu.pack_vllm vllm-0.26.0-*.whl msgspec-*.whl ... --out FOLDER
    python -m ops.bench.gpu.pack_vllm --unpack FOLDER --out SITE      # there; then PYTHONPATH=SITE

Other wheels can be packed too. Parts of vLLM that text on Hopper does not need are left out: FlashAttention 2, experts,
other devices, the Rust server. xgrammar, which vLLM imports for the sake of a name, becomes an empty package.
`sums.json` keeps the SHA-256 of each piece.
"""

import argparse
import hashlib
import io
import json
import lzma
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

PIECE_BYTES = 48 * 2**20
SUMS = "sums.json"
#: What text needs none of, as patterns of names in a wheel.
LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/_moe_C*.so",
    "vllm/_flashmla*.so",
    "vllm/_qutlass*.so",
    "vllm/_rust*.so",
    "vllm/vllm_flash_attn/_vllm_fa2*.so",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/third_party/tml_fa4/*",
    "*/tests/*",
    "*.pyi",
)
#: Packages of which only names are looked up, and their text.
EMPTY = {
    "xgrammar": '''"""Stands in for xgrammar: every name is an empty class."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''
}


class DamagedPiecesError(Exception):
    """Raised if pieces are not those that were packed."""


def files_of(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name below site-packages and the content of each file of a wheel that is not left out."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            name = entry.filename
            folder, _, rest = name.partition(".data/")
            if rest and "/" not in folder:
                kind, _, name = rest.partition("/")
                if kind not in ("purelib", "platlib"):
                    continue
            if entry.is_dir() or any(fnmatchcase(name, pattern) for pattern in LEFT_OUT):
                continue
            yield name, archive.read(entry)


def pack(wheels: Sequence[Path], out: Path, piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Write the wheels' files as one compressed archive in pieces; return these."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=6) as archive:
        for name, text in EMPTY.items():
            _add(archive, f"{name}/__init__.py", text.encode())
        for wheel in wheels:
            for name, content in files_of(wheel):
                _add(archive, name, content)
    data = packed.getvalue()
    out.mkdir(parents=True, exist_ok=True)
    pieces: list[Path] = []
    sums: dict[str, str] = {}
    for start in range(0, len(data), piece_bytes):
        piece = out / f"wheels.tar.xz.{len(pieces)}"
        content = data[start : start + piece_bytes]
        piece.write_bytes(content)
        sums[piece.name] = hashlib.sha256(content).hexdigest()
        pieces.append(piece)
    (out / SUMS).write_text(json.dumps(sums, indent=1))
    return pieces


def unpack(folder: Path, site: Path) -> None:
    """Put the pieces in a folder together and write their files below `site`. Raises DamagedPiecesError."""
    packed = io.BytesIO()
    for name, expected in json.loads((folder / SUMS).read_text()).items():
        piece = folder / name
        content = piece.read_bytes() if piece.exists() else b""
        found = hashlib.sha256(content).hexdigest()
        if found != expected:
            raise DamagedPiecesError(
                f"{piece} has {len(content):,} bytes with the SHA-256 {found}, expected {expected}: copy it again"
            )
        packed.write(content)
    packed.seek(0)
    try:
        with tarfile.open(fileobj=packed, mode="r:xz") as archive:
            archive.extractall(site, filter="data")
    except (tarfile.TarError, lzma.LZMAError) as error:
        raise DamagedPiecesError(f"the pieces in {folder} make no archive: {error}") from error


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def main() -> None:
    """Pack wheels, or unpack pieces; say how large they are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("wheels", nargs="*", type=Path)
    parser.add_argument("--unpack", type=Path, help="folder of pieces")
    parser.add_argument("--out", type=Path, required=True, help="for pieces or for their files")
    parser.add_argument("--piece-bytes", type=int, default=PIECE_BYTES)
    options = parser.parse_args()
    if bool(options.wheels) == bool(options.unpack):
        parser.error("give either wheels or --unpack")
    if options.unpack:
        try:
            unpack(options.unpack, options.out)
        except DamagedPiecesError as error:
            sys.exit(str(error))
        return
    for piece in pack(options.wheels, options.out, options.piece_bytes):
        print(f"{piece}: {piece.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
