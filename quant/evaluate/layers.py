"""What quantizing did inside the model, layer by layer: one block of the base and one of the candidate at a time.

For each Linear, over all tokens of some windows: relative errors of weight and output (‖·‖ is Frobenius' norm), with the
inputs that it has in full precision and with those that the candidate's own layers put out; the divergence of its outputs'
histograms; and the tails of each attention module's output, before and after.
Shapes: N windows, L tokens, D hidden size, O out_features, I in_features.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowgauge.quant.evaluate import rounded
from narrowgauge.quant.evaluate.dequantized import DequantizedReader
from narrowgauge.quant.evaluate.report import AttentionSpikes, EvalReport, LayerError
from narrowgauge.quant.evaluate.smoothed import Scales, fit_scales
from narrowgauge.quant.evaluate.tails import Tails, TwoHistograms
from narrowgauge.quant.evaluate.windows import EvaluationError
from narrowgauge.quant.model.attention import attention_modules
from narrowgauge.quant.model.blocks import BlockCall, Skeleton, origin, run_block
from narrowgauge.quant.model.experts import Expert

Progress = Callable[[int, int], None]
"""Called with (blocks done, blocks in all)."""


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Every Linear of the decoder blocks and every attention module, in the model's order; `notes` for people."""

    layers: tuple[LayerError, ...]
    attention: tuple[AttentionSpikes, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How the two models are run: where, in what dtype, and what of the candidate's run-time rounding takes place."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    round_activations: bool = True
    round_kv: bool = True


def measure_layers(
    base: Path,
    candidate: Path,
    ids: torch.Tensor,
    *,
    precision: Precision | None = None,
    progress: Progress | None = None,
) -> LayerReport:
    """Runs both models on ids [N, L], block after block; memory holds one block of each, and N·L·D values twice.

    Raises EvaluationError for two models that are not built alike and for weights that are not finite, FormatError,
    UnsupportedModel and ReferenceModelError as reading and rounding them do.
    """
    how = precision or Precision()
    with torch.inference_mode():
        sides = _Side.base(base, how), _Side.candidate(candidate, how)
        _check_alike(*(side.skeleton for side in sides))
        hidden = [list(side.skeleton.enter(ids)) for side in sides]
        calls = [side.skeleton.calls(ids.shape[1]) for side in sides]
        layers: list[LayerError] = []
        attention: list[AttentionSpikes] = []
        total = len(sides[0].skeleton.blocks)
        for index in range(total):
            pair = _BlockPair(sides[0].skeleton, sides[1].skeleton, index)
            with pair.loaded():
                for one, two in zip(*hidden, strict=True):
                    outputs = pair.run(one, two, (calls[0][index], calls[1][index]))
                    one.copy_(outputs[0])
                    two.copy_(outputs[1])
                layers += pair.layer_errors(sides[1].reader.files)
                attention += pair.spikes()
            if progress is not None:
                progress(index + 1, total)
    broken = [layer.name for layer in layers if layer.propagated_error is None and layer.output_error is None]
    notes = (f"not measured, as no token or no finite value came: {', '.join(broken[:5])}",) if broken else ()
    return LayerReport(layers=tuple(layers), attention=tuple(attention), notes=notes)


def merge(report: EvalReport, found: LayerReport) -> EvalReport:
    """`report` with what was found of its layers, beside what quantizing said of the same layers (fallbacks)."""
    fallbacks = {layer.name: layer.fallback for layer in report.layers}
    layers = tuple(replace(layer, fallback=fallbacks.get(layer.name)) for layer in found.layers)
    return replace(report, layers=layers, attention=found.attention, notes=(*report.notes, *found.notes))


@dataclass(frozen=True)
class _Side:
    skeleton: Skeleton
    reader: DequantizedReader

    @classmethod
    def base(cls, folder: Path, how: Precision) -> "_Side":
        reader = DequantizedReader(folder, dtype=how.dtype)
        return cls(Skeleton(reader, device=rounded.find_device(how.device), dtype=how.dtype), reader)

    @classmethod
    def candidate(cls, folder: Path, how: Precision) -> "_Side":
        side = cls.base(folder, how)
        skeleton, files, device = side.skeleton, side.reader.files, rounded.find_device(how.device)
        for index, block in enumerate(skeleton.blocks):
            if how.round_activations:
                rounded.round_inputs(skeleton.block_linears(index), files, device=device)
            if how.round_kv:
                attentions = {origin(module).name: module for module in attention_modules(block)}
                rounded.round_keys_and_values(attentions, files, device=device)
        return side


@dataclass
class _Sums:
    """What is summed over the tokens that reach one Linear."""

    scales: Scales
    weight_error: float
    aligned: bool
    """Whether both models send the same tokens here: not so inside experts, as each model routes by itself."""
    whole: float = 0.0
    lost: float = 0.0
    lost_propagated: float = 0.0
    outputs: TwoHistograms = field(default_factory=TwoHistograms)
    kept: torch.Tensor | None = None
    """The base's output of the batch at work."""


class _BlockPair:
    """The same block of both models, loaded together."""

    def __init__(self, base: Skeleton, candidate: Skeleton, index: int) -> None:
        self._base, self._candidate, self._index = base, candidate, index
        self._sums: dict[str, _Sums] = {}
        self._tails: dict[str, tuple[Tails, Tails]] = {}

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """Both blocks with their weights."""
        with self._base.loaded(self._index) as one, self._candidate.loaded(self._index) as two:
            inside = {linear for expert in one.modules() if isinstance(expert, Expert) for linear in expert.parts}
            judged = self._candidate.block_linears(self._index)
            for name, linear in self._base.block_linears(self._index).items():
                scales = fit_scales(linear.weight.float(), judged[name].weight.float())
                self._sums[name] = _Sums(
                    scales, _weight_error(name, linear, judged[name], scales=scales), linear not in inside
                )
            self._tails = {origin(module).name: (Tails(), Tails()) for module in attention_modules(one)}
            assert len(attention_modules(two)) == len(self._tails)
            yield

    def run(
        self, one: torch.Tensor, two: torch.Tensor, calls: tuple[BlockCall, BlockCall]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sends a batch [1, L, D] through each block and adds to the sums; what the blocks put out."""
        judged = self._candidate.block_linears(self._index)

        def base_output(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
            sums = self._sums[name]
            guess = sums.scales.restore(judged[name](x / sums.scales.columns))
            sums.whole += _square(y)
            sums.lost += _square(y - guess)
            sums.outputs.add(y)
            sums.kept = y

        def candidate_output(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
            sums = self._sums[name]
            if sums.kept is None:
                return
            if sums.aligned:
                sums.scales = sums.scales.settled(sums.kept, y)
                sums.lost_propagated += _square(sums.kept - sums.scales.restore(y))
            sums.outputs.add(sums.scales.restore(y), second=True)
            sums.kept = None

        with self._watched(self._base, base_output, which=0):
            first = run_block(self._base.blocks[self._index], one, calls[0])
        with self._watched(self._candidate, candidate_output, which=1):
            second = run_block(self._candidate.blocks[self._index], two, calls[1])
        return first, second

    def layer_errors(self, files: Any) -> Iterator[LayerError]:
        """The errors of each Linear; `files` (the candidate's reader) names the schemes."""
        schemes = files.layout.linears if files.layout else {}
        for name, sums in self._sums.items():
            scheme = schemes.get(name)
            yield LayerError(
                name=name,
                weight_error=sums.weight_error,
                output_error=_relative(sums.lost, sums.whole),
                propagated_error=_relative(sums.lost_propagated, sums.whole) if sums.aligned else None,
                output_kl=sums.outputs.divergence,
                scheme=None if scheme is None else scheme.name,
            )

    def spikes(self) -> Iterator[AttentionSpikes]:
        """The tails of the attention modules' outputs, where they are finite."""
        for name, (before, after) in self._tails.items():
            if math.isfinite(before.kurtosis) and math.isfinite(after.kurtosis):
                yield AttentionSpikes(
                    name=name,
                    kurtosis=after.kurtosis,
                    base_kurtosis=before.kurtosis,
                    spike=after.spike,
                    base_spike=before.spike,
                )

    @contextlib.contextmanager
    def _watched(
        self, skeleton: Skeleton, see: Callable[[str, torch.Tensor, torch.Tensor], None], *, which: int
    ) -> Iterator[None]:
        def linear_hook(name: str) -> Callable[..., None]:
            return lambda module, arguments, output: see(name, arguments[0], output)

        def attention_hook(tails: Tails) -> Callable[..., None]:
            return lambda module, arguments, output: tails.add(output[0] if isinstance(output, tuple) else output)

        linears = skeleton.block_linears(self._index).items()
        handles = [linear.register_forward_hook(linear_hook(name)) for name, linear in linears]
        handles += [
            module.register_forward_hook(attention_hook(self._tails[origin(module).name][which]))
            for module in attention_modules(skeleton.blocks[self._index])
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _weight_error(name: str, base: nn.Linear, candidate: nn.Linear, *, scales: Scales) -> float:
    weight, rounded_weight = scales.apply(base.weight.float()), candidate.weight.float()
    if not bool(torch.isfinite(rounded_weight).all()):
        raise EvaluationError(f"{name}: the candidate's weight holds NaN or infinity; quantize it again")
    return _relative(_square(weight - rounded_weight), _square(weight)) or 0.0


def _square(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _relative(lost: float, whole: float) -> float | None:
    value = math.sqrt(lost / whole) if whole > 0 else math.nan
    return value if math.isfinite(value) else None


def _check_alike(base: Skeleton, candidate: Skeleton) -> None:
    ours, theirs = base.linears(), candidate.linears()
    if ours != theirs:
        odd = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        raise EvaluationError(
            f"{candidate.reader.folder}: {odd[0]} is {theirs.get(odd[0])}, in the base {ours.get(odd[0])}: only a model "
            "and what was made from it can be compared layer by layer"
        )
