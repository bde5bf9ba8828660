"""Writes a checkpoint folder: whole or not at all, in files of bounded size, and reads it back before it is called done."""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from narrowgauge import __version__
from narrowgauge.quant.formats.base import FormatError
from narrowgauge.quant.formats.checkpoint import CONFIG, INDEX, WEIGHTS, CheckpointReader
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
from narrowgauge.quant.formats.scheme import KVCacheScheme, Scheme
from narrowgauge.quant.pipeline.shards import Piece, TensorNotWritten, pieces, write_pieces, write_tensors

REPORT = "quantization.json"
"""What quantizing did to each layer; lies beside the weights and holds nothing that differs between two equal runs."""
SHARD_BYTES = 4 << 30
WHOLE_BYTES = 256 << 20
"""A part file that large becomes a shard as it is: putting it together with others would write its bytes twice."""
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


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


def check_space(folder: Path, needed: int) -> None:
    """Refuses early what the disk of `folder` (or of its nearest parent that exists) has no room for. Raises ExportError."""
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ExportError(
            f"{folder}: needs about {needed / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free on {place}; "
            "make room or choose another output"
        )


@contextlib.contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A hidden folder beside `output` that becomes `output` on leaving; after an error nothing remains.

    Raises ExportError where the disk is full or the output cannot be put in place.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        with disk_errors(output):
            yield temporary
        temporary.chmod(0o755)
        put_in_place(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(folder: Path, output: Path) -> None:
    """Makes a finished folder on the same disk the output, by one rename. Raises ExportError where something lies there."""
    try:
        os.rename(folder, output)
    except OSError as error:
        raise ExportError(f"{output}: cannot be put in place: {error.strerror}") from None
    fsync_folder(output.parent)


@contextlib.contextmanager
def disk_errors(output: Path, kept: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turns what a full or broken disk answers into an ExportError of one line, which ends in what `kept` says."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, TensorNotWritten) and error.errno not in _FULL:
            raise
        remedy = "; make room and run again" if error.errno in _FULL else ""
        raise ExportError(f"{output}: cannot write {error.strerror}{remedy}{kept()}") from None


class CheckpointWriter:
    """Collects tensors and writes them in files of at most `shard_bytes` (one tensor may exceed it)."""

    def __init__(self, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
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
        files = _file_names(len(self._shards))
        for number, file in enumerate(files, 1):
            os.rename(self._part(number), self._folder / file)
        _write_index(self._folder, zip(files, self._shards, strict=True), self._total_bytes)

    def _flush(self) -> None:
        if not self._pending:
            return
        self._shards.append(tuple(self._pending))
        write_tensors(self._part(len(self._shards)), self._pending)
        self._pending, self._pending_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:05d}"


def assemble(
    folder: Path,
    parts: Iterable[Path],
    others: Sequence[Piece],
    *,
    shard_bytes: int = SHARD_BYTES,
    whole_bytes: int = WHOLE_BYTES,
) -> None:
    """Fills `folder` with the weight files made of whole `parts`, then of `others`, in order.

    A part of at least `whole_bytes` gets a second name instead of a copy; the parts stay as they are, so that what is
    broken off here can begin again. No tensor comes into memory. Raises TensorNotWritten.
    """
    shards: list[list[Piece]] = [[]]
    size = 0
    whole: set[Path] = set()
    groups = [(part, list(pieces(part))) for part in parts]
    for part, members in [*groups, (None, list(others))]:
        own = sum(piece.size for piece in members)
        if part is not None and whole_bytes <= own <= shard_bytes:
            whole.add(part)
            shards += [members, []]
            size = 0
            continue
        for piece in members:
            if shards[-1] and size + piece.size > shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(piece)
            size += piece.size
    shards = [shard for shard in shards if shard]
    files = _file_names(len(shards))
    for file, shard in zip(files, shards, strict=True):
        if shard[0].path in whole:
            _second_name(shard, folder / file)
        else:
            write_pieces(folder / file, shard)
    total = sum(piece.size for shard in shards for piece in shard)
    _write_index(folder, zip(files, [tuple(piece.name for piece in shard) for shard in shards], strict=True), total)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a finished folder must say when it is read back: the Scheme of each quantized Linear, the KV cache's, the names
    of all tensors."""

    schemes: Mapping[str, Scheme]
    kv_cache: KVCacheScheme | None
    names: frozenset[str]


def commit(
    folder: Path,
    *,
    base_folder: Path,
    config: Mapping[str, Any],
    report: Mapping[str, Any],
    base: Base,
    recipe_digest: str | None,
    calibration_digest: str | None,
    extra_files: Mapping[str, Mapping[str, Any]] | None = None,
    left_out: Collection[str] = (),
    expected: Expected | None = None,
) -> Manifest:
    """Adds everything beside the weights to `folder`, checks it against `expected`, and writes the manifest last.

    Tokenizer, chat template and generation files are copied byte for byte, but for those named in `left_out`: loading and
    saving them again changes them. Raises ExportError where the folder does not read back as expected.
    """
    written = {CONFIG: config, REPORT: report, **(extra_files or {})}
    for path in sorted(base_folder.iterdir()):
        own = path.name in {*written, *left_out, MANIFEST} or path.name.startswith(".")
        if path.is_file() and not own and not path.name.endswith(_NOT_COPIED):
            shutil.copyfile(path, folder / path.name)
    for name, value in written.items():
        write_json(folder / name, value)
    if expected is not None:
        check_written(folder, expected)
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return write_manifest(
        folder,
        base=base,
        recipe_digest=recipe_digest,
        calibration_digest=calibration_digest,
        versions={"narrowgauge": __version__, **{name: metadata.version(name) for name in ("torch", "transformers")}},
    )


def check_written(folder: Path, expected: Expected) -> None:
    """Reads a finished folder back: does it say and hold what was planned? Raises ExportError for the first difference.

    Stored quantized are exactly the Linears of `expected.schemes`, with these schemes; the tensors are exactly
    `expected.names`; the index counts their bytes; every scale is finite and above zero.
    """
    try:
        reader = CheckpointReader(folder)
    except FormatError as error:
        raise ExportError(f"the finished files cannot be read back: {error}") from None
    linears = dict(reader.layout.linears) if reader.layout else {}
    schemes = expected.schemes
    if odd := sorted(name for name in {*linears, *schemes} if linears.get(name) != schemes.get(name)):
        found, planned = (one[odd[0]].name if odd[0] in one else "full precision" for one in (linears, schemes))
        raise ExportError(f"{odd[0]}: was planned as {planned} but reads back as {found}")
    if (reader.layout.kv_cache if reader.layout else None) != expected.kv_cache:
        raise ExportError(f"{CONFIG}: the scheme of the KV cache does not read back as planned")
    if odd := sorted(set(reader.names()) ^ expected.names):
        how = "is missing from" if odd[0] in expected.names else "stands unplanned in"
        raise ExportError(f"{odd[0]}: {how} the finished files")
    for name in reader.names():
        if "scale" in name.rpartition(".")[2]:
            scales = reader.tensor(name).float()
            if not bool((torch.isfinite(scales) & (scales > 0)).all()):
                raise ExportError(f"{name}: holds a scale that is not finite and above zero")
    if (folder / INDEX).exists():
        counted = json.loads((folder / INDEX).read_bytes())["metadata"]["total_size"]
        stored = sum(reader.size_of(name) for name in reader.names())
        if counted != stored:
            raise ExportError(f"{INDEX}: counts {counted} bytes of {stored}")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes JSON in the given order of keys, indented, without NaN."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _file_names(count: int) -> list[str]:
    return (
        [WEIGHTS]
        if count == 1
        else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    )


def _write_index(folder: Path, shards: Iterable[tuple[str, tuple[str, ...]]], total_bytes: int) -> None:
    """Names the file of each tensor, where there is more than one file."""
    weight_map = {name: file for file, names in shards for name in names}
    if len(set(weight_map.values())) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _second_name(shard: Sequence[Piece], path: Path) -> None:
    try:
        os.link(shard[0].path, path)
    except OSError:  # a file system without links
        write_pieces(path, shard)
