"""Scheme: how numbers are stored and rounded, apart from the method that chose them and the file that holds them.

Standard library only.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """Rounding of one Linear's weight [O, I].

    `group` is the number of input columns that share a scale; None is one scale for each output row ("channel").
    Symmetric int codes span -2^(bits-1) .. 2^(bits-1)-1 with scale = absmax / ((2^bits - 1) / 2), as
    compressed-tensors has it (absmax / 7.5 at 4 bits, not / 7).
    """

    bits: int
    type: Literal["int", "float"] = "int"
    group: int | None = None
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.type == "float" and self.bits != 8:
            raise ValueError(f"bits: a float weight has 8 bits (FP8 E4M3), not {self.bits}")
        if self.type == "int" and not 2 <= self.bits <= 8:
            raise ValueError(f"bits: an int weight has 2 to 8 bits, not {self.bits}")
        if self.group is not None and self.group < 1:
            raise ValueError(
                f"group: must be a positive number of columns, or null for one scale a row, not {self.group}"
            )
        if self.type == "float" and not self.symmetric:
            raise ValueError("symmetric: a float weight is always symmetric")

    @property
    def qmin(self) -> int:
        """Lowest code in the signed domain."""
        return -(1 << (self.bits - 1))

    @property
    def qmax(self) -> int:
        """Highest code in the signed domain."""
        return (1 << (self.bits - 1)) - 1


@dataclass(frozen=True, kw_only=True)
class ActivationScheme:
    """Rounding of a Linear's input: per token at run time (dynamic), or one calibrated scale for the tensor."""

    bits: int
    type: Literal["int", "float"]
    granularity: Literal["token", "tensor"] = "token"
    dynamic: bool = True
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits != 8:
            raise ValueError(f"bits: activations have 8 bits, not {self.bits}")
        if self.granularity == "token" and not self.dynamic:
            raise ValueError("dynamic: a scale for each token can only be found at run time; set dynamic: true")


@dataclass(frozen=True, kw_only=True)
class KVCacheScheme:
    """Rounding of the stored keys and values, with calibrated scales."""

    bits: int
    type: Literal["int", "float"]
    granularity: Literal["tensor", "head"] = "tensor"

    def __post_init__(self) -> None:
        if self.bits != 8:
            raise ValueError(f"bits: a quantized KV cache has 8 bits, not {self.bits}")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What a Linear (with `kv_cache`: and the attention beside it) is rounded to. None leaves the model's dtype."""

    weights: WeightScheme
    activations: ActivationScheme | None = None
    kv_cache: KVCacheScheme | None = None

    @property
    def name(self) -> str:
        """The field's short name: W4A16, W8A8-int, W4A16-asym, ..."""
        activation_bits = 16 if self.activations is None else self.activations.bits
        text = f"W{self.weights.bits}A{activation_bits}"
        if self.weights.type == "float":
            text += "-fp8"
        if not self.weights.symmetric:
            text += "-asym"
        return text


@dataclass(frozen=True)
class GroupMismatch:
    """A Linear whose width its scheme's group does not divide: the answer of `check_group`, not an error yet."""

    layer: str
    in_features: int
    group: int

    def __str__(self) -> str:
        smaller = [g for g in (128, 64, 32, 16) if self.in_features % g == 0 and g != self.group]
        advice = f"use {' or '.join(map(str, smaller))}, or " if smaller else ""
        return (
            f"{self.layer}: in_features {self.in_features} is not a multiple of group {self.group}; "
            f"{advice}keep the layer at 16 bits with a rule {{match: '{self.layer}', keep: true}}"
        )


def check_group(layer: str, in_features: int, scheme: WeightScheme) -> GroupMismatch | None:
    """None where the group divides the width [I] of the layer, else what to say about it."""
    if scheme.group is None or in_features % scheme.group == 0:
        return None
    return GroupMismatch(layer, in_features, scheme.group)
