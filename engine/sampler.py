"""From logits to tokens. R rows, V vocabulary.

Greedy rows with nothing else asked take one argmax. Others are worked row by row in numpy, whose sort and partition of a
vocabulary are several times quicker than torch's on a CPU. Ties go to the lower id everywhere. A row's result depends on its
own logits, seed and position alone. A row without a finite best logit gives no token: it is Unusable, and its mates go on.
"""

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from narrowgauge.engine.logits import Row, apply_bias, apply_count_penalties, apply_repetition_penalty, mask_tokens
from narrowgauge.engine.request import PositionLogprobs, SamplingParams, TokenLogprob
from narrowgauge.engine.sequence import Sequence

Probabilities = npt.NDArray[np.float64]
_SEED_MASK = (1 << 64) - 1
_BROKEN = (
    "the model is numerically broken: its logits hold NaN or have no finite maximum; "
    "measure the checkpoint with `narrowgauge evaluate`"
)
_NOTHING_LEFT = "this request's logit_bias, min_tokens and stop_token_ids leave no token to choose"


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen token, and its logprobs where the request asks for them."""

    token_id: int
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Unusable:
    """Logits that no token or logprob can be taken from; `reason` is for whoever asked."""

    reason: str


BROKEN_MODEL = Unusable(_BROKEN)
"""What any NaN or overflow on the way to the logits comes to."""


def sample(logits_RV: torch.Tensor, sequences: Rows[Sequence]) -> list[Sampled | Unusable]:
    """One token for each row; row r continues sequences[r]."""
    rows_RV = logits_RV.float().cpu().numpy()
    greedy: list[int] = rows_RV.argmax(-1).tolist()  # numpy's argmax stops at a NaN, so that the best one shows it
    return [_sample_row(rows_RV[row], sequence, best=greedy[row]) for row, sequence in enumerate(sequences)]


def score(logits_RV: torch.Tensor, tokens: Rows[int], top: int) -> list[PositionLogprobs] | Unusable:
    """Logprobs of `tokens[r]` under row r, with the `top` best; Unusable where any row is."""
    rows_RV = logits_RV.float()
    norms: list[float] = torch.logsumexp(rows_RV.double(), -1).tolist()
    if not all(map(math.isfinite, norms)):
        return BROKEN_MODEL
    rows = rows_RV.cpu().numpy()
    return [_logprobs(rows[row], token, top, norm=norms[row]) for row, token in enumerate(tokens)]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position) alone: Philox4x64 (Salmon et al. 2011) with the seed as key, position as counter."""
    generator = np.random.Philox(
        key=np.array([seed & _SEED_MASK, 0], np.uint64), counter=np.array([position, 0, 0, 0], np.uint64)
    )
    return float(np.random.Generator(generator).random())


def probabilities(logits_V: Row, params: SamplingParams) -> Probabilities:
    """Unnormalised probabilities [V] after temperature, min_p, top_k and top_p (in this order); what is filtered out is 0."""
    scaled = logits_V.astype(np.float64) / params.temperature
    weights: Probabilities = np.exp(scaled - scaled.max())  # the best has weight 1
    if params.min_p > 0.0:
        weights[weights < params.min_p] = 0.0
    if 0 < params.top_k < weights.size:
        _keep_best(weights, params.top_k)
    if params.top_p < 1.0:
        descending = np.sort(weights)[::-1]
        reached = np.cumsum(descending)
        _keep_best(weights, int(np.searchsorted(reached, params.top_p * reached[-1])) + 1)
    return weights


def _sample_row(logits_V: Row, sequence: Sequence, *, best: int) -> Sampled | Unusable:
    params = sequence.request.params
    if not math.isfinite(logits_V[best]):
        return BROKEN_MODEL
    if params.plain_greedy:
        return Sampled(best)
    changed_V = _process(logits_V, sequence)
    if not math.isfinite(changed_V.max()):
        return Unusable(_NOTHING_LEFT)
    if params.greedy:
        token = int(changed_V.argmax())
    else:
        reached = np.cumsum(probabilities(changed_V, params))
        drawn = uniform(sequence.seed, len(sequence.tokens)) * reached[-1]
        token = int(
            np.searchsorted(reached, drawn, side="right")
        )  # the first whose sum exceeds it: never one of weight 0
    if params.logprobs is None:
        return Sampled(token)
    wide = logits_V.astype(np.float64)
    norm = float(wide.max() + np.log(np.exp(wide - wide.max()).sum()))
    return Sampled(token, _logprobs(logits_V, token, params.logprobs, norm=norm))


def _process(logits_V: Row, sequence: Sequence) -> Row:
    params = sequence.request.params
    changed = logits_V.copy()
    if params.repetition_penalty != 1.0:
        apply_repetition_penalty(changed, sequence.tokens, params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        output = sequence.tokens[sequence.prompt_tokens :]
        apply_count_penalties(changed, output, presence=params.presence_penalty, frequency=params.frequency_penalty)
    apply_bias(changed, params.logit_bias)
    if sequence.output_tokens < params.min_tokens:
        mask_tokens(changed, sequence.stop_ids)
    return changed


def _keep_best(weights_V: Probabilities, count: int) -> None:
    """Zeroes all but the `count` largest, ties by the lower id."""
    if count >= weights_V.size:
        return
    threshold = np.partition(weights_V, weights_V.size - count)[weights_V.size - count]
    above = int((weights_V > threshold).sum())
    tied = np.flatnonzero(weights_V == threshold)[count - above :]
    weights_V[weights_V < threshold] = 0.0
    weights_V[tied] = 0.0


def _logprobs(logits_V: Row, token: int, top: int, *, norm: float) -> PositionLogprobs:
    best: tuple[TokenLogprob, ...] = ()
    count = min(top, logits_V.size)
    if count:
        threshold = np.partition(logits_V, logits_V.size - count)[logits_V.size - count]
        ids = np.flatnonzero(logits_V >= threshold)
        ids = ids[np.argsort(-logits_V[ids], kind="stable")][:count]  # flatnonzero gave rising ids
        best = tuple(TokenLogprob(int(i), float(logits_V[i]) - norm) for i in ids)
    return PositionLogprobs(TokenLogprob(token, float(logits_V[token]) - norm), best)
