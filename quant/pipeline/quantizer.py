"""Quantizes one block: smooth, round set after set, calibrate the KV cache, and run on what comes out.

Within a block the Linears go in the order they run, those that share an input together (q, k, v; o; gate, up; down), and
inputs are captured again after each set, so that a set sees the rounding of the sets before it ("true sequential"):
their weights, and their inputs where the scheme rounds those.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from narrowgauge.quant.formats.base import FormatError, KVScales, QuantizedWeight, dequantize_weight, get_format
from narrowgauge.quant.formats.rounding import kv_scales, round_activations
from narrowgauge.quant.formats.scheme import ActivationScheme, Scheme, WeightScheme
from narrowgauge.quant.methods.base import InputStatistics, Smoother
from narrowgauge.quant.model.attention import observe_kv
from narrowgauge.quant.model.blocks import BlockCall, origin, run_block
from narrowgauge.quant.model.experts import Expert
from narrowgauge.quant.model.fused import units
from narrowgauge.quant.model.inputs import Need
from narrowgauge.quant.model.runner import BlockRunner, LinearSet, everywhere
from narrowgauge.quant.model.smoothing import SmoothingSite, sites
from narrowgauge.quant.pipeline.activations import HiddenStates, StatesWriter, out_of_memory
from narrowgauge.quant.pipeline.layers import Job, LayerRounder
from narrowgauge.quant.pipeline.results import BlockResult, KVResult, QuantizeError, SmoothingResult
from narrowgauge.quant.plan import PlannedLayer

_HESSIAN_BYTES = 4 << 30
"""Hessians of one pass that may stand in memory together; a Linear wider than that has its own pass."""
_JUDGED_BY_OUTPUT = frozenset({"hessian", "heldout"})
_NORM_FOLLOWS = "a norm follows, which scales that are judged before it overlook"


@dataclass(frozen=True, kw_only=True)
class BlockOutcome:
    """The tensors to store for one block, by full name, what was done, and what reaches the next block (None: the last)."""

    tensors: Mapping[str, torch.Tensor]
    result: BlockResult
    states: HiddenStates | None = None


def block_without_inputs(job: Job, index: int) -> BlockOutcome:
    """Rounds the Linears of one block by their weights alone. Raises QuantizeError."""
    rounder = LayerRounder(job, index)
    for layers in _stacked(job.inside(index)):
        rounder.round(layers, [job.skeleton.weight(layer.name).to(job.skeleton.device) for layer in layers], None)
    return BlockOutcome(tensors=rounder.tensors(), result=BlockResult(layers=rounder.results()))


def block_with_inputs(
    job: Job, index: int, states: HiddenStates, *, call: BlockCall, onward: StatesWriter | None
) -> BlockOutcome:
    """Quantizes one block on `states`, what the quantized blocks before it put out; `onward` takes what it puts out.

    Raises QuantizeError and InputsNotFinite, naming the layer. Where memory runs out, batches are halved in `states` and
    the pass begins again; sums over smaller batches may differ in their last bits.
    """
    with job.skeleton.loaded(index) as block, contextlib.ExitStack() as hooks:
        work = _Work(job, index, block=block, states=states, call=call, hooks=hooks)
        smoothing = work.smooth()
        work.round_sets()
        after, kv_cache = work.run_on(onward)
        result = BlockResult(layers=work.rounder.results(), smoothing=smoothing, kv_cache=kv_cache)
        return BlockOutcome(tensors=work.rounder.tensors(work.changed()), result=result, states=after)


class _Work:
    """One loaded block at work."""

    def __init__(
        self,
        job: Job,
        index: int,
        *,
        block: nn.Module,
        states: HiddenStates,
        call: BlockCall,
        hooks: contextlib.ExitStack,
    ) -> None:
        self.rounder = LayerRounder(job, index)
        self._job, self._index, self._block = job, index, block
        self._states, self._call, self._hooks = states, call, hooks
        self._planned = {layer.name: layer for layer in job.inside(index)}
        self._changed: set[str] = set()
        self._probe = job.skeleton.probe(index)
        self._runner = BlockRunner(block, call, self._probe, cache_bytes=job.cache_bytes)

    def changed(self) -> dict[str, torch.Tensor]:
        """The tensors that smoothing changed and rounding did not replace, by full name, in the dtype of the files."""
        found = {}
        for module in self._block.modules():
            for local, tensor in module.named_parameters(recurse=False):
                name = f"{origin(module).name}.{local}"
                if name in self._changed:
                    found[name] = tensor.detach().to(origin(module).dtypes[local]).cpu()
        return found

    def smooth(self) -> tuple[SmoothingResult, ...]:
        """Applies the recipe's smoothers, one after the other, to all sites of the block that they know how to use."""
        results: list[SmoothingResult] = []
        for method in self._job.recipe.smoothers if self._planned else ():
            found = [site for site in sites(self._block, *self._probe) if self._concerns(site, method)]
            # A method that judges scales by a Linear's own output overlooks a norm that follows it.
            blind = [site for site in found if site.normalized and method.needs & _JUDGED_BY_OUTPUT]
            results += [_result(method, site, None, note=_NORM_FOLLOWS) for site in blind]
            if offered := [site for site in found if site not in blind]:
                self._job.meter.say(f"{self._job.stage(self._index)}: {method.name}")
                results += self._smooth_sites(method, offered)
        if self._changed:  # what was traced has changed
            self._runner = BlockRunner(self._block, self._call, self._probe, cache_bytes=self._job.cache_bytes)
        return tuple(results)

    def round_sets(self) -> None:
        """Rounds the block's planned Linears, set after set, and puts the rounded weights into the block.

        Sets that do not feed one another (all experts' gates and ups) see their inputs in one pass.
        """
        for stage in self._runner.stages:
            for sets in self._in_one_pass(stage):
                schemed = [list(self._by_scheme(members)) for members in sets]
                needs = frozenset[Need]().union(*(self._needs(layers) for one in schemed for layers, _ in one))
                targets = [modules[0] for one in schemed for _, modules in one]
                inputs = self._statistics(targets, needs) if needs else {}
                for members, one in zip(sets, schemed, strict=True):
                    for layers, modules in one:
                        self._round_together(layers, modules, inputs.get(modules[0]))
                    self._runner.settle(members)

    def _round_together(
        self, layers: Sequence[PlannedLayer], modules: Sequence[nn.Linear], inputs: InputStatistics | None
    ) -> None:
        values = self.rounder.round(layers, [self._weight(module) for module in modules], inputs)
        for module, layer, value in zip(modules, layers, values, strict=True):
            self._put(module, layer, value)

    def _in_one_pass(self, stage: Sequence[LinearSet]) -> Iterator[list[LinearSet]]:
        """The sets of a stage in parts whose Hessians, two a set at most, fit into _HESSIAN_BYTES."""
        part: list[LinearSet] = []
        size = 0
        for members in stage:
            more = 2 * 4 * members[0].in_features ** 2
            if part and size + more > _HESSIAN_BYTES:
                yield part
                part, size = [], 0
            part.append(members)
            size += more
        yield part

    def run_on(self, onward: StatesWriter | None) -> tuple[HiddenStates | None, KVResult | None]:
        """Runs the quantized block once more: what it puts out goes to `onward`, keys and values are watched on the way."""
        scheme, attention = self._job.planned.kv_cache, self._job.skeleton.attention(self._index)
        watched = scheme is not None and attention is not None
        if onward is None and not watched:
            return None, None
        stage = self._job.stage(self._index)
        self._job.meter.say(f"{stage}: {'KV cache' if watched else 'forward'}")
        with observe_kv(self._block) if watched else contextlib.nullcontext() as seen:

            def step(batch: torch.Tensor, key: Any, heldout: bool) -> None:
                # What the runner keeps would skip attention, and nothing would be seen.
                output = run_block(self._block, batch, self._call) if watched else self._runner.output(batch, key=key)
                if not bool(torch.isfinite(output).all()):
                    raise QuantizeError(f"{stage}: puts out NaN or infinity in calibration; compute in another dtype")
                if onward is not None:
                    onward.append(output)

            self._over_batches(step, again=onward.restart if onward is not None else lambda: None)
        kv_cache = None
        if scheme is not None and attention is not None:
            assert seen is not None
            kv_cache = self._store_kv(attention.name, seen.key, seen.value)
        after = None
        if onward is not None:
            after = onward.close(device=self._job.skeleton.device, dtype=self._job.skeleton.dtype)
        return after, kv_cache

    def _store_kv(self, name: str, key: torch.Tensor | None, value: torch.Tensor | None) -> KVResult:
        scheme = self._job.planned.kv_cache
        assert scheme is not None
        if key is None or value is None:
            what = "keys" if key is None else "values"
            raise QuantizeError(
                f"{name}: calibration saw no {what}, or only zeros, so the KV cache has no scale; calibrate on other text, "
                "or set kv_cache: null"
            )
        dtype = self._job.stored_dtype(self._index)
        scales = KVScales(key=kv_scales(key, scheme).to(dtype), value=kv_scales(value, scheme).to(dtype))
        try:
            tensors = get_format(self._job.recipe.format).kv_tensors(name, scales)
        except FormatError as error:
            raise QuantizeError(str(error)) from None
        self.rounder.store(tensors)
        ranges = [(float(one.min()), float(one.max())) for one in (scales.key, scales.value)]
        return KVResult(name=name, key=ranges[0], value=ranges[1])

    def _concerns(self, site: SmoothingSite, method: Smoother) -> bool:
        return site.kind in method.sites and any(origin(module).name in self._planned for module in site.consumers)

    def _smooth_sites(self, method: Smoother, offered: Sequence[SmoothingSite]) -> Iterator[SmoothingResult]:
        speakers = [site.consumers[0] for site in offered]
        # A norm before a mixture of experts feeds all tokens to them together: its first expert stands for all.
        mixed = any(isinstance(module, Expert) for module in self._block.modules())
        with everywhere(self._block) if mixed else contextlib.nullcontext():
            statistics = self._statistics(speakers, method.needs, keep=False)
        for site, speaker in zip(offered, speakers, strict=True):
            planned = [module for module in site.consumers if origin(module).name in self._planned]
            scheme = self._smallest(planned)
            weights = [module.weight.detach().float() for module in planned]
            smoothing = method.smooth(weights, scheme, statistics[speaker], rounder=self._job.recipe.rounder)
            scales = None if smoothing.scales is None else site.tie(smoothing.scales)
            if scales is not None:
                site.apply(scales)
                self._changed.update(site.changed)
            yield _result(method, site, scales, note=smoothing.note)

    def _smallest(self, modules: Sequence[nn.Linear]) -> WeightScheme:
        schemes = [self._planned[origin(module).name].scheme.weights for module in modules]
        return min(schemes, key=lambda scheme: scheme.bits)

    def _by_scheme(self, members: Sequence[nn.Linear]) -> Iterator[tuple[list[PlannedLayer], list[nn.Linear]]]:
        """The planned Linears of a set with one scheme each time: (layers, modules)."""
        groups: dict[Any, tuple[list[PlannedLayer], list[nn.Linear]]] = {}
        for module in members:
            layer = self._planned.get(origin(module).name)
            if layer is not None:
                layers, modules = groups.setdefault(layer.scheme, ([], []))
                layers.append(layer)
                modules.append(module)
        yield from groups.values()

    def _needs(self, layers: Sequence[PlannedLayer]) -> frozenset[Need]:
        activations = layers[0].scheme.activations
        static: frozenset[Need] = frozenset({"range"} if activations is not None and not activations.dynamic else ())
        return frozenset().union(static, *(method.needs for method in self._job.rounding_methods))

    def _statistics(
        self, targets: Sequence[nn.Linear], needs: Collection[Need], *, keep: bool = True
    ) -> dict[nn.Linear, InputStatistics]:
        """What reaches `targets`; `keep` lets the runner remember what settled Linears made."""
        collector = self._runner.collect(targets, needs=needs)

        def begin() -> None:
            nonlocal collector
            collector = self._runner.collect(targets, needs=needs)

        def step(batch: torch.Tensor, key: Any, heldout: bool) -> None:
            collector.add(batch, key=key if keep else None, heldout=heldout and "heldout" in needs)

        self._over_batches(step, again=begin)
        return collector.statistics()

    def _over_batches(self, step: Callable[[torch.Tensor, Any, bool], None], *, again: Callable[[], None]) -> None:
        """Calls step(batch, key, heldout) for all batches; where memory runs out, halves them and begins `again`."""
        while not self._pass(step):
            self._runner.forget()
            if self._job.skeleton.device.type == "cuda":
                torch.cuda.empty_cache()
            if not self._states.halve():
                raise QuantizeError(
                    f"{self._job.stage(self._index)}: one sample of {self._states.shape.length} tokens does not fit into "
                    "memory; lower calibration.length, or quantize where there is more"
                )
            again()

    @torch.inference_mode()
    def _pass(self, step: Callable[[torch.Tensor, Any, bool], None]) -> bool:
        try:
            for position in range(len(self._states)):
                start = self._states.start(position)
                step(self._states[position], start, start >= self._job.heldout_from)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            return False
        return True

    def _weight(self, module: nn.Linear) -> torch.Tensor:
        """[O, I] in the dtype of the files: from the files, or from the block where smoothing has changed it."""
        name = origin(module).name
        if f"{name}.weight" in self._changed:
            return module.weight.detach().to(origin(module).dtypes["weight"])
        return self._job.skeleton.weight(name).to(module.weight.device)

    def _put(self, module: nn.Linear, layer: PlannedLayer, value: QuantizedWeight) -> None:
        """Makes the block run as an engine will: with the dequantized weight, and the input rounded if the scheme says so."""
        activations = layer.scheme.activations
        # Engines that multiply codes apply the scales in fp32; others dequantize to the model's dtype.
        seen = origin(module).dtypes["weight"] if activations is None else torch.float32
        module.weight.data = dequantize_weight(value, seen).to(module.weight.dtype)
        if activations is not None:
            hook = _input_rounding(activations, value.input_scale)
            self._hooks.callback(module.register_forward_pre_hook(hook).remove)


def _stacked(layers: Sequence[PlannedLayer]) -> Iterator[list[PlannedLayer]]:
    """The Linears that engines run as one and that read the same (q, k, v; gate, up), where they have one scheme."""
    by_name = {layer.name: layer for layer in layers}
    for members in units(by_name).values():
        groups: dict[tuple[str, Scheme], list[PlannedLayer]] = {}
        for name in members:  # a unit holds all experts of a layer, which have scales of their own
            groups.setdefault((name.rpartition(".")[0], by_name[name].scheme), []).append(by_name[name])
        yield from groups.values()


def _result(method: Smoother, site: SmoothingSite, scales: torch.Tensor | None, *, note: str | None) -> SmoothingResult:
    return SmoothingResult(
        method=method.name,
        linears=tuple(origin(module).name for module in site.consumers),
        smallest=None if scales is None else float(scales.min()),
        largest=None if scales is None else float(scales.max()),
        note=note,
    )


def _input_rounding(
    scheme: ActivationScheme, scale: torch.Tensor | None
) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def round_first(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (round_activations(arguments[0], scheme, scale), *arguments[1:])

    return round_first
