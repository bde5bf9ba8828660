"""How much each unit of a model matters: the KL of the model's answers when only that unit is quantized.

One walk over the blocks serves all units. Beside the hidden states of the full-precision model it carries one set of states
for each unit of the blocks so far, in which only that unit was rounded; each block moves them all on by its own weights.
Behind the last block each set becomes logits, and those a mean KL. Only one block holds weights at a time.
Shapes: N samples, L tokens of a sample, D hidden size, O out_features, I in_features.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from narrowgauge.quant.formats.base import dequantize_weight
from narrowgauge.quant.formats.rounding import round_activations
from narrowgauge.quant.formats.scheme import ActivationScheme, Scheme
from narrowgauge.quant.methods.base import InputStatistics, Rounder
from narrowgauge.quant.methods.rtn import RTN
from narrowgauge.quant.model.blocks import BlockCall, Skeleton, origin, run_block
from narrowgauge.quant.model.runner import BlockRunner, LinearSet

Key = TypeVar("Key", bound=Hashable)

TOKENS = 1024
"""Tokens the KL is measured on: a few hundred tell the units apart, and each unit runs them through half the model."""
LENGTH = 256
"""Longest sample of these: many short ones cover more of the domains than a few long ones."""
_HESSIAN_TOKENS = 4096
"""Least tokens that the Hessians are summed over; more where a layer has more than half as many inputs."""
_BATCH_TOKENS = 4096
_STATES_BYTES = 8 << 30
"""Most memory for hidden states; a model with so many units that they do not fit is measured on fewer tokens. A constant,
since the same recipe must give the same checkpoint on every machine."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Linears that are given one Scheme together, by name, and the Schemes they may have. One of each kind of activations
    is measured; the others are scaled from it."""

    name: str
    layers: tuple[str, ...]
    options: tuple[Scheme, ...]
    measured: tuple[Scheme, ...]


def hessian_tokens(skeleton: Skeleton, layers: Sequence[str]) -> int:
    """Tokens that the Hessians of these Linears are summed over: twice as many as the widest has inputs."""
    shapes = skeleton.linears()
    return max(_HESSIAN_TOKENS, 2 * max(shapes[name][1] for name in layers))


def measured_options(options: Sequence[Scheme], costs: Sequence[float], average: float) -> tuple[Scheme, ...]:
    """Of each kind of activations the option to measure: the costliest that the average allows, for most units will get one
    like it, or the cheapest."""
    by_activations: dict[ActivationScheme | None, list[tuple[float, Scheme]]] = {}
    for option, cost in zip(options, costs, strict=True):
        by_activations.setdefault(option.activations, []).append((cost, option))
    chosen = []
    for group in by_activations.values():
        group.sort(key=lambda entry: entry[0])
        chosen.append(next((option for cost, option in reversed(group) if cost <= average), group[0][1]))
    return tuple(chosen)


def measure(
    units: Sequence[Unit],
    rounder: Rounder,
    skeleton: Skeleton,
    *,
    ids: torch.Tensor,
    progress: Callable[[str], None],
) -> dict[str, tuple[float, ...]]:
    """Mean KL in nats a token (full precision ‖ only this unit rounded) of each option of each unit, by the unit's name.

    ids [N, L]. An option that is not measured gets the KL of the measured one with the same activations times the ratio of
    their losses tr(D H Dᵀ), D = W - Q and H = XᵀX (the second-order term of Nagel et al., "Up or Down?", 2020).
    """
    return _Walk(units, rounder, skeleton, ids=ids, progress=progress).run()


def total_kl(base: Skeleton, quantized: Skeleton, ids: torch.Tensor, *, units: int) -> float:
    """Mean KL (base ‖ quantized) in nats a token, on the tokens that `measure` takes for that many units.

    The Linears of `quantized` round their inputs as the checkpoint says.
    """
    sample = _sample(ids, base, units)
    states = [torch.cat(list(base.enter(sample)))] * 2
    calls = base.calls(sample.shape[1])
    for index in range(len(base.blocks)):
        with base.loaded(index) as block:
            states[0] = run_block(block, states[0], calls[index])
        with quantized.loaded(index) as block, _rounded_inputs(_schemes(quantized, block), _scales(quantized, block)):
            states[1] = run_block(block, states[1], calls[index])
    return _kl_of(states[0], {"quantized": states[1]}, base)["quantized"]


class _Walk:
    """The walk over the blocks; `_alive` holds the states of each measured option of each unit so far, on the CPU."""

    def __init__(
        self,
        units: Sequence[Unit],
        rounder: Rounder,
        skeleton: Skeleton,
        *,
        ids: torch.Tensor,
        progress: Callable[[str], None],
    ) -> None:
        self._skeleton = skeleton
        self._rounder = rounder
        self._progress = progress
        self._units = units
        self._sample = _sample(ids, skeleton, sum(len(unit.measured) for unit in units))
        # What the rounder fits is not what it is judged on, where there are samples enough.
        most = hessian_tokens(skeleton, [name for unit in units for name in unit.layers]) // ids.shape[1]
        self._ids = ids[: max(1, min(most, len(ids) - len(self._sample)))]
        self._alive: dict[tuple[str, Scheme], torch.Tensor] = {}
        self._ratios: dict[str, dict[Scheme, tuple[Scheme, float]]] = {}

    @torch.inference_mode()
    def run(self) -> dict[str, tuple[float, ...]]:
        """See `measure`."""
        skeleton = self._skeleton
        batch = max(1, _BATCH_TOKENS // self._ids.shape[1])
        wide = [state.cpu() for state in skeleton.enter(self._ids, batch=batch)]
        base = torch.cat([state.cpu() for state in skeleton.enter(self._sample)])
        wide_calls, calls = skeleton.calls(self._ids.shape[1]), skeleton.calls(self._sample.shape[1])
        for index in range(len(skeleton.blocks)):
            self._progress(f"sensitivity of {skeleton.prefix}.{index}")
            with skeleton.loaded(index) as block:
                for key, state in self._alive.items():
                    self._alive[key] = self._forward(block, state, calls[index])
                inside = skeleton.block_linears(index)
                own = [unit for unit in self._units if unit.layers[0] in inside]
                if own:
                    runner = BlockRunner(block, wide_calls[index], skeleton.probe(index))
                    statistics = self._statistics(runner, [inside[name] for unit in own for name in unit.layers], wide)
                    for unit in own:
                        members = tuple(inside[name] for name in unit.layers)
                        sets = [tuple(one for one in group if one in members) for group in runner.sets]
                        self._ratios[unit.name] = self._scaled(unit, [group for group in sets if group], statistics)
                        self._branch(
                            unit,
                            block,
                            [group for group in sets if group],
                            statistics=statistics,
                            base=base,
                            call=calls[index],
                        )
                wide = [self._forward(block, state, wide_calls[index]) for state in wide]
                base = self._forward(block, base, calls[index])
        self._progress("sensitivity: divergence")
        kl = _kl_of(base, self._alive, skeleton)
        return {
            unit.name: tuple(
                kl[unit.name, measured] * ratio
                for measured, ratio in (self._ratios[unit.name][option] for option in unit.options)
            )
            for unit in self._units
        }

    def _forward(self, block: nn.Module, state: torch.Tensor, call: BlockCall) -> torch.Tensor:
        return run_block(block, state.to(self._skeleton.device), call).cpu()

    def _statistics(
        self, runner: BlockRunner, targets: Sequence[nn.Linear], wide: Sequence[torch.Tensor]
    ) -> Mapping[nn.Linear, InputStatistics]:
        collector = runner.collect(targets)
        for batch in wide:
            collector.add(batch.to(self._skeleton.device))
        return collector.statistics()

    def _scaled(
        self, unit: Unit, sets: Sequence[LinearSet], statistics: Mapping[nn.Linear, InputStatistics]
    ) -> dict[Scheme, tuple[Scheme, float]]:
        """For each option the measured one that stands for it, and how many times its loss the option's is.

        Losses are those of round to nearest: what a better rounder gains, it gains on all options in like measure.
        """
        nearest = RTN(name="rtn")
        losses = {}
        for option in unit.options:
            rounded = self._rounded(nearest, option, sets, statistics=statistics)
            losses[option] = sum(_lost(linear.weight, value, statistics[linear]) for linear, value in rounded.items())
        stands = {option.activations: option for option in unit.measured}
        return {
            option: (
                stands[option.activations],
                loss / reference if (reference := losses[stands[option.activations]]) else 1.0,
            )
            for option, loss in losses.items()
        }

    def _branch(
        self,
        unit: Unit,
        block: nn.Module,
        sets: Sequence[LinearSet],
        *,
        statistics: Mapping[nn.Linear, InputStatistics],
        base: torch.Tensor,
        call: BlockCall,
    ) -> None:
        """Starts the states of each measured option: the block with only this unit rounded."""
        for option in unit.measured:
            rounded = self._rounded(self._rounder, option, sets, statistics=statistics)
            whole = {linear: linear.weight.data for linear in rounded}
            try:
                for linear, value in rounded.items():
                    linear.weight.data = value
                with _rounded_inputs(dict.fromkeys(rounded, option), {}):
                    self._alive[unit.name, option] = self._forward(block, base, call)
            finally:
                for linear, weight in whole.items():
                    linear.weight.data = weight

    def _rounded(
        self,
        rounder: Rounder,
        scheme: Scheme,
        sets: Sequence[LinearSet],
        *,
        statistics: Mapping[nn.Linear, InputStatistics],
    ) -> dict[nn.Linear, torch.Tensor]:
        """The weights [O, I] as rounded and read back, in the block's dtype."""
        found = {}
        for group in sets:
            stored = [linear.weight.to(origin(linear).dtypes["weight"]) for linear in group]
            for linear, result in zip(group, rounder.round(stored, scheme.weights, statistics[group[0]]), strict=True):
                found[linear] = dequantize_weight(result.weight, torch.float32).to(linear.weight.dtype)
        return found


def _lost(weight: torch.Tensor, value: torch.Tensor, inputs: InputStatistics) -> float:
    """tr(D H Dᵀ), the sum over all tokens of the squared error of the output."""
    assert inputs.hessian is not None
    difference = weight.float() - value.float()
    return max(float(((difference @ inputs.hessian) * difference).sum()), 0.0)


def _sample(ids: torch.Tensor, skeleton: Skeleton, states: int) -> torch.Tensor:
    """The tokens to measure on, [n, l]: the beginnings of the last samples, at most of a quarter of them."""
    width = skeleton.model.config.get_text_config().hidden_size
    most = _STATES_BYTES // (4 * width * (states + 1))
    tokens = max(16, min(TOKENS, most))
    length = min(ids.shape[1], LENGTH, tokens)
    return ids[-max(1, min(tokens // length, len(ids) // 4)) :, :length]


@torch.inference_mode()
def _kl_of(base: torch.Tensor, others: Mapping[Key, torch.Tensor], skeleton: Skeleton) -> dict[Key, float]:
    """Mean KL in nats a token of the logits of `base` [N, L, D] against those of each of `others`, sample by sample."""
    total = dict.fromkeys(others, 0.0)
    with skeleton.head() as logits:
        for row in range(len(base)):
            log_p = torch.log_softmax(logits(base[row : row + 1].to(skeleton.device)), dim=-1)
            p = log_p.exp()
            for key, state in others.items():
                log_q = torch.log_softmax(logits(state[row : row + 1].to(skeleton.device)), dim=-1)
                total[key] += float(log_q.neg_().add_(log_p).mul_(p).sum(-1).mean())
    return {key: max(value, 0.0) / len(base) for key, value in total.items()}


@contextlib.contextmanager
def _rounded_inputs(schemes: Mapping[nn.Linear, Scheme], scales: Mapping[nn.Linear, torch.Tensor]) -> Iterator[None]:
    """Linears whose scheme rounds activations get rounded inputs, static ones by `scales`."""
    handles = [
        linear.register_forward_pre_hook(_entrance(scheme.activations, scales.get(linear)))
        for linear, scheme in schemes.items()
        if scheme.activations is not None
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _entrance(
    activations: ActivationScheme, scale: torch.Tensor | None
) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    def enter(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (round_activations(arguments[0], activations, scale), *arguments[1:])

    return enter


def _schemes(skeleton: Skeleton, block: nn.Module) -> dict[nn.Linear, Scheme]:
    layout = skeleton.reader.layout
    found = {}
    for module in block.modules():
        if isinstance(module, nn.Linear) and layout is not None and origin(module).name in layout.linears:
            found[module] = layout.linears[origin(module).name]
    return found


def _scales(skeleton: Skeleton, block: nn.Module) -> dict[nn.Linear, torch.Tensor]:
    """The calibrated scales of inputs, where a checkpoint has them."""
    names = {linear: f"{origin(linear).name}.input_scale" for linear in _schemes(skeleton, block)}
    return {
        linear: skeleton.reader.tensor(name).to(skeleton.device)
        for linear, name in names.items()
        if skeleton.reader.has(name)
    }
