"""Channel scales that smoothing (AWQ, SmoothQuant) left in a candidate's weights, found by comparing them with the base's.

No file holds them: a smoothed Linear is Q ≈ diag(r) W diag(s), where s multiplies its input channels (what feeds it was
divided by them), and 1/r divided its output channels (what it feeds was multiplied by them). Shapes: O, I as ever.
"""

from dataclasses import dataclass, replace

import torch

_ERRORS = 3.0
_LEAST = 0.01
"""Scales count as real where the median channel differs from its peers by this many standard errors, and by this much."""
_ROUNDS = 3


@dataclass(frozen=True)
class Scales:
    """Factors of output channels `rows` [O] and input channels `columns` [I]; ones where nothing was smoothed.

    Where both are smoothed, a common factor can stand in either: `settled` finds it from outputs, once.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    open: bool = False

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """The base's weight [O, I] in the candidate's terms."""
        return weight * self.rows[:, None] * self.columns

    def restore(self, output: torch.Tensor) -> torch.Tensor:
        """A candidate's output [..., O] in the base's terms."""
        return output / self.rows

    def settled(self, base_output: torch.Tensor, output: torch.Tensor) -> "Scales":
        """Fixes the common factor by the base's output [..., O] and the candidate's own on the same tokens."""
        if not self.open:
            return self
        restored = self.restore(output)
        factor = (restored * restored).sum() / (restored * base_output).sum().clamp(min=torch.finfo(torch.float32).tiny)
        return replace(self, rows=self.rows * factor, columns=self.columns / factor, open=False)


def fit_scales(base: torch.Tensor, candidate: torch.Tensor) -> Scales:
    """The scales of a candidate's weight [O, I] against the base's, by least squares over rows and columns in turn.

    Rounding alone moves a channel's fit by its standard error and no more; only what stands out of that counts.
    """
    ones_O, ones_I = base.new_ones(base.shape[0]), base.new_ones(base.shape[1])
    rows, columns = ones_O, ones_I
    for _ in range(_ROUNDS):
        columns, column_error = _fit(base * rows[:, None], candidate)
        rows, row_error = _fit((base * columns).t(), candidate.t())
    uneven_columns, uneven_rows = _uneven(columns, column_error), _uneven(rows, row_error)
    if uneven_columns and uneven_rows:
        return Scales(rows, columns, open=True)
    if uneven_columns:
        return Scales(ones_O, _fit(base, candidate)[0])
    return Scales(_fit(base.t(), candidate.t())[0] if uneven_rows else ones_O, ones_I)


def _uneven(fit: torch.Tensor, error: torch.Tensor) -> bool:
    """Whether the channels' factors differ among each other by more than rounding explains."""
    away = (fit / fit.median() - 1).abs()
    return bool((away / error).median() > _ERRORS) and bool(away.median() > _LEAST)


def _fit(base: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per column: the factor from base to candidate by least squares, and its standard error. A column of zeros has 1."""
    square = (base * base).sum(0)
    dead = square == 0
    fit = torch.where(dead, 1.0, (base * candidate).sum(0) / square.masked_fill(dead, 1.0))
    residual = (candidate - base * fit).square().sum(0)
    error = (residual / max(base.shape[0] - 1, 1) / square.masked_fill(dead, 1.0)).sqrt()
    return fit, error.clamp(min=torch.finfo(torch.float32).eps)
