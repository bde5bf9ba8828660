"""Writes a checkpoint folder: whole or not at all. Tensors arrive one by one and leave in files of bounded size."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from narrowgauge import __version__
from narrowgauge.quant.formats.checkpoint import CONFIG, INDEX, WEIGHTS
from narrowgauge.quant.formats.manifest import (
    MANIFEST,
    Base,
    CheckpointDamaged,
    Manifest,
    fsync_folder,
    read_manifest,
    verify,
    write_manifest,
)

REPORT = "quantization.json"
"""What quantizing did to each layer; lies beside the weights and holds nothing that differs between two equal runs."""
_SHARD_BYTES = 4 << 30
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class ExportError(ValueError):
    """A checkpoint that cannot be written where it should; the message says what stands in the way."""


def existing(output: Path, *, recipe_digest: str, base_digest: str) -> Manifest | None:
    """The manifest of the complete checkpoint of the same inputs at `output`, verified; None where nothing lies there.

    Raises ExportError where something else does.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    try:
        manifest = read_manifest(output)
        if manifest.recipe_digest == recipe_digest and manifest.base.digest == base_digest:
            return verify(output)
    except CheckpointDamaged as error:
        raise ExportError(f"{output}: {error}; remove it or choose another output") from None
    raise ExportError(f"{output}: holds a checkpoint of another recipe or base model; choose another output")


@contextlib.contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A hidden folder beside `output` that becomes `output` on leaving; after an error nothing remains."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        try:
            os.rename(temporary, output)
        except OSError as error:
            raise ExportError(f"{output}: cannot be put in place: {error.strerror}") from None
        fsync_folder(output.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class CheckpointWriter:
    """Collects tensors and writes them in files of at most `shard_bytes` (one tensor may exceed it)."""

    def __init__(self, folder: Path, *, shard_bytes: int = _SHARD_BYTES) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[tuple[str, ...]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes one tensor under its full name."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def finish(self) -> None:
        """Writes what is left and, for more than one file, the index."""
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, 1):
            file = WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            os.rename(self._part(number), self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            write_json(self._folder / INDEX, {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map})

    def _flush(self) -> None:
        if not self._pending:
            return
        self._shards.append(tuple(self._pending))
        path = self._part(len(self._shards))
        save_file(self._pending, path, metadata={"format": "pt"})
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self._pending, self._pending_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:05d}"


def commit(
    folder: Path,
    *,
    base_folder: Path,
    config: Mapping[str, Any],
    report: Mapping[str, Any],
    base: Base,
    recipe_digest: str,
    calibration_digest: str | None,
) -> Manifest:
    """Adds everything beside the weights to `folder`, the manifest last.

    Tokenizer, chat template and generation files are copied byte for byte: loading and saving them again changes them.
    """
    for path in sorted(base_folder.iterdir()):
        own = path.name in (CONFIG, MANIFEST, REPORT) or path.name.startswith(".")
        if path.is_file() and not own and not path.name.endswith(_NOT_COPIED):
            shutil.copyfile(path, folder / path.name)
    write_json(folder / CONFIG, config)
    write_json(folder / REPORT, report)
    return write_manifest(
        folder,
        base=base,
        recipe_digest=recipe_digest,
        calibration_digest=calibration_digest,
        versions={"narrowgauge": __version__, **{name: metadata.version(name) for name in ("torch", "transformers")}},
    )


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes JSON in the given order of keys, indented, without NaN."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
