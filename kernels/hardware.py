"""What this machine's processor can do, and what follows for the choice of dtype."""

import functools
import platform
from pathlib import Path

import torch

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets that the kernel reports; empty where /proc/cpuinfo has no flags line (not x86 Linux)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def cpu_name() -> str:
    """The processor's own name, or the architecture's."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")),
        platform.machine(),
    )


def cpu_class() -> str:
    """The class that results are filed under: cpu-avx512 (with bfloat16 products), cpu-avx2, or cpu-<architecture>."""
    flags = cpu_flags()
    if "avx512f" in flags:
        return "cpu-avx512"
    return "cpu-avx2" if "avx2" in flags else f"cpu-{platform.machine()}"


def has_native_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 itself and torch uses that; else its bfloat16 products are slower than fp32."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512") and bool(BF16_FLAGS & cpu_flags())


def resolve_device(device: str) -> torch.device:
    """ "auto" is a GPU where torch sees one. Raises ValueError for what torch does not know."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16, but float32 on a CPU that cannot multiply bfloat16 natively."""
    if dtype == "auto":
        return torch.bfloat16 if device.type != "cpu" or has_native_bf16() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
