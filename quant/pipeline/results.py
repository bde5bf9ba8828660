"""What quantizing did: to a layer, to a block, to the whole; and how far it has come."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.quant.formats.read import plain


class QuantizeError(ValueError):
    """A model that cannot be quantized; the message names the layer and the reason."""


@dataclass(frozen=True, kw_only=True)
class LayerResult:
    """What rounding did to one Linear.

    weight_error = ‖W - Q‖ / ‖W‖. output_error = ‖X(W - Q)ᵀ‖ / ‖XWᵀ‖ on the calibration inputs, null for a method without
    calibration. `fallback` says why the method was not used. `seconds` is the layer's share of its set; 0 where the
    checkpoint was found finished.
    """

    name: str
    scheme: str
    weight_error: float
    output_error: float | None
    fallback: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SmoothingResult:
    """What one smoother did to the Linears that read one producer: the range of its scales, null where it left them alone."""

    method: str
    linears: tuple[str, ...]
    smallest: float | None
    largest: float | None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class KVResult:
    """The calibrated scales of one attention layer's cache: smallest and largest over its heads (equal for one a tensor)."""

    name: str
    key: tuple[float, ...]
    value: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class BlockResult:
    """What was done to one block."""

    layers: tuple[LayerResult, ...] = ()
    smoothing: tuple[SmoothingResult, ...] = ()
    kv_cache: KVResult | None = None


@dataclass(frozen=True, kw_only=True)
class QuantizeResult:
    """A finished checkpoint; sizes are bytes of the weight files. `reused`: it lay there already, made from the same inputs.

    `resumed` counts the blocks that an interrupted run had finished.
    """

    path: Path
    digest: str
    layers: tuple[LayerResult, ...]
    size_bytes: int
    base_size_bytes: int
    seconds: float
    reused: bool = False
    resumed: int = 0


@dataclass(frozen=True)
class Progress:
    """`done` of `total` Linears (blocks, where no Linear is quantized); `stage` says what is at work; eta_s is None before
    the first estimate."""

    done: int
    total: int
    stage: str
    eta_s: float | None


class Meter:
    """Turns finished layers and blocks into Progress.

    Once a block is done, the time left goes by whole blocks, since smoothing, calibration and the forward pass between
    blocks take their share of each. Within the first block it goes by weights.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        blocks: int,
        report: Callable[[Progress], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sizes, self._blocks = sizes, blocks
        self._report, self._clock = report, clock
        self._done: set[str] = set()
        self._finished_before = self._finished_blocks = 0
        self._began = self._block_began = clock()

    def found(self, layers: tuple[LayerResult, ...]) -> None:
        """Counts a block that an earlier run finished."""
        self._done.update(layer.name for layer in layers)
        self._finished_before += 1

    def begin(self) -> None:
        """The first block to be worked on begins now; what came before (texts, embedding) is no measure for the rest."""
        self._began = self._block_began = self._clock()

    def say(self, stage: str) -> None:
        """Reports what is at work."""
        blocks = self._finished_before + self._finished_blocks
        done, total = (len(self._done), len(self._sizes)) if self._sizes else (blocks, self._blocks)
        self._report(Progress(done, total, stage, self._left_s()))

    def layer(self, name: str, stage: str) -> None:
        """Counts one layer."""
        self._done.add(name)
        self.say(stage)

    def block(self, stage: str) -> None:
        """Counts one block."""
        self._finished_blocks += 1
        self._block_began = self._clock()
        self.say(stage)

    def _left_s(self) -> float | None:
        now = self._clock()
        left = self._blocks - self._finished_before - self._finished_blocks
        if self._finished_blocks:
            each = (self._block_began - self._began) / self._finished_blocks
            return max(0.0, each * left - (now - self._block_began))
        if not self._done or self._finished_before:
            return None
        done = sum(self._sizes[name] for name in self._done)
        return (now - self._began) * (sum(self._sizes.values()) - done) / done


def quantization_report(methods: Sequence[object], blocks: Sequence[BlockResult]) -> dict[str, Any]:
    """The content of quantization.json: `methods`, `layers`, and `smoothing` and `kv_cache` where there is any."""
    report: dict[str, Any] = {
        "methods": plain(methods),
        "layers": _stable([layer for block in blocks for layer in block.layers]),
    }
    if smoothing := [one for block in blocks for one in block.smoothing]:
        report["smoothing"] = _stable(smoothing)
    if scales := [block.kv_cache for block in blocks if block.kv_cache]:
        report["kv_cache"] = _stable(scales)
    return report


def _stable(value: object) -> Any:
    """The JSON form of a result without times and without digits that depend on the order of a sum: equal for equal runs."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _stable(item) for key, item in value.items() if key != "seconds"}
    if isinstance(value, list | tuple):
        return [_stable(item) for item in value]
    plain_value = plain(value)
    return plain_value if plain_value is value else _stable(plain_value)
