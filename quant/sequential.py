"""Quantizes a model block by block: each block is calibrated on what the quantized blocks before it really put out.

Inside a block the Linears go in the order they run, those that share an input together (q, k, v; o; gate, up; down), and
inputs are captured again after each set, so that a set also sees the rounding of the sets before it ("true sequential").
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowgauge.quant.blocks import BlockCall, Skeleton
from narrowgauge.quant.calibration import CalibrationSet, build_calibration
from narrowgauge.quant.export import REPORT, CheckpointWriter, commit, existing, staged
from narrowgauge.quant.formats.base import CheckpointFormat, FormatError, dequantize_weight, get_format
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.manifest import Base, Manifest
from narrowgauge.quant.formats.read import build, plain
from narrowgauge.quant.formats.scheme import Scheme
from narrowgauge.quant.methods.base import InputStatistics, RoundedWeight
from narrowgauge.quant.observers import WeightNotFinite
from narrowgauge.quant.plan import Plan, PlannedLayer, make_plan
from narrowgauge.quant.recipe import Recipe
from narrowgauge.quant.runner import BlockRunner
from narrowgauge.quant.sources import LocalModel

_BATCH_TOKENS = 4096
"""Tokens of one forward pass: large enough that the matrix products dominate."""
_CACHE_BYTES = 1 << 30
"""Activations inside a block that may be kept between passes over it."""


class QuantizeError(ValueError):
    """A model that cannot be quantized; the message names the layer and the reason."""


@dataclass(frozen=True, kw_only=True)
class LayerResult:
    """What rounding did to one Linear.

    weight_error = ‖W - Q‖ / ‖W‖. output_error = ‖X(W - Q)ᵀ‖ / ‖XWᵀ‖ on the calibration inputs, null for a method without
    calibration. `fallback` says why the method was not used. `seconds` is the layer's share of its set; 0 where the
    checkpoint was found finished.
    """

    name: str
    scheme: str
    weight_error: float
    output_error: float | None
    fallback: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class QuantizeResult:
    """A finished checkpoint; sizes are bytes of the weight files. `reused`: it lay there already, made from the same inputs."""

    path: Path
    digest: str
    layers: tuple[LayerResult, ...]
    size_bytes: int
    base_size_bytes: int
    seconds: float
    reused: bool = False


@dataclass(frozen=True)
class Progress:
    """`done` of `total` Linears; `stage` says what is at work; eta_s is None before the first estimate."""

    done: int
    total: int
    stage: str
    eta_s: float | None


def plan(recipe: Recipe, base: LocalModel) -> Plan:
    """What `quantize` would do. Raises RecipeError, FormatError or UnsupportedModel, as `quantize` would at its start."""
    return make_plan(recipe, Skeleton(CheckpointReader(base.path)))


def quantize(
    recipe: Recipe, base: LocalModel, output: Path, *, progress: Callable[[Progress], None] | None = None
) -> QuantizeResult:
    """Writes the quantized checkpoint to `output`, or finds it finished there.

    Everything that can be refused is refused before calibration. Raises RecipeError, TextError, FormatError,
    UnsupportedModel, ExportError and QuantizeError; after any of them nothing lies at `output`.
    """
    started = time.monotonic()
    output = Path(output).absolute()
    reader = CheckpointReader(base.path)
    if manifest := existing(output, recipe_digest=recipe.digest, base_digest=base.digest):
        return _reused(output, manifest, reader.size_bytes)
    skeleton = Skeleton(reader)
    planned = make_plan(recipe, skeleton)
    meter = _Meter(planned, progress or (lambda _: None), started)
    calibration = None
    if recipe.rounder.needs:
        meter.say("calibration text")
        calibration = build_calibration(recipe.calibration, _tokenizer(base.path))
    with staged(output) as folder:
        writer = CheckpointWriter(folder)
        run = _Run(recipe, planned, skeleton, writer, meter)
        results = run.all_blocks(calibration)
        writer.finish()
        layout = get_format(recipe.format).config(planned.schemes, planned.kept, None)
        report = {"methods": plain(recipe.methods), "layers": [_stable(result) for result in results]}
        manifest = commit(
            folder,
            base_folder=base.path,
            config={**reader.config, "quantization_config": layout},
            report=report,
            base=Base(source=base.source, revision=base.revision, digest=base.digest),
            recipe_digest=recipe.digest,
            calibration_digest=calibration.digest if calibration else None,
        )
    return QuantizeResult(
        path=output,
        digest=manifest.digest,
        layers=tuple(results),
        size_bytes=CheckpointReader(output).size_bytes,
        base_size_bytes=reader.size_bytes,
        seconds=time.monotonic() - started,
    )


class _Meter:
    """Turns finished layers into Progress; the estimate goes by weights, not by layers."""

    def __init__(self, planned: Plan, report: Callable[[Progress], None], started: float) -> None:
        self._report = report
        self._started = started
        self._total = len(planned.layers)
        self._weights = {layer.name: layer.out_features * layer.in_features for layer in planned.layers}
        self._done = 0
        self._done_weights = 0

    def say(self, stage: str) -> None:
        """Reports what is at work."""
        eta = None
        if self._done:
            left = sum(self._weights.values()) - self._done_weights
            eta = (time.monotonic() - self._started) * left / self._done_weights
        self._report(Progress(self._done, self._total, stage, eta))

    def finished(self, name: str, stage: str) -> None:
        """Counts one layer."""
        self._done += 1
        self._done_weights += self._weights[name]
        self.say(stage)


@dataclass(frozen=True)
class _Run:
    """One pass over the model: blocks in order, every stored tensor to the writer."""

    recipe: Recipe
    planned: Plan
    skeleton: Skeleton
    writer: CheckpointWriter
    meter: _Meter

    def all_blocks(self, calibration: CalibrationSet | None) -> list[LayerResult]:
        """Quantizes every planned layer; copies all other tensors as they are."""
        reader, results = self.skeleton.reader, []
        copied = {name for name in reader.names() if name.rpartition(".")[0] not in self.planned.schemes}
        copied |= {name for name in reader.names() if name.endswith(".bias")}
        hidden: list[torch.Tensor] = []
        calls: list[BlockCall] = []
        if calibration is not None:
            self.meter.say("embedding")
            length = calibration.ids.shape[1]
            calls = self.skeleton.calls(length)
            hidden = list(self.skeleton.enter(calibration.ids, batch=max(1, _BATCH_TOKENS // length)))
        for index in range(len(self.skeleton.blocks)):
            prefix = f"{self.skeleton.prefix}.{index}."
            if calibration is None:
                results += self._block_without_inputs(index)
            else:
                results += self._block(index, hidden, calls[index])
            for name in sorted(name for name in copied if name.startswith(prefix)):
                self.writer.add(name, reader.tensor(name))
                copied.remove(name)
        for name in sorted(copied):
            self.writer.add(name, reader.tensor(name))
        return results

    def _block(self, index: int, hidden: list[torch.Tensor], call: BlockCall) -> list[LayerResult]:
        """Quantizes one block set by set and replaces `hidden` (batches [N, L, D]) by what the quantized block puts out."""
        stage = f"{self.skeleton.prefix}.{index}"
        results: list[LayerResult] = []
        with self.skeleton.loaded(index) as block:
            names = {module: name for name, module in self.skeleton.block_linears(index).items()}
            runner = BlockRunner(block, call, self.skeleton.probe(index), cache_bytes=_CACHE_BYTES)
            for members in runner.sets:
                planned = [layer for layer in self.planned.layers if layer.name in {names[m] for m in members}]
                if planned:
                    collector = runner.collect(members)
                    for position, batch in enumerate(hidden):
                        collector.add(batch, key=position)
                    modules = {names[module]: module for module in members}
                    results += self._set(planned, collector.statistics()[members[0]], modules, stage=stage)
                runner.settle(members)
            if index + 1 < len(self.skeleton.blocks):
                for position, batch in enumerate(hidden):
                    hidden[position] = runner.output(batch, key=position)
        return results

    def _block_without_inputs(self, index: int) -> list[LayerResult]:
        inside = self.skeleton.block_linears(index)
        planned = [layer for layer in self.planned.layers if layer.name in inside]
        return self._set(planned, None, {}, stage=f"{self.skeleton.prefix}.{index}")

    def _set(
        self,
        planned: Sequence[PlannedLayer],
        inputs: InputStatistics | None,
        modules: dict[str, nn.Linear],
        *,
        stage: str,
    ) -> list[LayerResult]:
        """Rounds the layers of one set, hands them to the writer, and puts the rounded weights into the block."""
        results = []
        checkpoint_format = get_format(self.recipe.format)
        for scheme, layers in _by_scheme(planned):
            started = time.monotonic()
            weights = [self.skeleton.reader.tensor(f"{layer.name}.weight") for layer in layers]
            rounded = self._round(layers, weights, scheme, inputs=inputs)
            seconds = (time.monotonic() - started) / len(layers)
            for layer, weight, result in zip(layers, weights, rounded, strict=True):
                _write(self.writer, layer, result, checkpoint_format=checkpoint_format)
                value = dequantize_weight(result.weight, torch.float32)
                results.append(
                    _measure(layer, weight.float(), value, inputs=inputs, fallback=result.fallback, seconds=seconds)
                )
                if layer.name in modules:
                    modules[layer.name].weight.data = value
                self.meter.finished(layer.name, stage)
        return results

    def _round(
        self,
        layers: Sequence[PlannedLayer],
        weights: Sequence[torch.Tensor],
        scheme: Scheme,
        *,
        inputs: InputStatistics | None,
    ) -> list[RoundedWeight]:
        try:
            return self.recipe.rounder.round(weights, scheme.weights, inputs)
        except WeightNotFinite as error:
            broken = next(
                layer.name
                for layer, weight in zip(layers, weights, strict=True)
                if not bool(torch.isfinite(weight).all())
            )
            raise QuantizeError(f"{broken}: {error}; the base model is damaged") from None


def _by_scheme(planned: Sequence[PlannedLayer]) -> Iterator[tuple[Scheme, list[PlannedLayer]]]:
    groups: dict[Scheme, list[PlannedLayer]] = {}
    for layer in planned:
        groups.setdefault(layer.scheme, []).append(layer)
    yield from groups.items()


def _write(
    writer: CheckpointWriter, layer: PlannedLayer, rounded: RoundedWeight, *, checkpoint_format: CheckpointFormat
) -> None:
    try:
        tensors = checkpoint_format.pack(rounded.weight, layer.scheme)
    except FormatError as error:
        raise QuantizeError(f"{layer.name}: {error}") from None
    for local, tensor in tensors.items():
        writer.add(f"{layer.name}.{local}", tensor)


def _measure(
    layer: PlannedLayer,
    weight: torch.Tensor,
    value: torch.Tensor,
    *,
    inputs: InputStatistics | None,
    fallback: str | None,
    seconds: float,
) -> LayerResult:
    """‖X D‖² = tr(D H Dᵀ) for H = XᵀX: the output error needs no second forward pass. weight, value [O, I] fp32."""
    difference = weight - value
    norm = float(weight.norm())
    output_error = None
    if inputs is not None and inputs.hessian is not None and inputs.tokens:
        lost = float(((difference @ inputs.hessian) * difference).sum())
        whole = float(((weight @ inputs.hessian) * weight).sum())
        output_error = (max(lost, 0.0) / whole) ** 0.5 if whole > 0 else 0.0
    return LayerResult(
        name=layer.name,
        scheme=layer.scheme.name,
        weight_error=float(difference.norm()) / norm if norm else 0.0,
        output_error=output_error,
        fallback=fallback,
        seconds=seconds,
    )


def _stable(result: LayerResult) -> dict[str, Any]:
    """The result without its time and without digits that depend on the order of a sum."""
    kept = {key: value for key, value in plain(result).items() if key != "seconds"}
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in kept.items()}


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
