"""One choice for each unit, so that the summed loss is least and the summed cost keeps a budget. Pure numbers.

The multiple-choice knapsack problem, solved by dynamic programming over cells of cost (Kellerer, Pferschy, Pisinger,
"Knapsack Problems", 2004, chapter 11).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_CELLS = 1 << 16
"""Cells of the table. Layers of a model repeat, so the costs' common divisor is large and the answer is nearly always
exact; where it is not, costs are rounded up to whole cells and at most one cell for each unit is left unspent."""


@dataclass(frozen=True)
class Option:
    """One way to treat a unit: `cost` in any whole unit (bits, bytes), `loss` to be made small."""

    cost: int
    loss: float


class BudgetTooSmall(ValueError):
    """Even the cheapest options cost more than the budget; `least` is what they cost."""

    def __init__(self, least: int, budget: int) -> None:
        super().__init__(f"the cheapest options cost {least}, which is more than {budget}")
        self.least = least


def choose(units: Sequence[Sequence[Option]], budget: int) -> tuple[int, ...]:
    """The index of the option for each unit. Among equal losses the cheaper choice, then the earlier option.

    Exact where the costs' common divisor is at least budget / MOST_CELLS. Raises BudgetTooSmall.
    """
    least = [min(option.cost for option in options) for options in units]
    spare = budget - sum(least)
    if spare < 0:
        raise BudgetTooSmall(sum(least), budget)
    extra = [[option.cost - floor for option in options] for options, floor in zip(units, least, strict=True)]
    dearest = sum(max(costs) for costs in extra)
    spare = min(spare, dearest)
    divisor = math.gcd(*(cost for costs in extra for cost in costs)) or 1
    cell = max(divisor, -(-spare // MOST_CELLS))
    cells = spare // cell
    # best[c]: least loss of the units so far with at most c cells spent; taken[u][c]: the option that gives it.
    best = np.zeros(cells + 1)
    taken = np.zeros((len(units), cells + 1), dtype=np.int16)
    for position, (options, costs) in enumerate(zip(units, extra, strict=True)):
        fresh = np.full(cells + 1, np.inf)
        for index in sorted(range(len(options)), key=lambda index: costs[index]):
            shift = -(-costs[index] // cell)
            if shift > cells:
                continue
            loss = best[: cells + 1 - shift] + options[index].loss
            better = loss < fresh[shift:]
            fresh[shift:][better] = loss[better]
            taken[position, shift:][better] = index
        best = fresh
    # The first cell with the least loss spends least.
    at = int(np.flatnonzero(best == best[-1])[0])
    chosen = [0] * len(units)
    for position in range(len(units) - 1, -1, -1):
        chosen[position] = int(taken[position, at])
        at -= -(-extra[position][chosen[position]] // cell)
    return tuple(chosen)
