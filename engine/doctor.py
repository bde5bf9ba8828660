"""Checks of this machine: what the engine would choose on it, and whether each kernel agrees with its eager twin."""

import importlib
import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import psutil
import torch

from narrowgauge.kernels import dense_gemm, int4_gemm
from narrowgauge.kernels.dispatch import REFERENCE, TRITON, select_kernels, triton_unavailable
from narrowgauge.kernels.hardware import cpu_class, cpu_flags, cpu_name, has_native_bf16, resolve_device, resolve_dtype
from narrowgauge.kernels.reference.int4_gemm import int4_gemm as int4_twin

Status = Literal["ok", "info", "warn", "fail"]
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "scipy")
MIN_FREE_DISK = 2 << 30
MIN_FREE_MEMORY = 2 << 30
WIDTHS = (1, 15, 16, 17, 1023)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding: "info" judges nothing, "warn" costs something, "fail" stops work. `detail` says what and what to do."""

    name: str
    status: Status
    detail: str


def run_checks(home: Path) -> list[Check]:
    """All checks; `home` is where the product keeps its state. Never raises: a check that breaks is a failed one."""
    checks: list[Check] = []
    for check in (_versions, _processor, _choice, lambda: _storage(home), _memory, _compiler, _kernels):
        try:
            checks += check()
        except Exception as error:  # noqa: BLE001 - the doctor reports, it does not fall ill
            checks.append(Check(name="doctor", status="fail", detail=f"{type(error).__name__}: {error}"))
    return checks


def _versions() -> Iterator[Check]:
    version = sys.version_info
    supported = (3, 11) <= version[:2] <= (3, 12)
    yield Check(
        name="python",
        status="ok" if supported else "warn",
        detail=platform.python_version() + ("" if supported else ": 3.11 and 3.12 are supported"),
    )
    for package in PACKAGES:
        try:
            yield Check(name=package, status="ok", detail=importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            needed = package != "triton"
            yield Check(name=package, status="fail" if needed else "info", detail="not installed")


def _processor() -> Iterator[Check]:
    flags = sorted(
        f
        for f in cpu_flags()
        if f in {"avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8"}
    )
    yield Check(
        name="processor", status="info", detail=f"{cpu_name()} ({cpu_class()}; {' '.join(flags) or 'no flags known'})"
    )
    yield Check(
        name="threads",
        status="info",
        detail=f"{torch.get_num_threads()} used by torch, {psutil.cpu_count()} logical cores",
    )
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            yield Check(
                name=f"gpu {index}", status="info", detail=f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
            )
    else:
        yield Check(name="gpu", status="info", detail="none that torch sees: everything runs on the CPU")


def _choice() -> Iterator[Check]:
    device = resolve_device("auto")
    dtype = str(resolve_dtype("auto", device)).removeprefix("torch.")
    if device.type == "cpu" and not has_native_bf16():
        dtype += " (this CPU has neither AVX512-BF16 nor AMX, so bfloat16 would be slower)"
    yield Check(name="dtype", status="info", detail=f"{dtype} on {device}")
    origins = select_kernels(device).origins
    yield Check(name="kernels", status="info", detail=", ".join(f"{name} {origin}" for name, origin in origins.items()))
    blocked = dense_gemm.can_block(torch.zeros(16, 16, dtype=resolve_dtype("auto", device)))
    yield Check(
        name="dense weights",
        status="ok" if blocked else "warn",
        detail="in oneDNN's blocked order"
        if blocked
        else "row by row: this torch has no oneDNN, decode takes about twice as long",
    )


def _storage(home: Path) -> Iterator[Check]:
    probe = home / ".doctor"
    try:
        home.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
        yield Check(name="NG_HOME", status="ok", detail=f"{home} can be written")
    except OSError as error:
        yield Check(name="NG_HOME", status="fail", detail=f"{home}: {error.strerror}: set NG_HOME to a folder you own")
        return
    free = shutil.disk_usage(home).free
    yield Check(
        name="disk",
        status="ok" if free >= MIN_FREE_DISK else "warn",
        detail=f"{free / 2**30:.1f} GiB free at {home}"
        + ("" if free >= MIN_FREE_DISK else ": the demo needs about 2 GiB"),
    )


def _memory() -> Iterator[Check]:
    free = psutil.virtual_memory().available
    low = free < MIN_FREE_MEMORY
    yield Check(
        name="memory",
        status="warn" if low else "ok",
        detail=f"{free / 2**30:.1f} GiB free" + (": the demo needs about 2 GiB" if low else ""),
    )


def _compiler() -> Iterator[Check]:
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        yield Check(name="C++ compiler", status="info", detail="none on the PATH (nothing needs one today)")
        return
    answer = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=False)
    yield Check(name="C++ compiler", status="info", detail=f"{found}: {answer.stdout.partition(chr(10))[0]}")


def _kernels() -> Iterator[Check]:
    """Each kernel that can run here, against its twin."""
    yield (
        _compare("dense_gemm", _dense_error, 2e-2)
        if dense_gemm.can_block(torch.zeros(16, 16, dtype=torch.bfloat16))
        else (Check(name="kernel dense_gemm", status="info", detail="no blocked bfloat16 product on this CPU"))
    )
    yield _compare("int4_gemm", _int4_error, 2e-2)
    device = resolve_device("auto")
    reason = triton_unavailable(device)
    for name in TRITON:
        if reason:
            yield Check(name=f"kernel {name}", status="info", detail=f"eager twin: {reason}")
        else:
            yield _compare(name, partial(_triton_error, name, device), 1e-5)


def _compare(name: str, error: Callable[[], float], limit: float) -> Check:
    found = error()
    good = found <= limit
    detail = f"differs from its twin by {found:.1e} of the largest value" + ("" if good else f", more than {limit:.0e}")
    return Check(name=f"kernel {name}", status="ok" if good else "fail", detail=detail)


def _relative(answer: torch.Tensor, twin: torch.Tensor) -> float:
    return float((answer.float() - twin.float()).abs().max() / twin.float().abs().max().clamp_min(1e-6))


def _dense_error() -> float:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 96, generator=generator).bfloat16()
    x = torch.randn(5, 96, generator=generator).bfloat16()
    answer = dense_gemm.blocked_linear(x, dense_gemm.block_weight(weight, rows=8), None)
    return _relative(answer, torch.nn.functional.linear(x.float(), weight.float()))


def _int4_error() -> float:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (48, 128), generator=generator, dtype=torch.int8)
    scales = (torch.rand(48, 2, generator=generator) / 10).bfloat16()
    x = torch.randn(5, 128, generator=generator).bfloat16()
    return _relative(int4_gemm.int4_gemm(x, int4_gemm.pack_int4(codes, scales, None)), int4_twin(x, codes, scales))


def _triton_error(name: str, device: torch.device) -> float:
    kernel, twin = (
        getattr(importlib.import_module(f"narrowgauge.kernels.{prefix}{REFERENCE[name]}"), name)
        for prefix in ("", "reference.")
    )
    worst = 0.0
    for width in WIDTHS:
        generator = torch.Generator().manual_seed(width)
        x, residual = torch.randn(2, 3, 2 * width, generator=generator).to(device)
        weight = torch.rand(2 * width, generator=generator).to(device)
        tensors = {"rms_norm": (x, weight), "add_rms_norm": (x, residual, weight), "silu_mul": (x,)}[name]
        options = {} if name == "silu_mul" else {"eps": 1e-5}
        copies = [tensor.clone() for tensor in tensors]  # some are changed in place
        worst = max(worst, _relative(kernel(*tensors, **options), twin(*copies, **options)))
    return worst
