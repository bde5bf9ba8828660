"""4-bit weights on a CPU by torch's packed operators. The twin is reference/int4_gemm.py.

torch's own kernel is quick with bfloat16 activations and scales only (fp32 and fp16 take a scalar path), and up to about eight
rows: with more, a product with dequantized weights wins. T tokens, O out_features, I in_features, G groups.
"""

from dataclasses import dataclass

import torch

GROUPS = (32, 64, 128)
MAX_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class PackedInt4:
    """Codes in torch's CPU order, and per group (scale, -zero * scale) as [G, O, 2] bfloat16."""

    codes: torch.Tensor
    scales_zeros_GO2: torch.Tensor
    group: int

    @property
    def nbytes(self) -> int:
        """Bytes that the product reads."""
        return self.codes.nbytes + self.scales_zeros_GO2.nbytes


def packs(*, out_features: int, in_features: int, group: int) -> bool:
    """Whether the operator takes a weight of this shape: its tiles are 16 outputs wide."""
    return group in GROUPS and in_features % group == 0 and out_features % 16 == 0


def pack_int4(codes_OI: torch.Tensor, scales_OG: torch.Tensor, zeros_OG: torch.Tensor | None) -> PackedInt4:
    """Packs int8 codes (-8..7) for `int4_gemm`. The shape must satisfy `packs`."""
    unsigned = codes_OI.to(torch.int32) + 8
    scales = scales_OG.float()
    offsets = torch.zeros_like(scales) if zeros_OG is None else -zeros_OG.float() * scales
    return PackedInt4(
        codes=torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, 1),
        scales_zeros_GO2=torch.stack((scales, offsets), -1).transpose(0, 1).to(torch.bfloat16).contiguous(),
        group=codes_OI.shape[1] // scales_OG.shape[1],
    )


def int4_gemm(x_TI: torch.Tensor, weight: PackedInt4) -> torch.Tensor:
    """x [T, I] bfloat16 times the packed weight: [T, O] bfloat16."""
    out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x_TI, weight.codes, weight.group, weight.scales_zeros_GO2
    )
    return out
