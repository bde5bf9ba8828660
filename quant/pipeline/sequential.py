"""The run: from a recipe to a checkpoint, block after block, each calibrated on what the blocks before it really put out.

Finished blocks lie in a work folder beside the output (see resume.py), so a run that was killed goes on where it was; the
checkpoint that comes of it is the same, bit for bit. The output appears whole, by one rename.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from narrowgauge import __version__
from narrowgauge.kernels.hardware import has_native_bf16, resolve_device
from narrowgauge.quant.allocation.allocate import Allocation, allocate, measure_total_kl
from narrowgauge.quant.calibration import CalibrationSet, build_calibration
from narrowgauge.quant.estimate import Estimate, disk_bytes, estimate
from narrowgauge.quant.formats.base import get_format
from narrowgauge.quant.formats.checkpoint import CONFIG, CheckpointReader
from narrowgauge.quant.formats.manifest import Base, Manifest
from narrowgauge.quant.formats.read import build, plain
from narrowgauge.quant.model.blocks import BlockCall, Skeleton
from narrowgauge.quant.pipeline.activations import HiddenStates, StatesWriter, half_of_memory
from narrowgauge.quant.pipeline.export import (
    REPORT,
    Expected,
    assemble,
    check_space,
    commit,
    disk_errors,
    existing,
    put_in_place,
    write_json,
)
from narrowgauge.quant.pipeline.layers import Job
from narrowgauge.quant.pipeline.quantizer import BlockOutcome, block_with_inputs, block_without_inputs
from narrowgauge.quant.pipeline.results import (
    LayerResult,
    Meter,
    Progress,
    QuantizeError,
    QuantizeResult,
    quantization_report,
)
from narrowgauge.quant.pipeline.resume import Fingerprint, Workspace, work_folder, workspace
from narrowgauge.quant.pipeline.shards import Piece, pieces
from narrowgauge.quant.plan import Plan, make_plan
from narrowgauge.quant.recipe import Recipe
from narrowgauge.quant.sources import LocalModel

__all__ = ["LayerResult", "Progress", "QuantizeError", "QuantizeResult", "RunOptions", "dry_run", "plan", "quantize"]

_BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens of one forward pass: large enough that the matrix products dominate."""
_HELD_OUT = 8
"""One sample in so many is held out from the first look of methods that judge themselves."""
_CHECKED = 1 << 24
"""Elements that are checked for NaN at a time."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where and how to compute; of these only device and dtype touch the result.

    device: "auto", "cpu", "cuda", "cuda:1". dtype of the forward pass: None is bfloat16 for a bfloat16 model where the
    machine multiplies it natively, else float32 (sums and rounding are float32 at least in any case).
    activation_bytes: how much of the hidden states and of what a block keeps between its passes stays in memory (on a GPU
    besides as much of its memory, half of what is free at most); hidden states beyond it are read from the work folder.
    resume False discards the finished blocks of an interrupted run.
    """

    device: str = "auto"
    dtype: torch.dtype | None = None
    activation_bytes: int = field(default_factory=half_of_memory)
    resume: bool = True


def plan(recipe: Recipe, base: LocalModel) -> Plan:
    """What `quantize` would do. Raises RecipeError, FormatError or UnsupportedModel, as `quantize` would at its start."""
    return make_plan(recipe, Skeleton(CheckpointReader(base.path)))


def dry_run(
    recipe: Recipe, base: LocalModel, output: Path, *, options: RunOptions = RunOptions()
) -> tuple[Plan, Estimate]:
    """What `quantize` would do and what it would take. Raises what `quantize` would raise before it computes."""
    reader = CheckpointReader(base.path)
    device, dtype = _compute(options, reader)
    skeleton = Skeleton(reader, device=device, dtype=dtype, all_experts=recipe.calibration.experts == "all")
    planned = make_plan(recipe, skeleton)
    _calibration(recipe, planned, base)
    return planned, estimate(
        recipe,
        planned,
        skeleton,
        calibrates=_calibrates(recipe, planned),
        activation_bytes=options.activation_bytes,
        output=Path(output),
    )


def quantize(
    recipe: Recipe,
    base: LocalModel,
    output: Path,
    *,
    options: RunOptions = RunOptions(),
    progress: Callable[[Progress], None] | None = None,
) -> QuantizeResult:
    """Writes the quantized checkpoint to `output`, finds it finished there, or goes on with an interrupted run's work.

    Everything that can be refused is refused before calibration. Raises RecipeError, TextError, FormatError,
    UnsupportedModel, ExportError, ResumeError and QuantizeError; after any of them nothing lies at `output`, and finished
    blocks lie in the work folder beside it.
    """
    started = time.monotonic()
    output = Path(output).absolute()
    reader = CheckpointReader(base.path)
    manifest = existing(output, recipe_digest=recipe.digest, base_digest=base.digest)
    if manifest and not work_folder(output).exists():
        return _reused(output, manifest, reader.size_bytes)
    device, dtype = _compute(options, reader)
    skeleton = Skeleton(reader, device=device, dtype=dtype, all_experts=recipe.calibration.experts == "all")
    planned = make_plan(recipe, skeleton)
    with workspace(output) as space, disk_errors(output, space.kept_work):
        # Another process may have finished just now, or have been killed before it removed its work folder.
        if manifest := existing(output, recipe_digest=recipe.digest, base_digest=base.digest):
            space.remove()
            return _reused(output, manifest, reader.size_bytes)
        run = _Run(recipe, base, skeleton, planned=planned, space=space, options=options, report=progress)
        manifest = run.to(output)
    return QuantizeResult(
        path=output,
        digest=manifest.digest,
        layers=run.layers(),
        size_bytes=CheckpointReader(output).size_bytes,
        base_size_bytes=reader.size_bytes,
        seconds=time.monotonic() - started,
        resumed=run.resumed,
    )


class _Run:
    """One run of one recipe in its work folder."""

    def __init__(
        self,
        recipe: Recipe,
        base: LocalModel,
        skeleton: Skeleton,
        *,
        planned: Plan,
        space: Workspace,
        options: RunOptions,
        report: Callable[[Progress], None] | None,
    ) -> None:
        self._recipe, self._base, self._skeleton, self._planned = recipe, base, skeleton, planned
        self._space, self._options = space, options
        self._allocation: Allocation | None = None
        self._device_bytes = 0
        if skeleton.device.type == "cuda":  # half of a GPU's memory is for a block, its statistics and one batch
            free, _ = torch.cuda.mem_get_info(skeleton.device)
            self._device_bytes = min(free // 2, options.activation_bytes)
        sizes = {layer.name: layer.out_features * layer.in_features for layer in planned.layers}
        self._meter = Meter(sizes, len(skeleton.blocks), report or (lambda _: None))
        self.resumed = 0

    def to(self, output: Path) -> Manifest:
        """Does what is left to do and puts the checkpoint in place."""
        self._meter.say("calibration text")
        calibration = _calibration(self._recipe, self._planned, self._base)
        self._space.begin(self._fingerprint(calibration), fresh=not self._options.resume)
        if calibration is not None and not self._planned.allotted:
            self._allot(calibration)
        check_space(self._space.folder, self._bytes_needed(calibration))
        inside = f"{self._skeleton.prefix}."
        self._check_finite(name for name in self._skeleton.reader.names() if not name.startswith(inside))
        self._blocks(calibration)
        manifest = self._export(output, calibration)
        self._space.remove()
        return manifest

    def _allot(self, calibration: CalibrationSet) -> None:
        """Finds what each Linear gets under the recipe's budget, or finds it found by the run that was interrupted."""
        found = self._space.kept(
            "allocation", lambda: allocate(self._recipe, self._skeleton, calibration, progress=self._meter.say)
        )
        self._allocation = build(Allocation, found)
        self._planned = make_plan(self._recipe, self._skeleton, self._allocation.schemes)

    def layers(self) -> tuple[LayerResult, ...]:
        """What was done to each Linear, in the model's order."""
        return tuple(layer for record in self._space.records for layer in record.result.layers)

    def _fingerprint(self, calibration: CalibrationSet | None) -> Fingerprint:
        device = self._skeleton.device
        compute: dict[str, Any] = {"dtype": str(self._skeleton.dtype).removeprefix("torch.")}
        if device.type == "cpu":
            compute |= {"device": f"cpu {torch.backends.cpu.get_cpu_capability()}", "threads": torch.get_num_threads()}
        else:
            compute |= {"device": torch.cuda.get_device_name(device)}
        return {
            "recipe": plain(self._recipe),
            "base": self._base.digest,
            "calibration": calibration.digest if calibration else None,
            "compute": compute,
            "versions": {
                "narrowgauge": __version__,
                **{name: metadata.version(name) for name in ("torch", "transformers")},
            },
        }

    def _blocks(self, calibration: CalibrationSet | None) -> None:
        """Quantizes the blocks that are not finished yet."""
        first, count = len(self._space.records), len(self._skeleton.blocks)
        self.resumed = first
        for record in self._space.records:
            self._meter.found(record.result.layers)
        states: HiddenStates | None = None
        calls: Sequence[BlockCall] = ()
        if calibration is not None and first < count:
            self._meter.say("embedding" if first == 0 else "resuming")
            calls = self._skeleton.calls(calibration.ids.shape[1])
            states = self._states(first, calibration)
        job = self._job(calibration)
        self._meter.begin()
        for index in range(first, count):
            self._check_finite(self._kept_in(index))
            outcome = self._block(job, index, states=states, calls=calls)
            states = outcome.states
            self._space.save_block(outcome.tensors, outcome.result, states.shape if states else None)
            self._meter.block(job.stage(index))
        self._space.settle()

    def _block(self, job: Job, index: int, *, states: HiddenStates | None, calls: Sequence[BlockCall]) -> BlockOutcome:
        if states is None:
            return block_without_inputs(job, index)
        if index + 1 == len(self._skeleton.blocks):
            return block_with_inputs(job, index, states, call=calls[index], onward=None)
        with self._writer(index + 1) as onward:
            return block_with_inputs(job, index, states, call=calls[index], onward=onward)

    def _job(self, calibration: CalibrationSet | None) -> Job:
        samples, tokens = (0, 0) if calibration is None else (len(calibration.ids), calibration.ids.numel())
        on_cpu = self._skeleton.device.type == "cpu"
        cache = self._options.activation_bytes // 2 if on_cpu else self._device_bytes // 2
        return Job(
            recipe=self._recipe,
            planned=self._planned,
            skeleton=self._skeleton,
            meter=self._meter,
            tokens=tokens,
            heldout_from=samples - self._held_out(samples),
            cache_bytes=cache,
        )

    def _held_out(self, samples: int) -> int:
        wanted = any("heldout" in method.needs for method in self._recipe.methods)
        return max(1, samples // _HELD_OUT) if wanted and samples > 1 else 0

    def _states(self, index: int, calibration: CalibrationSet) -> HiddenStates:
        """What reaches block `index`: from the embedding, or from the files of the run that stopped there."""
        device, dtype = self._skeleton.device, self._skeleton.dtype
        if index:
            shape = self._space.records[-1].states
            assert shape is not None
            return HiddenStates(self._space.states(index), shape, device=device, dtype=dtype)
        ids = calibration.ids
        size = max(1, _BATCH_TOKENS[device.type] // ids.shape[1])
        seen = len(ids) - self._held_out(len(ids))
        with self._writer(0) as writer:
            for part in (ids[:seen], ids[seen:]):
                for batch in self._skeleton.enter(part, batch=size) if len(part) else ():
                    if not bool(torch.isfinite(batch).all()):
                        raise QuantizeError("the embedding puts out NaN or infinity; check the model's files")
                    writer.append(batch)
            return writer.close(device=device, dtype=dtype)

    def _writer(self, index: int) -> StatesWriter:
        # Of the memory for activations half goes to the runner of a block, a quarter each to what enters and leaves it.
        return StatesWriter(
            self._space.states(index),
            dtype=self._states_dtype(),
            limit_bytes=self._options.activation_bytes // 4,
            device_bytes=self._device_bytes // 4,
        )

    def _states_dtype(self) -> torch.dtype:
        stored = _stored_dtype(self._skeleton.reader)
        return torch.float32 if stored == torch.float16 else stored  # hidden states outgrow float16 in some models

    def _kept_in(self, index: int) -> Iterator[str]:
        """The stored tensors of block `index` that no rounder looks at."""
        rounded = {self._skeleton.source(name) for name in self._planned.schemes}
        for name in self._skeleton.reader.names():
            if name.startswith(f"{self._skeleton.prefix}.{index}.") and name not in rounded:
                yield name

    def _check_finite(self, names: Iterable[str]) -> None:
        for name in names:
            tensor = self._skeleton.reader.tensor(name)
            if tensor.is_floating_point() and not all(
                bool(torch.isfinite(part).all()) for part in torch.split(tensor.reshape(-1), _CHECKED)
            ):
                raise QuantizeError(f"{name}: holds NaN or infinity; the base model is damaged")

    def _bytes_needed(self, calibration: CalibrationSet | None) -> int:
        """What the disk must still take: parts, what is put together from them, and two generations of hidden states."""
        states = 0
        if calibration is not None:
            width = self._skeleton.model.config.get_text_config().hidden_size
            states = calibration.ids.numel() * width * self._states_dtype().itemsize
        return disk_bytes(self._planned, states) - sum(path.stat().st_size for path in self._space.folder.iterdir())

    def _export(self, output: Path, calibration: CalibrationSet | None) -> Manifest:
        """The checkpoint, made of the finished blocks and of what the base holds besides."""
        self._meter.say("checkpoint")
        stage = self._space.stage()
        parts = self._space.parts()
        written = {piece.name for part in parts for piece in pieces(part)}
        others = self._untouched(written)
        assemble(stage, parts, others)
        checkpoint_format = get_format(self._recipe.format)
        layout = checkpoint_format.config(self._planned.schemes, self._planned.kept, self._planned.kv_cache)
        reader, base = self._skeleton.reader, self._base
        config = {**reader.config, "quantization_config": layout}
        report = quantization_report(self._recipe.methods, [record.result for record in self._space.records])
        if calibration is not None:
            report["calibration"] = plain(self._recipe.calibration)
        if calibration is not None and self._allocation is not None:
            write_json(stage / CONFIG, config)
            report["allocation"] = self._told(stage, self._allocation, calibration)
        manifest = commit(
            stage,
            base_folder=base.path,
            config=config,
            report=report,
            base=Base(source=base.source, revision=base.revision, digest=base.digest),
            recipe_digest=self._recipe.digest,
            calibration_digest=calibration.digest if calibration else None,
            extra_files=checkpoint_format.extra_files(layout),
            expected=Expected(
                schemes=self._planned.schemes,
                kv_cache=self._planned.kv_cache,
                names=frozenset(written | {piece.name for piece in others}),
            ),
        )
        put_in_place(stage, output)
        return manifest

    def _told(self, stage: Path, allocation: Allocation, calibration: CalibrationSet) -> dict[str, Any]:
        """The allocation beside what became of it: how far the sum of the units' KL is from the whole model's."""
        self._meter.say("divergence of the whole")
        measured = measure_total_kl(allocation, self._skeleton, CheckpointReader(stage), calibration=calibration)
        return {**plain(allocation), "measured_kl": measured}

    def _untouched(self, written: set[str]) -> list[Piece]:
        """The base's tensors that the checkpoint takes over as they are."""
        skeleton = self._skeleton
        changed = [name for name in skeleton.linears() if f"{name}.weight" in written or name in self._planned.schemes]
        replaced = written | {skeleton.source(name) for name in changed}
        kept = [name for name in skeleton.reader.names() if name not in replaced]
        found = {
            file: {piece.name: piece for piece in pieces(file)} for file in {skeleton.reader.file(n) for n in kept}
        }
        return [found[skeleton.reader.file(name)][name] for name in kept]


def _calibration(recipe: Recipe, planned: Plan, base: LocalModel) -> CalibrationSet | None:
    """The calibration tokens; None where no text has to be run through the model."""
    return build_calibration(recipe.calibration, _tokenizer(base.path)) if _calibrates(recipe, planned) else None


def _calibrates(recipe: Recipe, planned: Plan) -> bool:
    """Whether any text has to be run through the model."""
    static = any(scheme.activations and not scheme.activations.dynamic for scheme in planned.schemes.values())
    learns = bool(planned.layers) and any(method.needs for method in recipe.methods)
    return learns or static or planned.kv_cache is not None or not planned.allotted


def _compute(options: RunOptions, reader: CheckpointReader) -> tuple[torch.device, torch.dtype]:
    try:
        device = resolve_device(options.device)
    except ValueError as error:
        raise QuantizeError(f"device {options.device!r}: {error}") from None
    if device.type not in _BATCH_TOKENS or (device.type == "cuda" and not torch.cuda.is_available()):
        raise QuantizeError(f"device {options.device!r}: torch sees no such device here; use cpu or auto")
    if options.dtype is not None:
        return device, options.dtype
    quick = device.type == "cuda" or has_native_bf16()
    return device, torch.bfloat16 if quick and _stored_dtype(reader) == torch.bfloat16 else torch.float32


def _stored_dtype(reader: CheckpointReader) -> torch.dtype:
    """The dtype of the first matrix in the files: the model's own."""
    name = next(name for name in reader.names() if len(reader.shape(name)) >= 2)
    return reader.matrix_dtype(name)


def _reused(output: Path, manifest: Manifest, base_size_bytes: int) -> QuantizeResult:
    report = json.loads((output / REPORT).read_bytes())
    return QuantizeResult(
        path=output,
        digest=manifest.digest,
        layers=tuple(build(LayerResult, entry) for entry in report["layers"]),
        size_bytes=CheckpointReader(output).size_bytes,
        base_size_bytes=base_size_bytes,
        seconds=0.0,
        reused=True,
    )


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise QuantizeError(f"{folder}: has no usable tokenizer: {str(error).splitlines()[0]}") from None
