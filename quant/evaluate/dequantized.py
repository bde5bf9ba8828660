"""A quantized checkpoint read as if it were one in full precision: the same tensors, each under the name it has there."""

from pathlib import Path

import torch

from narrowgauge.quant.formats.base import FormatError, KVScales
from narrowgauge.quant.formats.checkpoint import CheckpointReader, LinearTensors

_KV_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale")


class DequantizedReader(CheckpointReader):
    """A CheckpointReader that speaks of full weights, whatever the files hold; `files` is the reader of what they do hold.

    The weight of a quantized Linear comes dequantized in `dtype`; what belongs to its storage (packed codes, scales) and
    the scales of stored keys and values have no name here. Everything else is as it is on disk. `layout` is None.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
        self.files = CheckpointReader(folder)
        self._dtype = dtype
        self._quantized: frozenset[str] = (
            frozenset()
        )  # while the layout is read, which asks for tensors as they are stored
        super().__init__(folder)
        self._quantized = frozenset(self.layout.linears) if self.layout else frozenset()
        self.layout = None

    def names(self) -> tuple[str, ...]:
        """Names of the tensors that a model in full precision would have, sorted."""
        weights = {f"{module}.weight" for module in self._quantized}
        return tuple(sorted(weights | {name for name in self.files.names() if self._is_plain(name)}))

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return self._is_weight(name) or (self.files.has(name) and self._is_plain(name))

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor: a quantized Linear's weight dequantized, any other as it is on disk. Raises FormatError."""
        if self._is_weight(name):
            return self.files.weight(name.removesuffix(".weight"), self._dtype)
        return self.files.tensor(name)

    def linear(self, name: str) -> LinearTensors:
        """The full weight and the bias of one Linear. Raises FormatError where it is not stored."""
        if not self.has(f"{name}.weight"):
            raise FormatError(f"{self.folder}: {name}.weight is not stored")
        bias = f"{name}.bias"
        return LinearTensors(
            scheme=None,
            tensors={"weight": self.tensor(f"{name}.weight")},
            bias=self.tensor(bias) if self.has(bias) else None,
        )

    def kv_scales(self, attention: str) -> KVScales | None:
        """As the files have them."""
        return self.files.kv_scales(attention)

    def _is_weight(self, name: str) -> bool:
        module, _, local = name.rpartition(".")
        return local == "weight" and module in self._quantized

    def _is_plain(self, name: str) -> bool:
        module, _, local = name.rpartition(".")
        return local == "bias" if module in self._quantized else local not in _KV_SCALES
