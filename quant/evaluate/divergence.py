"""How far a candidate's distributions lie from the base's, token by token over the full vocabulary.

KL(base‖candidate) = Σ_v p_v (log p_v - log q_v), in nats; p is the base. Both models' logits of a window are read once,
in chunks of rows, and only a few numbers a token are kept: nothing of the size of the vocabulary outlives its window.
"""

from dataclasses import dataclass

import numpy as np
import torch

from narrowgauge.quant.evaluate.perplexity import count_scored, row_chunks
from narrowgauge.quant.evaluate.report import Histogram


@dataclass(frozen=True, kw_only=True)
class TokenComparison:
    """One value for each scored position, [N]: losses and KL in nats, top-1 agreement, probability of the right token."""

    base_loss: torch.Tensor
    candidate_loss: torch.Tensor
    kl: torch.Tensor
    agrees: torch.Tensor
    """bool: both models rank the same token first (among equals the lower id)."""

    @property
    def delta_p(self) -> torch.Tensor:
        """q - p of the right token, [N]."""
        return torch.exp(-self.candidate_loss) - torch.exp(-self.base_loss)


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The figures over all scored tokens. KL in nats; `top1` is a share; `delta_p_rms` a probability."""

    kl_mean: float
    kl_median: float
    kl_p99: float
    kl_max: float
    top1: float
    delta_p_rms: float


def compare(
    base: torch.Tensor, candidate: torch.Tensor, ids: torch.Tensor, *, first: torch.Tensor | None = None
) -> TokenComparison:
    """Compares float32 logits [S, L, V] of the same ids [S, L] at the N scored positions (`first`: see perplexity.py)."""
    assert base.shape == candidate.shape
    assert base.shape[:2] == ids.shape
    count = count_scored(ids, first)
    base_loss, candidate_loss, kl = torch.empty(count), torch.empty(count), torch.empty(count)
    agrees = torch.empty(count, dtype=torch.bool)
    for chunk in row_chunks(base, ids, first):
        log_p = torch.log_softmax(base[chunk.window, chunk.rows], dim=-1)
        log_q = torch.log_softmax(candidate[chunk.window, chunk.rows].to(base.device), dim=-1)
        base_loss[chunk.out] = -log_p.gather(1, chunk.targets).squeeze(1).cpu()
        candidate_loss[chunk.out] = -log_q.gather(1, chunk.targets).squeeze(1).cpu()
        agrees[chunk.out] = (log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).cpu()
        log_ratio = log_q.neg_().add_(log_p)
        kl[chunk.out] = log_ratio.mul_(log_p.exp_()).sum(dim=-1).cpu()
    # Rounding leaves nearly equal distributions at ±1e-7, and a KL is never negative (clamp keeps a NaN).
    return TokenComparison(base_loss=base_loss, candidate_loss=candidate_loss, kl=kl.clamp_(min=0), agrees=agrees)


def join(parts: list[TokenComparison]) -> TokenComparison:
    """Puts the comparisons of several batches of windows behind one another."""
    return TokenComparison(
        base_loss=torch.cat([part.base_loss for part in parts]),
        candidate_loss=torch.cat([part.candidate_loss for part in parts]),
        kl=torch.cat([part.kl for part in parts]),
        agrees=torch.cat([part.agrees for part in parts]),
    )


def summarize(comparison: TokenComparison) -> Divergence:
    """The figures over all tokens, in float64; quantiles interpolate linearly; one NaN makes every KL figure NaN."""
    kl = comparison.kl.double().numpy()
    median, p99 = np.quantile(kl, [0.5, 0.99])
    return Divergence(
        kl_mean=float(kl.mean()),
        kl_median=float(median),
        kl_p99=float(p99),
        kl_max=float(kl.max()),
        top1=comparison.agrees.double().mean().item(),
        delta_p_rms=comparison.delta_p.double().square().mean().sqrt().item(),
    )


_EDGES = tuple(float(f"{value:.6g}") for value in np.logspace(-7, 2, 37))
"""Four bins a decade: below lies what float32 cannot tell from nothing, above what no vocabulary gives."""


def histogram(comparison: TokenComparison) -> Histogram:
    """The tokens' KL in bins of equal width in its logarithm. NaN counts in none of them."""
    kl = comparison.kl.double().numpy()
    counts = np.histogram(kl[~np.isnan(kl)], bins=[-np.inf, *_EDGES, np.inf])[0]
    return Histogram(edges=_EDGES, counts=tuple(int(count) for count in counts))
