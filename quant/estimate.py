"""What a run will take, told before it runs: bytes written, disk, peak memory and time.

Bytes follow from the plan, to within the files' headers. Disk and memory follow from how the pipeline works (export.py,
activations.py, quantizer.py). Time is work over rate: the work is counted in operations, the rates are measured here and
now on shapes of the model's own layers, in a few seconds; it is good to about a factor of two.
Shapes: T tokens, O out_features, I in_features.
"""

import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from narrowgauge.quant.allocation.sensitivity import TOKENS, hessian_tokens
from narrowgauge.quant.methods.base import Clipper, InputStatistics
from narrowgauge.quant.model.blocks import Skeleton
from narrowgauge.quant.model.fused import units
from narrowgauge.quant.pipeline.export import WHOLE_BYTES
from narrowgauge.quant.plan import Plan, PlannedLayer
from narrowgauge.quant.recipe import CalibrationSpec, Recipe

_PASSES = 2.2
"""Times that a calibrated run calls each Linear for each token: once for its inputs, once for what the block puts out, and
parts of a block again for the sets behind it."""
_DISK_BYTES_A_SECOND = 0.5e9
_TRIAL_ELEMENTS = 1 << 29
"""Multiplications (O · I · I) of the largest layer that is tried as it is; a larger one is tried scaled down."""
_TRIAL_TOKENS = 1024
_BATCH_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """`size_bytes`: the weight files. `disk_bytes`: what the run needs beside the output in all, of `disk_free_bytes`.
    `memory_bytes`: peak of the process, of `memory_all_bytes` in the machine; weight files that it has mapped are left out,
    for the system takes their pages back where it needs them. `seconds`: to about a factor of two."""

    size_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    memory_bytes: int
    memory_all_bytes: int
    device_bytes: int
    seconds: float

    @property
    def shortages(self) -> tuple[str, ...]:
        """What this machine does not have enough of; empty where all is well."""
        found = []
        if self.disk_bytes > self.disk_free_bytes:
            found.append(
                f"disk: {self.disk_bytes:,} bytes are needed beside the output, {self.disk_free_bytes:,} are free"
            )
        if self.memory_bytes > self.memory_all_bytes:
            found.append(
                f"memory: about {self.memory_bytes:,} bytes at the peak, the machine has {self.memory_all_bytes:,}; "
                "lower --activation-memory or calibration.samples"
            )
        return tuple(found)


def estimate(
    recipe: Recipe, planned: Plan, skeleton: Skeleton, *, calibrates: bool, activation_bytes: int, output: Path
) -> Estimate:
    """The estimate for a run of `planned` with the skeleton's device and dtype. Takes a few seconds of computing."""
    spec = recipe.calibration if calibrates else None
    host, device = _memory(planned, skeleton, spec, activation_bytes=activation_bytes)
    existing = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    return Estimate(
        size_bytes=planned.size_bytes,
        disk_bytes=disk_bytes(planned, _states_bytes(skeleton, spec)),
        disk_free_bytes=shutil.disk_usage(existing).free,
        memory_bytes=host,
        memory_all_bytes=_machine_bytes(),
        device_bytes=device,
        seconds=_seconds(recipe, planned, skeleton, spec=spec),
    )


def disk_bytes(planned: Plan, states_bytes: int) -> int:
    """What the disk must take: finished blocks, the checkpoint that is put together of them, and the hidden states that
    enter and leave the block at work. Large blocks are given up as they are taken over."""
    size = planned.size_bytes
    whole = size if size // max(planned.blocks, 1) > WHOLE_BYTES else 2 * size
    return whole + 2 * states_bytes


def _states_bytes(skeleton: Skeleton, spec: CalibrationSpec | None) -> int:
    """Hidden states of all calibration tokens, in the model's stored dtype (float32 for float16)."""
    if spec is None:
        return 0
    reader = skeleton.reader
    first = next(name for name in reader.names() if len(reader.shape(name)) >= 2)
    itemsize = 2 if reader.stored(first).dtype == "BF16" else 4
    return spec.samples * spec.length * _hidden_size(skeleton) * itemsize


def _hidden_size(skeleton: Skeleton) -> int:
    return int(skeleton.model.config.get_text_config().hidden_size)


def _head_weights(skeleton: Skeleton) -> int:
    return int(skeleton.model.config.get_text_config().vocab_size) * _hidden_size(skeleton)


def _memory(
    planned: Plan, skeleton: Skeleton, spec: CalibrationSpec | None, *, activation_bytes: int
) -> tuple[int, int]:
    """(peak of the process, peak on the accelerator) in bytes: the embedding alone, or a block with what rounds it."""
    itemsize = skeleton.dtype.itemsize
    block = max((_block_weights(skeleton, index) for index in range(len(skeleton.blocks))), default=0)
    codes = planned.size_bytes // max(planned.blocks, 1)
    rounding = max((_rounding_bytes(layers) for layers in _sets(planned.layers)), default=0)
    if spec is None:
        work = 2 * rounding + 2 * codes
        return _now_bytes() + work, 0
    tokens = min(_BATCH_TOKENS, spec.samples * spec.length)
    inner = max((layer.out_features for layer in planned.layers), default=_hidden_size(skeleton))
    batch = tokens * (6 * _hidden_size(skeleton) + 4 * inner) * max(itemsize, 4)
    kept = min(activation_bytes // 2, 3 * _states_bytes(skeleton, spec))
    states = min(activation_bytes // 2, 2 * _states_bytes(skeleton, spec))
    compute = max(_head_weights(skeleton) * itemsize, block * itemsize + rounding + batch + kept)
    on_device = compute if skeleton.device.type == "cuda" else 0
    return _now_bytes() + states + 2 * codes + (0 if on_device else compute), on_device


def _block_weights(skeleton: Skeleton, index: int) -> int:
    return sum(parameter.numel() for parameter in skeleton.blocks[index].parameters())


def _rounding_bytes(layers: Sequence[PlannedLayer]) -> int:
    """One set at work: its weights as floats and as codes, and the Hessians with their factors."""
    columns = layers[0].in_features
    weights = sum(layer.out_features * layer.in_features for layer in layers)
    return 4 * 4 * weights + 4 * 4 * columns**2


def _sets(layers: Sequence[PlannedLayer]) -> Iterator[list[PlannedLayer]]:
    """The layers that are rounded together: of one unit and one parent module."""
    by_name = {layer.name: layer for layer in layers}
    for members in units(by_name).values():
        parents: dict[str, list[PlannedLayer]] = {}
        for name in members:
            parents.setdefault(name.rpartition(".")[0], []).append(by_name[name])
        yield from parents.values()


def _seconds(recipe: Recipe, planned: Plan, skeleton: Skeleton, *, spec: CalibrationSpec | None) -> float:
    """Reading and writing, the passes of the calibration tokens, their Hessians, and the methods' work on each set."""
    total = (planned.base_size_bytes + 2 * planned.size_bytes) / _DISK_BYTES_A_SECOND
    weights = sum(_block_weights(skeleton, index) for index in range(len(skeleton.blocks)))
    shapes: dict[tuple[int, int], list[list[PlannedLayer]]] = {}
    for members in _sets(planned.layers):
        shape = (sum(layer.out_features for layer in members), members[0].in_features)
        shapes.setdefault(shape, []).append(members)
    for (rows, columns), alike in shapes.items():
        total += len(alike) * _rounding_seconds(recipe, alike[0], rows, columns=columns, device=skeleton.device)
    if spec is None:
        return total
    tokens = spec.samples * spec.length
    rate = _rate(skeleton.device, skeleton.dtype)
    total += _PASSES * 2 * tokens * weights / rate
    exact = rate if skeleton.dtype == torch.float32 else _rate(skeleton.device, torch.float32)
    total += sum(2 * tokens * columns**2 * len(alike) for (_, columns), alike in shapes.items()) / exact
    if not planned.allotted:
        total += _allocation_operations(planned, skeleton, weights, tokens=tokens) / exact
    return total


def _allocation_operations(planned: Plan, skeleton: Skeleton, weights: int, *, tokens: int) -> float:
    """Each unit's states run through half of the blocks on average and through the head; then the Hessians' tokens."""
    count = len(units(planned.schemes))
    return (
        2.0 * count * TOKENS * (weights / 2 + _head_weights(skeleton))
        + 2.0 * min(tokens, hessian_tokens(skeleton, list(planned.schemes))) * 2 * weights
    )


def _rounding_seconds(
    recipe: Recipe, members: Sequence[PlannedLayer], rows: int, *, columns: int, device: torch.device
) -> float:
    """What the methods take for one set of `rows` outputs in all, tried on random numbers of its shape."""
    shrink = max(1.0, (rows * columns * columns / _TRIAL_ELEMENTS) ** (1 / 3))
    scheme = members[0].scheme.weights
    step = scheme.group or (scheme.block[1] if scheme.block else 32)
    fewer = columns if shrink == 1.0 else max(step, round(columns / shrink / step) * step)
    less = max(32, round(rows / shrink))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(less, fewer, generator=generator).to(device, torch.bfloat16)
    x = torch.randn(2 * fewer, fewer, generator=generator).to(device)
    hessian = x.t() @ x
    absmax, absmean = x.abs().amax(0), x.abs().mean(0)
    inputs = InputStatistics(hessian=hessian, tokens=len(x), absmax=absmax, absmean=absmean, heldout=hessian)

    def work() -> None:
        limits = None
        for method in recipe.smoothers:
            method.smooth([weight.float()], scheme, inputs)
            if isinstance(method, Clipper):
                limits = method.limits([weight.float()], scheme, inputs)
        recipe.rounder.round([weight], scheme, inputs, limits=limits)

    scale = float(rows * columns * columns / (less * fewer * fewer))
    return _timed(work, device) * scale


def _rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a matrix product in `dtype`."""
    size = 4096 if device.type == "cuda" else 768
    x = torch.randn(_TRIAL_TOKENS, size, device=device).to(dtype)
    w = torch.randn(size, size, device=device).to(dtype)
    return 2 * _TRIAL_TOKENS * size * size / _timed(lambda: x @ w.t(), device)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the second of two calls: the first warms up."""
    seconds = 0.0
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.monotonic()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.monotonic() - started
    return max(seconds, 1e-9)


def _now_bytes() -> int:
    """What the process has taken up to now, libraries and all."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _machine_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)
