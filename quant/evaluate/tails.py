"""What can be told of a stream of values without keeping it: moments, an almost exact median, a histogram."""

import math

import numpy as np
import torch

_BINS = 1 << 15
"""Magnitudes are binned by the upper 16 bits of their float32 form: 128 bins an octave, so a median is right to 0.4 %."""


class Tails:
    """Kurtosis and largest / median magnitude of all values given to `add`, in constant memory."""

    def __init__(self) -> None:
        self._count = 0
        self._powers = np.zeros(4)
        self._largest = 0.0
        self._bins = torch.zeros(_BINS, dtype=torch.int64)

    def add(self, values: torch.Tensor) -> None:
        """Takes a tensor of any shape."""
        flat = values.detach().flatten().double()
        square = flat * flat
        sums = torch.stack([flat.sum(), square.sum(), (square * flat).sum(), (square * square).sum()])
        self._powers += sums.cpu().numpy()
        self._count += flat.numel()
        magnitude = values.detach().flatten().float().abs()
        self._largest = max(self._largest, magnitude.max().item()) if magnitude.numel() else self._largest
        bits = magnitude.contiguous().view(torch.int32) >> 16
        self._bins += torch.bincount(bits, minlength=_BINS).cpu()

    @property
    def kurtosis(self) -> float:
        """Excess kurtosis (scipy.stats.kurtosis with its defaults): 0 for a normal distribution, 0 for a constant."""
        if not self._count:
            return math.nan
        mean, second, third, fourth = self._powers / self._count
        variance = second - mean**2
        if variance <= 1e-12 * second:
            return 0.0
        central = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
        return float(central / variance**2 - 3)

    @property
    def spike(self) -> float | None:
        """Largest / median magnitude; None where the median is 0."""
        if not self._count:
            return None
        reached = torch.searchsorted(self._bins.cumsum(0), (self._count + 1) // 2)
        middle = torch.tensor((int(reached) << 16) | (0 if reached == 0 else 0x8000), dtype=torch.int32)
        median = float(middle.view(torch.float32))
        return self._largest / median if median else None


class TwoHistograms:
    """Histograms of two streams over common bins, which hold equal shares of the first values of the first stream."""

    def __init__(self, bins: int = 128, sample: int = 1 << 20) -> None:
        self._wanted, self._sample = bins, sample
        self.edges: torch.Tensor | None = None
        self._counts: list[torch.Tensor] = []

    def add(self, values: torch.Tensor, *, second: bool = False) -> None:
        """Takes values of the first stream, or of the second; the first stream must come first."""
        flat = values.detach().flatten().float()
        if self.edges is None:
            assert not second
            some = flat[:: max(1, flat.numel() // self._sample)].sort().values
            ranks = torch.linspace(0, len(some) - 1, self._wanted + 1, device=some.device)[1:-1].round().long()
            self.edges = torch.unique_consecutive(some[ranks])
            self._counts = [torch.zeros(len(self.edges) + 1, dtype=torch.int64) for _ in range(2)]
        found = torch.bincount(torch.bucketize(flat, self.edges), minlength=len(self.edges) + 1)
        self._counts[second] += found.cpu()

    @property
    def divergence(self) -> float | None:
        """KL(first‖second) in nats; half a value is added to each bin, so that an empty one gives no infinity (Jeffreys'
        prior). None where a stream was empty."""
        if self.edges is None or any(not int(counts.sum()) for counts in self._counts):
            return None
        p, q = ((counts.double() + 0.5) / (counts.sum() + 0.5 * len(counts)) for counts in self._counts)
        return float((p * (p / q).log()).sum().clamp(min=0))
