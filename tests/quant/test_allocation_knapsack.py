"""The knapsack: the answer of an exhaustive search and of scipy's integer programming, and the budget always kept."""

import itertools

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from narrowgauge.quant.allocation import knapsack
from narrowgauge.quant.allocation.knapsack import BudgetTooSmall, Option, choose


def _units(seed: int, count: int, options: int = 4) -> list[list[Option]]:
    random = np.random.default_rng(seed)
    return [
        [
            Option(int(cost), float(loss))
            for cost, loss in zip(random.integers(1, 60, options), random.random(options), strict=True)
        ]
        for _ in range(count)
    ]


def _total(units: list[list[Option]], chosen: tuple[int, ...]) -> tuple[int, float]:
    picked = [options[index] for options, index in zip(units, chosen, strict=True)]
    return sum(option.cost for option in picked), sum(option.loss for option in picked)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_choice_within_the_budget_loses_less(seed):
    units = _units(seed, 5)
    least = sum(min(option.cost for option in options) for options in units)
    for budget in (least, least + 7, least + 40, 1000):
        cost, loss = _total(units, choose(units, budget))
        assert cost <= budget
        every = itertools.product(*(range(len(options)) for options in units))
        best = min(total[1] for chosen in every if (total := _total(units, chosen))[0] <= budget)
        assert loss == pytest.approx(best)


def test_a_model_of_many_layers_gets_the_answer_of_integer_programming():
    units = _units(7, 120)
    budget = 2500
    cost = np.array([option.cost for options in units for option in options])
    loss = np.array([option.loss for options in units for option in options])
    one = np.kron(np.eye(len(units)), np.ones(4))
    constraints = [LinearConstraint(one, 1, 1), LinearConstraint(cost, 0, budget)]
    exact = milp(loss, constraints=constraints, integrality=np.ones(len(loss)), bounds=Bounds(0, 1))
    spent, lost = _total(units, choose(units, budget))
    assert spent <= budget
    assert lost == pytest.approx(exact.fun)


def test_costs_without_a_common_divisor_are_rounded_up_and_the_budget_holds(monkeypatch):
    units = [[Option(10_007 * (1 + index), 1.0 / (1 + index)) for index in range(4)] for _ in range(30)]
    units[0][1] = Option(20_011, 0.5)
    budget = 600_000
    exact = _total(units, choose(units, budget))
    monkeypatch.setattr(knapsack, "MOST_CELLS", 500)
    rough = _total(units, choose(units, budget))
    assert rough[0] <= budget
    assert exact[1] <= rough[1] <= 1.1 * exact[1]


def test_equal_losses_take_the_cheaper_option():
    assert choose([[Option(9, 1.0), Option(3, 1.0)], [Option(5, 0.0), Option(2, 2.0)]], 100) == (1, 0)


def test_a_budget_below_the_cheapest_is_refused_with_what_it_would_take():
    with pytest.raises(BudgetTooSmall) as caught:
        choose([[Option(9, 1.0), Option(3, 1.0)], [Option(5, 0.0)]], 7)
    assert caught.value.least == 8
