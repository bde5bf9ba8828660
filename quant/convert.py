"""Converts a quantized checkpoint to another format, bit for bit: the same codes, zero points and scales under other names.

Where the numbers do not allow it, it is refused before anything is written, with the layers and the reason. "none" gives the
full-precision model that the checkpoint stands for.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from narrowgauge.quant.formats.base import FORMATS, CheckpointFormat, FormatError, QuantizedWeight, get_format
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.files import read_json
from narrowgauge.quant.formats.kv_cache import find_kv_scales
from narrowgauge.quant.formats.manifest import MANIFEST, Base, Manifest, verify
from narrowgauge.quant.formats.scheme import Scheme
from narrowgauge.quant.pipeline.export import (
    REPORT,
    CheckpointWriter,
    Expected,
    ExportError,
    check_space,
    commit,
    staged,
)

FULL_PRECISION = "none"
"""The target that dequantizes."""
_OTHER_FORMATS_FILES = ("quantize_config.json", "quant_config.json")
_NAMED = 3
"""Layers that a refusal names for one reason; the rest it counts."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ConvertError(ValueError):
    """A checkpoint that cannot become one of the format asked for; the message names the layers and the reason."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A finished conversion: `notes` say what was left behind; sizes are bytes of the weight files."""

    path: Path
    digest: str
    source_format: str
    format: str
    layers: int
    source_size_bytes: int
    size_bytes: int
    notes: tuple[str, ...] = ()


def convert(source: Path, output: Path, target: str) -> Conversion:
    """Writes the checkpoint at `source` to `output` in the format `target`, one of FORMATS, or "none".

    Files beside the weights are copied byte for byte; what the checkpoint was made from goes over into the new manifest.
    Raises ConvertError, FormatError, CheckpointDamaged (a source that is not what its manifest lists) and ExportError;
    after any of them nothing lies at `output`.
    """
    source, output = Path(source), Path(output).absolute()
    if target != FULL_PRECISION and target not in FORMATS:
        raise ConvertError(
            f"--format: unknown format {target!r}; known: {', '.join([*sorted(FORMATS), FULL_PRECISION])}"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ExportError(f"{output}: is not empty; choose another output")
    reader = CheckpointReader(source)
    if reader.layout is None:
        raise ConvertError(
            f"{source}: is in full precision; only quantized checkpoints are converted: see narrowgauge quantize"
        )
    if reader.layout.format == target:
        raise ConvertError(f"{source}: is in the format {target} already")
    manifest = verify(source) if (source / MANIFEST).is_file() else None
    conversion = _ToFullPrecision(reader) if target == FULL_PRECISION else _ToFormat(reader, get_format(target))
    conversion.check()
    check_space(output.parent, conversion.bytes_needed)
    with staged(output) as folder:
        writer = CheckpointWriter(folder)
        names = set()
        for name, tensor in conversion.tensors():
            writer.add(name, tensor)
            names.add(name)
        writer.finish()
        written = _commit(folder, reader, conversion, manifest=manifest, target=target, names=frozenset(names))
    return Conversion(
        path=output,
        digest=written.digest,
        source_format=reader.layout.format,
        format=target,
        layers=len(reader.layout.linears),
        source_size_bytes=reader.size_bytes,
        size_bytes=CheckpointReader(output).size_bytes,
        notes=conversion.notes,
    )


class _Copied(ABC):
    """What every conversion does with the tensors that are not quantized Linears: takes them over."""

    def __init__(self, reader: CheckpointReader) -> None:
        assert reader.layout is not None
        self.reader, self.layout = reader, reader.layout
        scales = [find_kv_scales(attention, reader.has) or () for attention in reader.attentions]
        self._replaced = {name for pair in scales for name in pair}
        self.notes: tuple[str, ...] = ()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor to write, by full name, in an order that depends on names alone."""
        for name in self.reader.names():
            module, _, local = name.rpartition(".")
            if name not in self._replaced and (module not in self.layout.linears or local == "bias"):
                yield name, self.reader.tensor(name)
        for name in sorted(self.layout.linears):
            for local, tensor in self.linear(name).items():
                yield f"{name}.{local}", tensor

    @abstractmethod
    def linear(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of one quantized Linear, by local name."""


class _ToFormat(_Copied):
    """The same codes, zero points and scales in another format."""

    def __init__(self, reader: CheckpointReader, target: CheckpointFormat) -> None:
        super().__init__(reader)
        self._target = target
        self._dtype = _model_dtype(reader)
        self.quantization_config: dict[str, Any] | None = None
        self.bytes_needed = reader.size_bytes

    def expected(self, names: frozenset[str]) -> Expected:
        """What the finished folder must say when it is read back."""
        return Expected(schemes=self.layout.linears, kv_cache=self.layout.kv_cache, names=names)

    def check(self) -> None:
        """Looks at every number before anything is written. Raises ConvertError with all that stands in the way."""
        reasons: dict[str, list[str]] = {}
        for name, scheme in self.layout.linears.items():
            if reason := self._refusal(name, scheme):
                reasons.setdefault(reason, []).append(name)
        if reasons:
            told = "; ".join(f"{_named(names)}: {reason}" for reason, names in reasons.items())
            raise ConvertError(f"{self.reader.folder}: cannot become {self._target.name}: {told}")
        try:
            kept = _kept(self.reader)
            self.quantization_config = self._target.config(self.layout.linears, kept, self.layout.kv_cache)
        except FormatError as error:
            raise ConvertError(f"{self.reader.folder}: cannot become {self._target.name}: {error}") from None
        if self._replaced and self.layout.kv_cache is None:
            self.notes = ("KV scales that the config does not use are left out",)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As above, and the KV scales under the names that the target gives them."""
        yield from super().tensors()
        for attention in self.reader.attentions if self.layout.kv_cache else ():
            scales = self.reader.kv_scales(attention)
            assert scales is not None
            yield from self._target.kv_tensors(attention, scales).items()

    def linear(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of one quantized Linear, by local name."""
        return self._target.pack(self._weight(name), self.layout.linears[name])

    def _refusal(self, name: str, scheme: Scheme) -> str | None:
        weight = self._weight(name)
        if not bool((weight.scales > 0).all()):
            return "a scale is zero or below, which is not written; quantize the model again"
        rows, columns = weight.codes.shape
        return self._target.refusal((rows, columns), scheme, weight)

    def _weight(self, name: str) -> QuantizedWeight:
        """The weight with its scales in the model's dtype, as loaders expect them, wherever that changes no bit of them."""
        weight = self.reader.unpack(name)
        scales = weight.scales.to(self._dtype)
        return replace(weight, scales=scales) if torch.equal(scales.double(), weight.scales.double()) else weight


class _ToFullPrecision(_Copied):
    """The weights that the checkpoint stands for, in the model's dtype."""

    def __init__(self, reader: CheckpointReader) -> None:
        super().__init__(reader)
        self._dtype = _model_dtype(reader)
        self.quantization_config: dict[str, Any] | None = None
        weights = sum(_elements(reader, name, scheme) for name, scheme in self.layout.linears.items())
        self.bytes_needed = reader.size_bytes + weights * self._dtype.itemsize

    def expected(self, names: frozenset[str]) -> Expected:
        """What the finished folder must say when it is read back."""
        return Expected(schemes={}, kv_cache=None, names=names)

    def check(self) -> None:
        """Everything can be dequantized; what full precision does not keep is said."""
        lost = []
        if any(scheme.activations is not None for scheme in self.layout.linears.values()):
            lost.append(
                "the rounding of activations is left out: the model answers slightly better than the checkpoint"
            )
        if self._replaced:
            lost.append("KV scales are left out")
        self.notes = tuple(lost)

    def linear(self, name: str) -> dict[str, torch.Tensor]:
        """The weight of one Linear."""
        return {"weight": self.reader.weight(name, self._dtype)}


def _commit(
    folder: Path,
    reader: CheckpointReader,
    conversion: "_ToFormat | _ToFullPrecision",
    *,
    manifest: Manifest | None,
    target: str,
    names: frozenset[str],
) -> Manifest:
    assert reader.layout is not None
    config = {
        key: value for key, value in reader.config.items() if key not in ("quantization_config", "compression_config")
    }
    extra: dict[str, dict[str, Any]] = {}
    if conversion.quantization_config is not None:
        config["quantization_config"] = conversion.quantization_config
        extra = get_format(target).extra_files(conversion.quantization_config)
    report = read_json(reader.folder / REPORT) if (reader.folder / REPORT).is_file() else {}
    source = {"format": reader.layout.format, "digest": manifest.digest if manifest else None}
    return commit(
        folder,
        base_folder=reader.folder,
        config=config,
        report={**report, "converted_from": source},
        base=manifest.base if manifest else Base(source=str(reader.folder)),
        recipe_digest=manifest.recipe_digest if manifest else None,
        calibration_digest=manifest.calibration_digest if manifest else None,
        extra_files=extra,
        left_out=_OTHER_FORMATS_FILES,
        expected=conversion.expected(names),
    )


def _kept(reader: CheckpointReader) -> tuple[str, ...]:
    """The Linears in full precision, by their tensors alone: matrices that are no embedding. A tied head counts as one."""
    assert reader.layout is not None
    kept = set() if "lm_head" in reader.layout.linears else {"lm_head"}
    for name in reader.names():
        module, _, local = name.rpartition(".")
        embeds = "embed" in module.rpartition(".")[2] or module.rpartition(".")[2] in ("wte", "wpe")
        if local == "weight" and module not in reader.layout.linears and not embeds and len(reader.shape(name)) == 2:
            kept.add(module)
    return tuple(sorted(kept))


def _elements(reader: CheckpointReader, name: str, scheme: Scheme) -> int:
    """Weights of a Linear by the bytes of its codes: packed in words, or one in each byte."""
    for local, bits in (("weight_packed", scheme.weights.bits), ("qweight", scheme.weights.bits), ("weight", 8)):
        if reader.has(f"{name}.{local}"):
            return reader.size_of(f"{name}.{local}") * 8 // bits
    return 0


def _model_dtype(reader: CheckpointReader) -> torch.dtype:
    """The dtype that config.json gives the model; else that of its norms and embeddings."""
    said = str(reader.config.get("dtype") or reader.config.get("torch_dtype") or "")
    if said in _DTYPES:
        return _DTYPES[said]
    stored = {reader.stored(name).dtype for name in reader.names()}
    return torch.bfloat16 if "BF16" in stored else torch.float16 if "F16" in stored else torch.float32


def _named(names: list[str]) -> str:
    listed = ", ".join(names[:_NAMED])
    return listed if len(names) <= _NAMED else f"{listed} and {len(names) - _NAMED} more"
