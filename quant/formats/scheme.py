"""Scheme: how numbers are stored and rounded, apart from the method that chose them and the file that holds them.

Standard library only.
"""

from dataclasses import dataclass
from typing import Literal

FP8_MAX = 448.0
"""Largest finite value of float8 E4M3FN."""

Granularity = Literal["tensor", "channel", "group", "block"]


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """Rounding of one Linear's weight [O, I]: 2 to 8 bit integers, or 8-bit floats (E4M3FN).

    Which weights share a scale: `group` input columns of one row; a `block` of (rows, columns), ragged at the edges; the
    whole tensor with `per_tensor`; else each output row ("channel").
    Symmetric int codes span -2^(bits-1) .. 2^(bits-1)-1 with scale = absmax / ((2^bits - 1) / 2), as
    compressed-tensors has it (absmax / 7.5 at 4 bits, not / 7); a float's scale is absmax / 448.
    """

    bits: int
    type: Literal["int", "float"] = "int"
    group: int | None = None
    block: tuple[int, ...] | None = None
    per_tensor: bool = False
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
        if self.block is not None and (len(self.block) != 2 or min(self.block) < 1):
            raise ValueError(f"block: must be two positive numbers, [rows, columns], not {list(self.block)}")
        if (self.group is not None) + (self.block is not None) + self.per_tensor > 1:
            raise ValueError("group, block and per_tensor exclude one another: a weight has one kind of scale")
        if self.type == "float" and not self.symmetric:
            raise ValueError("symmetric: a float weight is always symmetric")
        if self.block is not None and self.type != "float":
            raise ValueError("block: int weights have a group of columns, not a block; set type: float for FP8")

    @property
    def granularity(self) -> Granularity:
        """What shares one scale."""
        if self.per_tensor:
            return "tensor"
        if self.block is not None:
            return "block"
        return "channel" if self.group is None else "group"

    @property
    def qmin(self) -> int:
        """Lowest int code in the signed domain."""
        return -(1 << (self.bits - 1))

    @property
    def qmax(self) -> int:
        """Highest int code in the signed domain."""
        return (1 << (self.bits - 1)) - 1

    def grid(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Rows and columns of the scales of a weight [O, I]."""
        if self.block is not None:
            return -(-out_features // self.block[0]), -(-in_features // self.block[1])
        if self.per_tensor:
            return 1, 1
        return out_features, in_features // (self.group or in_features)


@dataclass(frozen=True, kw_only=True)
class ActivationScheme:
    """Rounding of a Linear's input [T, I] to 8 bits.

    One scale for each token ("token"), for each token and `group` columns ("group"), both found at run time (dynamic), or
    for the whole tensor ("tensor"): calibrated, or dynamic. Scales are absmax / 127.5 for int and absmax / 448 for float.
    """

    bits: int
    type: Literal["int", "float"]
    granularity: Literal["token", "tensor", "group"] = "token"
    group: int | None = None
    dynamic: bool = True
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits != 8:
            raise ValueError(f"bits: activations have 8 bits, not {self.bits}")
        if self.granularity != "tensor" and not self.dynamic:
            raise ValueError("dynamic: a scale for each token can only be found at run time; set dynamic: true")
        if (self.granularity == "group") != (self.group is not None):
            raise ValueError("group: goes with granularity: group, and only with it")
        if self.group is not None and self.group < 1:
            raise ValueError(f"group: must be a positive number of columns, not {self.group}")
        if not self.symmetric:
            raise ValueError("symmetric: asymmetric activations are not supported; set symmetric: true")


@dataclass(frozen=True, kw_only=True)
class KVCacheScheme:
    """Rounding of the stored keys (after the rotary embedding) and values, one calibrated scale a tensor or a kv head."""

    bits: int
    type: Literal["int", "float"]
    granularity: Literal["tensor", "head"] = "tensor"

    def __post_init__(self) -> None:
        if self.bits != 8:
            raise ValueError(f"bits: a quantized KV cache has 8 bits, not {self.bits}")

    @property
    def name(self) -> str:
        """The field's short name: KV8-fp8, KV8-int-head, ..."""
        text = f"KV{self.bits}-{'fp8' if self.type == 'float' else 'int'}"
        return text if self.granularity == "tensor" else f"{text}-head"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What a Linear is rounded to. Activations None leaves them in the model's dtype."""

    weights: WeightScheme
    activations: ActivationScheme | None = None

    def __post_init__(self) -> None:
        if self.activations is not None and self.activations.type != self.weights.type:
            raise ValueError(
                f"activations: {self.activations.type} activations do not go with {self.weights.type} weights"
            )

    @property
    def name(self) -> str:
        """The field's short name: W4A16, W4A16-asym, W8A8 (int), W8A8-fp8, W8A8-fp8-static, W8A8-fp8-block, ..."""
        parts = [f"W{self.weights.bits}A{16 if self.activations is None else self.activations.bits}"]
        if self.weights.type == "float":
            parts.append("fp8")
        if self.weights.block is not None:
            parts.append("block")
        if self.activations is not None and not self.activations.dynamic:
            parts.append("static")
        if not self.weights.symmetric:
            parts.append("asym")
        return "-".join(parts)


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
