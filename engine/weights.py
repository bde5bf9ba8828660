"""WeightLoader: hands a checkpoint's tensors to a model by name, checks shapes, and knows what was left over."""

import logging
from collections import Counter

import torch

from narrowgauge.engine.linear_methods.base import LinearMethod, LinearOptions, StoredLinear, make_linear
from narrowgauge.engine.linear_methods.dense import DenseLinear
from narrowgauge.quant.formats.checkpoint import CheckpointReader

logger = logging.getLogger(__name__)

IGNORED = (".rotary_emb.inv_freq",)
"""Stored by old exporters, computed by us."""
KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", "_proj.output_scale")
"""Scales of a quantized KV cache: this engine's cache keeps the model's dtype, which loses nothing by ignoring them."""


class WeightError(ValueError):
    """A checkpoint whose tensors do not fit its config.json; the message names the tensor."""


class WeightLoader:
    """Loads each tensor once, in the model's dtype, onto its device."""

    def __init__(self, reader: CheckpointReader, *, choice: str, options: LinearOptions) -> None:
        self._reader = reader
        self._choice = choice
        self._options = options
        self._taken: set[str] = set()
        self.methods: Counter[str] = Counter()
        self.nbytes = 0

    def has(self, name: str) -> bool:
        """Whether a tensor of that name is stored."""
        return self._reader.has(name)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One plain tensor. Raises WeightError where its shape is not `shape`, FormatError where it is not stored."""
        stored = self._reader.tensor(name)
        if tuple(stored.shape) != shape:
            raise WeightError(
                f"{self._reader.folder}: {name} has shape {list(stored.shape)}, but config.json needs {list(shape)}"
            )
        self._taken.add(name)
        self.nbytes += stored.numel() * self._options.dtype.itemsize
        return stored.to(self._options.device, self._options.dtype)

    def linear(self, *names: str) -> LinearMethod:
        """One Linear, or several with the same input packed into one (outputs side by side, in this order)."""
        method = make_linear(StoredLinear(self._reader, names), self._choice, self._options)
        self._taken |= {tensor for tensor in self._reader.names() if tensor.rpartition(".")[0] in names}
        self._count(method)
        return method

    def tied(self, weight_OI: torch.Tensor) -> LinearMethod:
        """A Linear that shares a weight with something else (the output head with the embedding)."""
        method = DenseLinear(weight_OI, None, blocked=self._options.blocked)
        self._count(method)
        return method

    def check_all_taken(self) -> None:
        """Raises WeightError for a stored tensor that nobody asked for: the model would silently be another one."""
        if any(name.endswith(KV_SCALES) and name not in self._taken for name in self._reader.names()):
            logger.warning(
                "%s: holds scales of a quantized KV cache; the cache stays in the model's dtype", self._reader.folder
            )
        left = [
            name
            for name in self._reader.names()
            if name not in self._taken and not name.endswith((*IGNORED, *KV_SCALES))
        ]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise WeightError(
                f"{self._reader.folder}: {left[0]}{more} is stored, but this architecture does not use it"
            )

    def _count(self, method: LinearMethod) -> None:
        self.methods[method.name] += 1
        self.nbytes += method.nbytes
