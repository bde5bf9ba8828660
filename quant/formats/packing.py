"""Small integers in int32 words: code + 2^(bits-1), lowest bits first, along the last dimension.

compressed-tensors packs so; GPTQ and AWQ do after a transposition or a change of order.

Widths that divide a word only: 3, 5, 6 and 7 bits are laid out differently by different releases of compressed-tensors,
so files with them cannot be exchanged.
"""

import torch

PACKED_BITS = (2, 4, 8)


def pack_int32(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes [..., C] int8 (signed domain) into [..., ceil(C * bits / 32)] int32; bits beyond the last code are zero.

    Raises ValueError for a width other than 2, 4 or 8, or codes that are not int8.
    """
    _check_bits(bits)
    if codes.dtype != torch.int8:
        raise ValueError(f"codes must be int8, not {codes.dtype}")
    *outer, columns = codes.shape
    per_word = 32 // bits
    words = -(-columns // per_word)
    values = codes.to(torch.int32) + (1 << (bits - 1))
    values = torch.nn.functional.pad(values, (0, words * per_word - columns)).reshape(*outer, words, per_word)
    # The fields do not overlap, so their sum is their union; the top field may set the sign bit.
    return (values << _shifts(bits, codes.device)).sum(-1, dtype=torch.int32)


def unpack_int32(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The inverse of `pack_int32`: [..., W] int32 -> [..., columns] int8 in the signed domain.

    Raises ValueError where W words cannot hold exactly that many columns.
    """
    _check_bits(bits)
    if packed.dtype != torch.int32:
        raise ValueError(f"packed codes must be int32, not {packed.dtype}")
    *outer, words = packed.shape
    per_word = 32 // bits
    if words != -(-columns // per_word):
        raise ValueError(f"{columns} codes of {bits} bits take {-(-columns // per_word)} words, not {words}")
    fields = (packed.unsqueeze(-1) >> _shifts(bits, packed.device)) & ((1 << bits) - 1)
    codes = (fields - (1 << (bits - 1))).to(torch.int8)
    return codes.reshape(*outer, words * per_word)[..., :columns].contiguous()


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, 32, bits, dtype=torch.int32, device=device)


def _check_bits(bits: int) -> None:
    if bits not in PACKED_BITS:
        raise ValueError(f"codes of {bits} bits cannot be packed; use 2, 4 or 8")
