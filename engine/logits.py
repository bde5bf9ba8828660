"""What changes the logits of one row before a token is chosen. numpy, in place. V vocabulary."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
_LARGEST = float(np.finfo(np.float32).max)


def apply_repetition_penalty(logits_V: Row, tokens: Sequence[int], penalty: float) -> None:
    """Divides the positive logits of every token seen (prompt or output) by `penalty`, multiplies the negative ones.

    Keskar et al. 2019 (CTRL), as transformers' RepetitionPenaltyLogitsProcessor.
    """
    seen = np.unique(np.asarray(tokens, dtype=np.int64))
    values = logits_V[seen]
    logits_V[seen] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))


def apply_count_penalties(logits_V: Row, output: Sequence[int], *, presence: float, frequency: float) -> None:
    """Subtracts `presence` once and `frequency` for each time from tokens generated so far (OpenAI's definition)."""
    if not output:
        return
    seen, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
    logits_V[seen] -= np.float32(presence) + np.float32(frequency) * counts.astype(np.float32)


def apply_bias(logits_V: Row, bias: Mapping[int, float]) -> None:
    """Adds each token's bias, at most what a float32 can hold."""
    if bias:
        values = np.clip(np.fromiter(bias.values(), np.float64), -_LARGEST, _LARGEST)
        logits_V[np.fromiter(bias.keys(), np.int64)] += values.astype(np.float32)


def mask_tokens(logits_V: Row, tokens: Collection[int]) -> None:
    """Makes tokens impossible."""
    if tokens:
        logits_V[np.fromiter(tokens, np.int64)] = -np.inf
