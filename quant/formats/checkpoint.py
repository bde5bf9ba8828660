"""Reads a checkpoint folder (config.json + safetensors) tensor by tensor, quantized or not, on one code path.

Nothing is loaded before it is asked for: the files stay mapped, so a model larger than memory can be walked through.
What a checkpoint is, the tensors decide; config.json is asked for what they leave open, and a warning tells where it differs.
"""

import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from narrowgauge.quant.formats.base import (
    CheckpointFormat,
    FormatError,
    KVScales,
    QuantizationLayout,
    QuantizedWeight,
    StoredTensor,
)
from narrowgauge.quant.formats.files import INDEX, WEIGHTS, TensorFiles, read_json
from narrowgauge.quant.formats.kv_cache import attentions_with_scales, find_kv_scales, read_kv_scales
from narrowgauge.quant.formats.recognize import quantized_modules, recognize
from narrowgauge.quant.formats.scheme import Scheme

__all__ = ["CONFIG", "INDEX", "WEIGHTS", "CheckpointReader", "LinearTensors"]

logger = logging.getLogger(__name__)

CONFIG = "config.json"
_BESIDE = ("quantize_config.json", "quant_config.json")
"""Where AutoGPTQ and AutoAWQ kept what belongs in config.json's quantization_config."""


@dataclass(frozen=True, kw_only=True)
class LinearTensors:
    """What is stored for one Linear, by local name ("weight", "weight_packed", ...); scheme None = full precision."""

    scheme: Scheme | None
    tensors: Mapping[str, torch.Tensor]
    bias: torch.Tensor | None


class CheckpointReader:
    """Lazy access to the tensors of one checkpoint folder.

    Raises FormatError where config.json or the weights are missing or malformed, and where the quantization is one
    that this release does not read. `layout` is None for a model in full precision; its warnings are logged once.
    """

    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FormatError(f"{self.folder}: there is no such folder")
        self.config: dict[str, Any] = read_json(self.folder / CONFIG)
        self._files = TensorFiles(self.folder, device=device)
        self._locals: dict[str, list[str]] = {}
        for name in self._files.file_of:
            module, _, local = name.rpartition(".")
            self._locals.setdefault(module, []).append(local)
        self._format: CheckpointFormat | None = None
        try:
            self.layout: QuantizationLayout | None = self._read_layout()
        except FormatError as error:
            raise FormatError(f"{self.folder}: {str(error).removeprefix(f'{self.folder}: ')}") from None
        for warning in self.layout.warnings if self.layout else ():
            _warn_once(f"{self.folder}: {warning}")

    def names(self) -> tuple[str, ...]:
        """Names of the stored tensors, sorted."""
        return tuple(sorted(self._files.file_of))

    def has(self, name: str) -> bool:
        """Whether a tensor of that name is stored."""
        return name in self._files.file_of

    def tensor(self, name: str) -> torch.Tensor:
        """One stored tensor as it is on disk. Raises FormatError for a name that is not stored."""
        return self._files.tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one stored tensor, without reading it."""
        return self.stored(name).shape

    def stored(self, name: str) -> StoredTensor:
        """Dtype and shape of one stored tensor, without reading it."""
        return self._files.stored(name)

    def matrix_dtype(self, name: str) -> torch.dtype:
        """torch's dtype of one stored matrix, without reading it."""
        return self._files.matrix_dtype(name)

    def size_of(self, name: str) -> int:
        """Bytes of one stored tensor, without reading it."""
        return self._files.size_of(name)

    def linear(self, name: str) -> LinearTensors:
        """All tensors of one module ("model.layers.0.self_attn.q_proj"). Raises FormatError where none is stored."""
        if name not in self._locals:
            raise FormatError(f"{self.folder}: no tensor of a module {name} is stored")
        tensors = {local: self.tensor(f"{name}.{local}") for local in self._locals[name]}
        bias = tensors.pop("bias", None)
        scheme = self.layout.linears.get(name) if self.layout else None
        return LinearTensors(scheme=scheme, tensors=tensors, bias=bias)

    def weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The weight [O, I] of a Linear in `dtype`, dequantized where it is stored quantized. Raises FormatError."""
        linear = self.linear(name)
        if linear.scheme is None:
            if "weight" not in linear.tensors:
                raise FormatError(f"{self.folder}: {name}.weight is not stored")
            return linear.tensors["weight"].to(dtype)
        assert self._format is not None
        try:
            return self._format.dequantize(linear.tensors, linear.scheme, dtype)
        except FormatError as error:
            raise FormatError(f"{self.folder}: {name}: {error}") from None

    def unpack(self, name: str) -> QuantizedWeight:
        """Codes, scales and zeros of a Linear that `layout` lists, by its format. Raises FormatError with the layer's name."""
        linear = self.linear(name)
        assert linear.scheme is not None
        assert self._format is not None
        try:
            return self._format.unpack(linear.tensors, linear.scheme)
        except FormatError as error:
            raise FormatError(f"{self.folder}: {name}: {error}") from None

    def kv_scales(self, attention: str) -> KVScales | None:
        """The KV scales of one attention layer ("model.layers.0.self_attn"), [1] or [kv heads]; None where none is stored.

        All spellings that writers have used are known. Raises FormatError for a scale that is not finite and above zero.
        """
        try:
            names = find_kv_scales(attention, self.has)
            return None if names is None else read_kv_scales(names, self.tensor)
        except FormatError as error:
            raise FormatError(f"{self.folder}: {error}") from None

    def file(self, name: str) -> Path:
        """The file that holds a stored tensor. Raises FormatError for a name that is not stored."""
        return self._files.file(name)

    @property
    def attentions(self) -> tuple[str, ...]:
        """Names of the attention modules that have KV scales, sorted."""
        return attentions_with_scales(self._files.file_of)

    @property
    def size_bytes(self) -> int:
        """Bytes of the weight files."""
        return self._files.size_bytes()

    def _read_layout(self) -> QuantizationLayout | None:
        config = self._quantization_config()
        if config is None and not quantized_modules(self._locals):
            return None
        stored = {
            module: {local: self.stored(f"{module}.{local}") for local in locals_}
            for module, locals_ in sorted(self._locals.items())
        }
        recognized = recognize(config, stored, self.tensor)
        if recognized is None:
            return None
        self._format, differences = recognized
        layout = self._format.layout(config or {}, stored, self.tensor)
        layout, kv_differences = self._with_kv_cache(layout)
        warnings = (*differences, *layout.warnings, *kv_differences, *self._untie(layout))
        return replace(layout, warnings=tuple(_gathered(warnings)))

    def _quantization_config(self) -> dict[str, Any] | None:
        config = self.config.get("quantization_config") or self.config.get("compression_config")
        if config is not None and not isinstance(config, dict):
            raise FormatError(f"{CONFIG}: quantization_config must be an object, not {config!r}")
        if config is None and quantized_modules(self._locals):
            beside = [self.folder / name for name in _BESIDE if (self.folder / name).is_file()]
            config = read_json(beside[0]) if beside else None
        return config

    def _with_kv_cache(self, layout: QuantizationLayout) -> tuple[QuantizationLayout, list[str]]:
        """The layout with the KV scheme that the stored scales bear out, every one of them looked at."""
        scheme, attentions = layout.kv_cache, self.attentions
        scales = [scales for attention in attentions if (scales := self.kv_scales(attention)) is not None]
        if scheme is None:
            stored = (
                f"{attentions[0]} has KV scales, but kv_cache_scheme is null: the cache is not rounded"
                if scales
                else ""
            )
            return layout, [stored] if stored else []
        if not scales:
            return replace(layout, kv_cache=None), [
                f"kv_cache_scheme is {scheme.name}, but no KV scale is stored: the cache is not rounded"
            ]
        warnings = []
        granularity = "head" if any(scale.key.numel() > 1 for scale in scales) else scheme.granularity
        if granularity != scheme.granularity:
            warnings.append(f"kv_cache_scheme is {scheme.name}, but one scale a head is stored; the tensors are right")
        keyed = {module.rpartition(".")[0] for module in self._locals if module.endswith((".k_proj", ".qkv_proj"))}
        if missing := sorted(keyed - set(attentions)):
            warnings.append(f"{missing[0]} ({len(missing)} in all) has no KV scales: its cache is not rounded")
        return replace(layout, kv_cache=replace(scheme, granularity=granularity)), warnings

    def _untie(self, layout: QuantizationLayout) -> list[str]:
        """A quantized head stands for itself, so a flag that ties it to the embedding is wrong: loaders would drop the head."""
        heads = [name for name in layout.linears if name.rpartition(".")[2] == "lm_head"]
        tied = self.config.get("tie_word_embeddings") is True
        if heads:
            self.config["tie_word_embeddings"] = False
        if not heads or not tied:
            return []
        return [f"config.json ties {heads[0]} to the embedding, but a quantized one is stored; the tensors are right"]


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def _gathered(warnings: Iterable[str]) -> list[str]:
    """One line for the layers of which the same is said."""
    modules: dict[str, list[str]] = {}
    for warning in warnings:
        module, colon, text = warning.partition(": ")
        modules.setdefault(text if colon and " " not in module else warning, []).append(module)
    return [
        text if text.startswith(names[0]) else f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {text}"
        for text, names in modules.items()
    ]
