"""Tables of rotary angles by absolute position, plain and with Llama 3's scaling. P positions, D head size."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SUPPORTED = ("default", "llama3")


class RopeError(ValueError):
    """A rotary embedding that this release does not compute, or whose parameters are missing."""


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Stretches long wavelengths by `factor`, leaves short ones, blends between (Llama 3.1's RoPE scaling)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Base of the angles and their scaling (None: plain)."""

    theta: float
    scaling: Llama3Scaling | None = None


def read_rope(config: Mapping[str, Any]) -> RopeSpec:
    """From config.json, in its present form (rope_parameters) or the older one (rope_theta, rope_scaling). Raises RopeError."""
    parameters = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta"),
        **(config.get("rope_scaling") or {}),
    }
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind != "llama3":
        raise RopeError(f"rope_type {kind!r} is not supported; this release computes {' and '.join(SUPPORTED)}")
    try:
        return RopeSpec(
            theta=theta,
            scaling=Llama3Scaling(
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
            ),
        )
    except KeyError as error:
        raise RopeError(f"rope_type 'llama3' needs {error.args[0]} in config.json") from None


def rope_tables(
    spec: RopeSpec, head_size: int, positions: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos [P, D], sin [P, D]) for kernels.apply_rope: angles in fp32, rounded to `dtype`; the sine's first half is negated."""
    frequencies = _frequencies(spec, head_size)
    angles_PD2 = torch.arange(positions, dtype=torch.float32).unsqueeze(1) * frequencies
    cos, sin = angles_PD2.cos(), angles_PD2.sin()
    tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return tables[0].to(device, dtype), tables[1].to(device, dtype)


def _frequencies(spec: RopeSpec, head_size: int) -> torch.Tensor:
    plain = 1.0 / (spec.theta ** (torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size))
    scaling = spec.scaling
    if scaling is None:
        return plain
    wavelengths = 2 * math.pi / plain
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    share = (scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - share) * plain / scaling.factor + share * plain
    stretched = torch.where(wavelengths > longest, plain / scaling.factor, plain)
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), blended, stretched)
