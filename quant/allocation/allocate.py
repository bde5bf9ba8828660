"""Mixed precision: which Scheme each unit of a model gets, so that a budget of bits buys the least divergence.

Units are what serving engines run as one (q, k, v; o; gate, up; down; see fused.py). What each costs in KL under each of its
candidates is measured (sensitivity.py), summed as if units did not meddle with one another, and minimized under the budget
(knapsack.py). How far the sum is from the truth is measured afterwards and told beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from narrowgauge.quant.allocation.knapsack import BudgetTooSmall, Option, choose
from narrowgauge.quant.allocation.sensitivity import Unit, measure, measured_options, total_kl
from narrowgauge.quant.calibration import CalibrationSet
from narrowgauge.quant.formats.base import get_format
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.formats.scheme import Scheme
from narrowgauge.quant.model.blocks import Skeleton
from narrowgauge.quant.model.fused import units
from narrowgauge.quant.plan import allotted_names, counted_bits, fitting, scale_bytes
from narrowgauge.quant.recipe import Recipe, RecipeError, scheme_for

_DIGITS = 4
"""Significant digits of a KL in a report: more would differ with the order of a sum."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to treat a unit: codes, scales and zero points of its Linears in bytes, and its KL in nats a token."""

    scheme: Scheme
    size_bytes: int
    kl: float
    measured: bool


@dataclass(frozen=True, kw_only=True)
class UnitChoice:
    """What a unit got, and between what it was chosen. `kl` is what it adds to the model's, alone, in nats a token."""

    unit: str
    layers: tuple[str, ...]
    scheme: Scheme
    kl: float
    choices: tuple[Choice, ...]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A Scheme for each unit. `bits` as target_bits counts them; `predicted_kl` is the sum of the units', nats a token."""

    units: tuple[UnitChoice, ...]
    predicted_kl: float
    bits: float

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Scheme by layer name."""
        return {layer: unit.scheme for unit in self.units for layer in unit.layers}


def allocate(
    recipe: Recipe,
    skeleton: Skeleton,
    calibration: CalibrationSet,
    *,
    progress: Callable[[str], None] | None = None,
) -> Allocation:
    """Measures and chooses. Deterministic: equal recipe, model, tokens and machine give the equal allocation.

    Units are rounded by the recipe's rounder, without its smoothers. `progress` is told what is at work. Raises RecipeError
    where the budget is below the smallest candidates, or no candidate fits a layer.
    """
    ledger = _Ledger(recipe, skeleton)
    members = ledger.units()
    precise = _precise(skeleton.reader, skeleton.device)
    found = measure(members, recipe.rounder, precise, ids=calibration.ids, progress=progress or (lambda _: None))
    table = [
        [
            Choice(
                scheme=option,
                size_bytes=-(-ledger.bits(unit.layers, option) // 8),
                kl=_rounded(kl),
                measured=option in unit.measured,
            )
            for option, kl in zip(unit.options, found[unit.name], strict=True)
        ]
        for unit in members
    ]
    chosen = ledger.choose(members, table)
    picked = tuple(
        UnitChoice(unit=unit.name, layers=unit.layers, scheme=row[at].scheme, kl=row[at].kl, choices=tuple(row))
        for unit, row, at in zip(members, table, chosen, strict=True)
    )
    schemes = {name: unit.scheme for unit in picked for name in unit.layers}
    return Allocation(
        units=picked,
        predicted_kl=_rounded(sum(unit.kl for unit in picked)),
        bits=round(average_bits(schemes | ledger.fixed, skeleton), 6),
    )


def measure_total_kl(
    allocation: Allocation, skeleton: Skeleton, checkpoint: CheckpointReader, *, calibration: CalibrationSet
) -> float:
    """The KL of the whole quantized model in nats a token, on the tokens that the units' were measured on.

    `skeleton` is the base model's; `checkpoint` holds config.json and all weights of the quantized one.
    """
    base, quantized = _precise(skeleton.reader, skeleton.device), _precise(checkpoint, skeleton.device)
    measured = sum(choice.measured for unit in allocation.units for choice in unit.choices)
    return _rounded(total_kl(base, quantized, calibration.ids, units=measured))


def _precise(reader: CheckpointReader, device: torch.device) -> Skeleton:
    """In float32 whatever the run computes in: what rounding to bfloat16 does to the answers is of the size of what one
    unit's 4 bits do, and would be taken for it."""
    return Skeleton(reader, device=device, dtype=torch.float32)


def average_bits(schemes: Mapping[str, Scheme], skeleton: Skeleton) -> float:
    """Bits a weight over the Linears in `schemes`, as target_bits counts them."""
    shapes = skeleton.linears()
    bits = sum(counted_bits(shapes[name], scheme, scale_bytes(skeleton, name)) for name, scheme in schemes.items())
    return bits / sum(shapes[name][0] * shapes[name][1] for name in schemes)


class _Ledger:
    """What the units cost and what there is to spend: bits for target_bits, bytes of the weight files for max_bytes."""

    def __init__(self, recipe: Recipe, skeleton: Skeleton) -> None:
        self._recipe = recipe
        self._format = get_format(recipe.format)
        self._all = skeleton.linears()
        self._own = allotted_names(recipe, skeleton)
        if not self._own:
            raise RecipeError(
                "rules: speak of every Linear, so that nothing is left for the budget; give a scheme instead"
            )
        by_rule = {name: scheme_for(recipe, name) for name in self._all}
        self.fixed = {name: scheme for name, scheme in by_rule.items() if scheme is not None}
        self._widths = {name: scale_bytes(skeleton, name) for name in (*self._own, *self.fixed)}
        self._size = {name: self._all[name][0] * self._all[name][1] for name in self._widths}
        whole = sum(self._size[name] * self._widths[name] for name in self._widths)
        self._rest_bytes = skeleton.reader.size_bytes - whole

    def bits(self, layers: Sequence[str], scheme: Scheme) -> int:
        """Bits of codes, scales and zero points."""
        return sum(counted_bits(self._all[name], scheme, self._widths[name]) for name in layers)

    def units(self) -> list[Unit]:
        """The units with the candidates that fit all of their Linears. Raises RecipeError where none does."""
        found = []
        for name, layers in units(self._own).items():
            options = fitting(self._recipe, layers[0], self._all[layers[0]])
            for other in layers[1:]:
                also = fitting(self._recipe, other, self._all[other])
                options = tuple(option for option in options if option in also)
            if not options:
                raise RecipeError(
                    f"candidates: none fits {layers[0]} and those that engines run as one with it; name another candidate"
                )
            weights = sum(self._size[layer] for layer in layers)
            costs = [self.bits(layers, option) / weights for option in options]
            measured = measured_options(options, costs, self._average())
            found.append(Unit(name=name, layers=layers, options=options, measured=measured))
        return found

    def choose(self, members: Sequence[Unit], table: Sequence[Sequence[Choice]]) -> tuple[int, ...]:
        """The index of the choice for each unit. Raises RecipeError where the budget is below the smallest."""
        options = [
            [Option(self._cost(unit.layers, choice.scheme), choice.kl) for choice in row]
            for unit, row in zip(members, table, strict=True)
        ]
        budget = self._budget()
        try:
            return choose(options, budget)
        except BudgetTooSmall as error:
            missing = error.least - budget
            if self._recipe.max_bytes is not None:
                least = f"max_bytes: {self._recipe.max_bytes:,} is {missing:,} less"
            else:
                least = f"target_bits: {self._recipe.target_bits:g} is {missing / sum(self._size.values()):.3f} less"
            raise RecipeError(f"{least} than the smallest candidates take") from None

    def _budget(self) -> int:
        fixed = sum(self._cost([name], scheme) for name, scheme in self.fixed.items())
        if self._recipe.target_bits is not None:
            return int(self._recipe.target_bits * sum(self._size.values())) - fixed
        assert self._recipe.max_bytes is not None
        return self._recipe.max_bytes - self._rest_bytes - fixed

    def _cost(self, layers: Sequence[str], scheme: Scheme) -> int:
        if self._recipe.target_bits is not None:
            return self.bits(layers, scheme)
        return sum(
            self._format.stored_bytes(self._all[name], scheme, self._widths[name]) + _header_bytes(name)
            for name in layers
        )

    def _average(self) -> float:
        """Bits a weight that the budget allows, roughly."""
        if self._recipe.target_bits is not None:
            return self._recipe.target_bits
        assert self._recipe.max_bytes is not None
        return 8 * (self._recipe.max_bytes - self._rest_bytes) / sum(self._size.values())


def _header_bytes(name: str) -> int:
    """At most what a file's header says of a Linear's tensors: four entries of a name, dtype, shape and two offsets."""
    return 4 * (len(name) + 130)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
