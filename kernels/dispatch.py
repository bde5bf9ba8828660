"""Which kernels a model calls: chosen once, at construction, from where it runs and what the caller asks for."""

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

logger = logging.getLogger(__name__)

Choice = Literal["auto", "reference", "triton"]

# Operation -> the module (of the same name) that holds it; every one has an eager twin under reference/.
TRITON: Mapping[str, str] = {"rms_norm": "rmsnorm", "add_rms_norm": "rmsnorm", "silu_mul": "silu_mul"}
REFERENCE: Mapping[str, str] = {**TRITON, "apply_rope": "rope", "kv_write": "kv_write"}


class KernelError(ValueError):
    """Kernels were asked for that cannot run here; the message says why."""

    exit_code = 2


class AddRmsNorm(Protocol):
    """(x, residual, weight, eps=...) -> the norm of the sum, which is left in `residual`."""

    def __call__(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, *, eps: float
    ) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The operations of a transformer block; signatures and shapes stand in kernels/reference/<file>.py."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: AddRmsNorm
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    apply_rope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    kv_write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    origins: Mapping[str, Literal["reference", "triton"]]


def select_kernels(device: torch.device, choice: Choice = "auto") -> Kernels:
    """Triton's where it is installed and the device is a GPU ("auto"), or as forced; the twin where no kernel exists.

    Raises KernelError for "triton" where Triton is missing, or on a CPU without TRITON_INTERPRET=1.
    """
    use_triton = choice == "triton" or (choice == "auto" and device.type == "cuda")
    reason = triton_unavailable(device) if use_triton else None
    if reason and choice == "triton":
        raise KernelError(f"--kernels triton: {reason}; use --kernels auto")
    if reason:
        logger.warning("eager kernels instead of Triton's, which costs speed: %s", reason)
        use_triton = False
    found, origins = {}, {}
    for name, file in REFERENCE.items():
        by_triton = use_triton and name in TRITON
        origins[name] = "triton" if by_triton else "reference"
        module = f"narrowgauge.kernels.{'' if by_triton else 'reference.'}{file}"
        found[name] = getattr(importlib.import_module(module), name)
    return Kernels(**found, origins=origins)  # type: ignore[arg-type]


def triton_unavailable(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on this device, or None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda":
        import triton

        if not triton.knobs.runtime.interpret:
            return f"Triton runs on a {device.type} only under TRITON_INTERPRET=1"
    return None
