"""Rounds Linears that share an input by a recipe's methods, and makes of them what the format stores."""

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from narrowgauge.quant.formats.base import FormatError, QuantizedWeight, dequantize_weight, get_format
from narrowgauge.quant.formats.read import lookup
from narrowgauge.quant.formats.scheme import FP8_MAX
from narrowgauge.quant.methods.base import METHODS, Clipper, InputStatistics, QuantMethod, RoundedWeight, Rounder
from narrowgauge.quant.model.blocks import Skeleton
from narrowgauge.quant.observers import WeightNotFinite
from narrowgauge.quant.pipeline.results import LayerResult, Meter, QuantizeError
from narrowgauge.quant.plan import Plan, PlannedLayer
from narrowgauge.quant.recipe import Recipe

_FEW_TOKENS = 0.005
"""Share of the calibration tokens below which the inputs of an expert say less than its weights alone (as GPTQModel has it)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What stays the same for all blocks: `tokens` of calibration in all, 0 for none; samples from `heldout_from` on are
    kept from the methods' first look; the runner of a block keeps up to `cache_bytes` of activations."""

    recipe: Recipe
    planned: Plan
    skeleton: Skeleton
    meter: Meter
    tokens: int = 0
    heldout_from: int = 0
    cache_bytes: int = 0

    def inside(self, index: int) -> list[PlannedLayer]:
        """The layers to be quantized in block `index`, in the plan's order."""
        names = self.skeleton.block_linears(index)
        return [layer for layer in self.planned.layers if layer.name in names]

    def stage(self, index: int) -> str:
        """The block's name, as Progress shows it."""
        return f"{self.skeleton.prefix}.{index}"

    def stored_dtype(self, index: int) -> torch.dtype:
        """The dtype of the block's weights in the files."""
        first = next(iter(self.skeleton.block_linears(index)))
        return self.skeleton.reader.matrix_dtype(self.skeleton.source(first))

    @property
    def rounding_methods(self) -> tuple[QuantMethod, ...]:
        """The methods that look at inputs just before rounding."""
        clippers = tuple(method for method in self.recipe.methods if isinstance(method, Clipper))
        return (*clippers, self.recipe.rounder)


class LayerRounder:
    """The rounding of one block's Linears."""

    def __init__(self, job: Job, index: int) -> None:
        self._job = job
        self._index = index
        self._format = get_format(job.recipe.format)
        self._stored: dict[str, torch.Tensor] = {}
        self._results: dict[str, LayerResult] = {}
        self._absmax: dict[str, float] = {}

    def results(self) -> tuple[LayerResult, ...]:
        """What was done, in the plan's order."""
        return tuple(self._results[layer.name] for layer in self._job.planned.layers if layer.name in self._results)

    def store(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes further tensors to store, by full name."""
        self._stored |= {name: tensor.cpu() for name, tensor in tensors.items()}

    def tensors(self, changed: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """All tensors that differ from the base's, `changed` ones included.

        Where experts share one tensor in the base and some of them differ, the others are written out beside them.
        """
        skeleton, rounded = self._job.skeleton, {f"{name}.weight" for name in self._results}
        written = dict(self._stored)
        written |= {name: tensor for name, tensor in (changed or {}).items() if name not in rounded}
        linears = [f"{name}.weight" for name in skeleton.block_linears(self._index)]
        sources = {name: skeleton.source(name.removesuffix(".weight")) for name in linears}
        replaced = {sources[name] for name in linears if name in rounded or name in written}
        for name in linears:
            if sources[name] in replaced and name not in rounded and name not in written:
                written[name] = skeleton.weight(name.removesuffix(".weight"))
        return written

    def round(
        self, layers: Sequence[PlannedLayer], weights: Sequence[torch.Tensor], inputs: InputStatistics | None
    ) -> list[QuantizedWeight]:
        """Rounds Linears [O, I] of one scheme that share an input. Raises QuantizeError, naming the layer."""
        started = time.monotonic()
        scheme = layers[0].scheme
        rounded = self._round(layers, weights, inputs)
        scale = self._input_scale(layers, inputs, weights[0])
        seconds = (time.monotonic() - started) / len(layers)
        values = []
        for layer, weight, one in zip(layers, weights, rounded, strict=True):
            value = dataclasses.replace(one.weight, input_scale=scale)
            try:
                packed = self._format.pack(value, scheme)
            except FormatError as error:
                raise QuantizeError(f"{layer.name}: {error}") from None
            self.store({f"{layer.name}.{local}": tensor for local, tensor in packed.items()})
            weight_error, output_error = _errors(weight.float(), value, inputs)
            self._results[layer.name] = LayerResult(
                name=layer.name,
                scheme=scheme.name,
                weight_error=weight_error,
                output_error=output_error,
                fallback=one.fallback,
                seconds=seconds,
            )
            self._job.meter.layer(layer.name, self._job.stage(self._index))
            values.append(value)
        return values

    def _round(
        self, layers: Sequence[PlannedLayer], weights: Sequence[torch.Tensor], inputs: InputStatistics | None
    ) -> list[RoundedWeight]:
        scheme, rounder = layers[0].scheme.weights, self._job.recipe.rounder
        try:
            if inputs is not None and inputs.hessian is not None and inputs.tokens < _FEW_TOKENS * self._job.tokens:
                reason = f"only {inputs.tokens} of {self._job.tokens} calibration tokens reached it"
                plain: Rounder = lookup(METHODS, "rtn")(name="rtn")
                return [dataclasses.replace(one, fallback=reason) for one in plain.round(weights, scheme, None)]
            limits = None
            for method in self._job.recipe.methods:
                if isinstance(method, Clipper) and limits is None and inputs is not None and inputs.tokens:
                    limits = method.limits([weight.float() for weight in weights], scheme, inputs)
            return rounder.round(weights, scheme, _all_samples(inputs), limits=limits)
        except WeightNotFinite as error:
            broken = next(
                layer.name
                for layer, weight in zip(layers, weights, strict=True)
                if not bool(torch.isfinite(weight).all())
            )
            raise QuantizeError(f"{broken}: {error}; the base model is damaged") from None

    def _input_scale(
        self, layers: Sequence[PlannedLayer], inputs: InputStatistics | None, weight: torch.Tensor
    ) -> torch.Tensor | None:
        """The static scale [1] of the common input, in the weights' dtype; None where the scheme has none.

        An expert that no token reached takes the largest of those that read the same in its block before it.
        """
        activations = layers[0].scheme.activations
        if activations is None or activations.dynamic:
            return None
        assert inputs is not None
        roles = [re.sub(r"\.\d+\.", ".*.", layer.name.removeprefix(self._job.stage(self._index))) for layer in layers]
        if inputs.tokens:
            absmax = float(inputs.absmax.max())
            for role in roles:
                self._absmax[role] = max(absmax, self._absmax.get(role, 0.0))
        elif roles[0] in self._absmax:
            absmax = self._absmax[roles[0]]
        else:
            raise QuantizeError(
                f"{layers[0].name}: no calibration token reached it, so its input has no scale; add samples, or use dynamic "
                "activations"
            )
        scale = torch.tensor([absmax / (FP8_MAX if activations.type == "float" else 127.5)]).to(weight)
        # An input of zeros needs a scale all the same: any will do, but never zero.
        return torch.where(scale > 0, scale, torch.finfo(weight.dtype).eps)


def _all_samples(inputs: InputStatistics | None) -> InputStatistics | None:
    """What a rounder may learn from: once smoothing and clipping are judged, nothing has to be held out any more."""
    if inputs is None or inputs.hessian is None or inputs.heldout is None:
        return inputs
    return dataclasses.replace(inputs, hessian=inputs.hessian + inputs.heldout)


def _errors(weight: torch.Tensor, value: QuantizedWeight, inputs: InputStatistics | None) -> tuple[float, float | None]:
    """‖W - Q‖ / ‖W‖ and, by ‖X D‖² = tr(D H Dᵀ) with H = XᵀX, the same of the outputs. weight [O, I] fp32."""
    difference = weight - dequantize_weight(value, torch.float32)
    norm, output_error = float(weight.norm()), None
    if inputs is not None and inputs.hessian is not None and inputs.tokens:
        hessian = _all_samples(inputs)
        assert hessian is not None
        assert hessian.hessian is not None
        lost = float(((difference @ hessian.hessian) * difference).sum())
        whole = float(((weight @ hessian.hessian) * weight).sum())
        output_error = (max(lost, 0.0) / whole) ** 0.5 if whole > 0 else 0.0
    return float(difference.norm()) / norm if norm else 0.0, output_error
