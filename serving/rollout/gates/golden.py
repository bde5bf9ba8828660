"""Golden prompts: does the new revision still predict what stable answers?

Stable answers each prompt greedily; both revisions then score the same token ids over HTTP. Figures, over the answer's
tokens: `top1`, the share where both would say the same next token, and `kl_top20`, KL(stable || canary) over the ids
that stand in both top-20 lists plus one class for all the rest. Merging classes can only lower a divergence, so it is a
lower bound of the full KL. Both get a percentile bootstrap interval over prompts (tokens of one prompt are not
independent), seeded, so that the same scores give the same verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from narrowgauge.serving.rollout.gates.base import Evidence, Probe, Verdict

_RESAMPLES = 2000
_FLOOR = 1e-9  # of a class's probability: log 0 is no figure


@dataclass(frozen=True, kw_only=True)
class Message:
    """One chat message."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, kw_only=True)
class GoldenPrompt:
    """A plain `prompt` or chat `messages`, and how many tokens of stable's answer are scored at most."""

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    max_tokens: int = 24

    def __post_init__(self) -> None:
        if bool(self.prompt) == bool(self.messages):
            raise ValueError("a golden prompt has either a 'prompt' or 'messages'")
        if not 1 <= self.max_tokens <= 1024:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be from 1 to 1024")


@dataclass(frozen=True, kw_only=True)
class PromptScore:
    """One prompt compared: answer tokens, those where both revisions agree on the top id, and the summed KL (nats)."""

    tokens: int
    agree: int
    kl_sum: float


@dataclass(frozen=True, kw_only=True)
class GoldenGate:
    """Passes when the whole interval clears the limits, fails when the whole interval misses one of them."""

    FILES: ClassVar[tuple[str, ...]] = ("prompts",)  # read by load_rollout_spec and put in place of the file's name

    name: Literal["golden"]
    prompts: tuple[GoldenPrompt, ...]
    top1_min: float = 0.6
    kl_max: float | None = None
    confidence: float = 0.95
    seed: int = 0

    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if len(self.prompts) < 2:
            raise ValueError(f"{len(self.prompts)} golden prompts; an interval over prompts needs at least 2")
        if not 0.0 < self.top1_min <= 1.0:
            raise ValueError(f"top1_min is {self.top1_min}; it must be above 0 and at most 1")
        if self.kl_max is not None and self.kl_max <= 0:
            raise ValueError(f"kl_max is {self.kl_max}; it must be above 0")
        if not 0.5 <= self.confidence < 1.0:
            raise ValueError(f"confidence is {self.confidence}; it must be at least 0.5 and below 1")

    async def collect(self, probe: Probe) -> tuple[PromptScore, ...]:
        """Scores every prompt on both revisions, one request at a time so that users hardly notice."""
        from narrowgauge.serving.rollout.scoring import score_prompts

        return await score_prompts(self.prompts, probe)

    def judge(self, evidence: Evidence) -> Verdict:
        """Judges the scores that `collect` brought; inconclusive before they are there or when an interval straddles."""
        scores: Sequence[PromptScore] | None = evidence.collected
        if not scores:
            reason = evidence.collect_error or "the golden prompts are being scored"
            return Verdict(gate=self.name, result="inconclusive", reason=reason)
        if not all(math.isfinite(score.kl_sum) for score in scores) or not any(score.tokens for score in scores):
            return Verdict(gate=self.name, result="inconclusive", reason="a golden score is not a number")
        top1 = bootstrap([(s.agree, s.tokens) for s in scores], confidence=self.confidence, seed=self.seed)
        kl = bootstrap([(s.kl_sum, s.tokens) for s in scores], confidence=self.confidence, seed=self.seed)
        figures = {"prompts": float(len(scores)), "tokens": float(sum(s.tokens for s in scores))}
        figures |= {"top1": top1[0], "top1_low": top1[1], "top1_high": top1[2]}
        figures |= {"kl_top20": kl[0], "kl_top20_low": kl[1], "kl_top20_high": kl[2]}
        reason = f"top-1 agreement {_interval(top1)}, wanted at least {self.top1_min:g}"
        # Where nothing limits it, it is left to the figures: two lists that share little have a small one, whatever is wrong.
        if self.kl_max is not None:
            reason += (
                f"; KL over the ids in both top 20s {_interval(kl)}, a lower bound, wanted at most {self.kl_max:g}"
            )
        kl_max = math.inf if self.kl_max is None else self.kl_max
        if top1[2] < self.top1_min or kl[1] > kl_max:
            return Verdict(gate=self.name, result="fail", reason=reason, figures=figures)
        if top1[1] >= self.top1_min and kl[2] <= kl_max:
            return Verdict(gate=self.name, result="pass", reason=reason, figures=figures)
        reason = f"{reason}: the interval straddles a limit, more prompts would tell"
        return Verdict(gate=self.name, result="inconclusive", reason=reason, figures=figures)


def bootstrap(
    parts: Sequence[tuple[float, int]], *, confidence: float, seed: int, resamples: int = _RESAMPLES
) -> tuple[float, float, float]:
    """(estimate, low, high) of sum(values) / sum(tokens) over prompts, by the percentile bootstrap (Efron 1979)."""
    import numpy as np

    values = np.asarray([value for value, _ in parts], dtype=np.float64)
    tokens = np.asarray([count for _, count in parts], dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(parts), size=(resamples, len(parts)))
    sums = tokens[picks].sum(axis=1)
    drawn = values[picks].sum(axis=1)[sums > 0] / sums[sums > 0]
    edge = 50.0 * (1.0 - confidence)
    low, high = np.percentile(drawn, [edge, 100.0 - edge])
    return float(values.sum() / tokens.sum()), float(low), float(high)


def compare(stable: Sequence[Mapping[int, float]], canary: Sequence[Mapping[int, float]]) -> PromptScore:
    """Compares two lists of top-20 log-probabilities (id -> nats), one entry an answer token, positions aligned."""
    agree = sum(_top(a) == _top(b) for a, b in zip(stable, canary, strict=True))
    kl_sum = sum(kl_coarse(a, b) for a, b in zip(stable, canary, strict=True))
    return PromptScore(tokens=len(stable), agree=agree, kl_sum=kl_sum)


def kl_coarse(stable: Mapping[int, float], canary: Mapping[int, float]) -> float:
    """KL(stable || canary) in nats over the ids in both lists and one class for the rest."""
    shared = stable.keys() & canary.keys()
    p = [math.exp(stable[token]) for token in shared]
    q = [math.exp(canary[token]) for token in shared]
    p.append(1.0 - sum(p))
    q.append(1.0 - sum(q))
    pairs = ((max(a, _FLOOR), max(b, _FLOOR)) for a, b in zip(p, q, strict=True))
    return max(0.0, math.fsum(a * math.log(a / b) for a, b in pairs))


def top_ids(logprobs: Mapping[int, float], *, actual: int, limit: int = 20) -> dict[int, float]:
    """The `limit` likeliest ids. The actual token may stand there as one entry more and is dropped before ranking."""
    kept = dict(logprobs)
    if len(kept) > limit:
        kept.pop(actual, None)
    ranked = sorted(kept.items(), key=lambda entry: (-entry[1], entry[0]))
    return dict(ranked[:limit])


def _top(logprobs: Mapping[int, float]) -> int:
    return min(logprobs, key=lambda token: (-logprobs[token], token))


def _interval(figures: tuple[float, float, float]) -> str:
    return "{:.3g} [{:.3g}, {:.3g}]".format(*figures)


def parse_scores(choice: Mapping[str, Any], *, prompt_tokens: int) -> tuple[dict[int, float], ...]:
    """The top-20 lists of the answer's tokens from one choice of `/v1/completions` with echo and tokens as ids.

    `prompt_tokens` positions come before the answer. Raises ValueError for an engine that does not return ids.
    """
    logprobs = choice.get("logprobs") or {}
    tokens, tops = logprobs.get("tokens") or (), logprobs.get("top_logprobs") or ()
    if len(tokens) != len(tops) or len(tokens) <= prompt_tokens:
        raise ValueError(f"{len(tokens)} scored tokens for {prompt_tokens} prompt tokens")
    scores = []
    for token, top in list(zip(tokens, tops, strict=True))[prompt_tokens:]:
        if not top:
            raise ValueError("a position without logprobs")
        scores.append(top_ids({_id(key): float(value) for key, value in top.items()}, actual=_id(token)))
    return tuple(scores)


def answer_ids(choice: Mapping[str, Any]) -> tuple[int, ...]:
    """The generated ids of one choice answered with `return_tokens_as_token_ids`. Raises ValueError without ids."""
    return tuple(_id(token) for token in (choice.get("logprobs") or {}).get("tokens") or ())


def _id(key: str) -> int:
    name, _, number = key.partition(":")
    if name != "token_id" or not number.isdigit():
        raise ValueError(f"the engine names tokens by text ({key!r}), not as token_id:N")
    return int(number)
