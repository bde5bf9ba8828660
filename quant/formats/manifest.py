"""The manifest: which bytes make a checkpoint, and what it was made from. Standard library only.

A checkpoint is a folder; manifest.json is written last, so a folder without one is not a checkpoint yet. No file of a
checkpoint holds a time or a host name: the same inputs give the same digest.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from narrowgauge.quant.formats.read import ReadError, build, canonical_json, plain

MANIFEST = "manifest.json"
SCHEMA = 1


class CheckpointDamaged(ValueError):
    """The bytes of a checkpoint are not those its manifest lists; the message names the first file that differs."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file: path relative to the checkpoint with forward slashes, size in bytes, SHA-256 in hex."""

    path: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        parts = self.path.split("/")
        if not self.path or self.path.startswith("/") or "\\" in self.path or any(p in ("", ".", "..") for p in parts):
            raise ValueError(f"path: {self.path!r} must be relative and stay inside the checkpoint")


@dataclass(frozen=True, kw_only=True)
class Base:
    """What a checkpoint was made from: the URI as written, its resolved revision, the digest of its bytes."""

    source: str
    revision: str | None = None
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    schema: int
    files: tuple[FileEntry, ...]
    base: Base
    recipe_digest: str | None = None
    calibration_digest: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema: this release reads manifests of schema {SCHEMA}, not {self.schema}")
        if not self.files:
            raise ValueError("files: a checkpoint has at least one file")

    @property
    def digest(self) -> str:
        """The checkpoint digest: SHA-256 of the canonical JSON of `files` sorted by path."""
        entries = sorted((plain(entry) for entry in self.files), key=lambda entry: entry["path"])
        return hashlib.sha256(canonical_json(entries).encode()).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)


def write_manifest(
    folder: Path,
    *,
    base: Base,
    recipe_digest: str | None = None,
    calibration_digest: str | None = None,
    versions: Mapping[str, str] | None = None,
) -> Manifest:
    """Hashes every file below `folder` and commits the checkpoint by writing manifest.json (fsync, rename)."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.relative_to(folder).as_posix() != MANIFEST)
    files = tuple(
        FileEntry(path=p.relative_to(folder).as_posix(), size=p.stat().st_size, sha256=sha256_file(p)) for p in paths
    )
    manifest = Manifest(
        schema=SCHEMA,
        files=files,
        base=base,
        recipe_digest=recipe_digest,
        calibration_digest=calibration_digest,
        versions=dict(versions or {}),
    )
    write_atomically(folder / MANIFEST, (json.dumps(plain(manifest), indent=2, sort_keys=True) + "\n").encode())
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Reads manifest.json without checking the bytes. Raises CheckpointDamaged where it is missing or malformed."""
    path = folder / MANIFEST
    try:
        mapping = json.loads(path.read_bytes())
    except OSError:
        raise CheckpointDamaged(
            f"{folder}: has no {MANIFEST}: not a checkpoint, or one that was never finished"
        ) from None
    except ValueError as error:
        raise CheckpointDamaged(f"{path}: is not JSON: {error}") from None
    try:
        return build(Manifest, mapping, source=str(path))
    except ReadError as error:
        raise CheckpointDamaged(str(error)) from None


def verify(folder: Path) -> Manifest:
    """Reads the manifest and checks the size and SHA-256 of every file it lists. Raises CheckpointDamaged."""
    manifest = read_manifest(folder)
    for entry in manifest.files:
        path = folder / entry.path
        try:
            size = path.stat().st_size
        except OSError:
            raise CheckpointDamaged(f"{path}: listed in the manifest but missing") from None
        if size != entry.size:
            raise CheckpointDamaged(f"{path}: has {size} bytes, the manifest says {entry.size}")
        if sha256_file(path) != entry.sha256:
            raise CheckpointDamaged(f"{path}: its SHA-256 differs from the manifest's")
    return manifest


def sha256_file(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that a reader sees the old bytes or the new, never a part (temporary name, fsync, rename)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Makes renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
