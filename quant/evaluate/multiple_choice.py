"""Multiple-choice tasks through lm-eval, with whatever gives logits as the model.

lm-eval owns the tasks, their prompts and their metrics; here stands only what it asks of a model: how likely a continuation
is after a context. Legend: S rows, L tokens a row, V vocabulary.
"""

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowgauge.quant.evaluate.perplexity import LogitsSource
from narrowgauge.quant.evaluate.report import TaskScore
from narrowgauge.quant.evaluate.windows import EvaluationError
from narrowgauge.quant.formats.read import nearest

BATCH_TOKENS = 4096
"""Tokens of the rows that go through the model at a time."""


@dataclass(frozen=True)
class TaskRequest:
    """Which lm-eval tasks, where tasks of one's own stand, questions a task (None: all), examples before each question
    (None: as the task says), and the longest row in tokens: longer ones lose the beginning of their context."""

    names: tuple[str, ...]
    path: Path | None = None
    limit: int | None = None
    few_shot: int | None = None
    longest: int = 2048


def check_installed() -> None:
    """Raises EvaluationError, with the command that installs it, where lm-eval is missing."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise EvaluationError("tasks: need lm-eval; run: pip install 'narrowgauge[lm-eval]'") from None


def run_tasks(
    candidate: LogitsSource, base: LogitsSource | None, tokenizer: Any, *, request: TaskRequest
) -> tuple[TaskScore, ...]:
    """Every metric of every task, of the candidate and beside it of the base. Raises EvaluationError: lm-eval is missing, a
    task is unknown, its questions cannot be had, or it wants text to be generated."""
    check_installed()
    judged = _results(candidate, tokenizer, request)
    beside = _results(base, tokenizer, request) if base is not None else None
    return tuple(_scores(judged, beside))


def loglikelihoods(
    source: LogitsSource,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    longest: int = 2048,
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[float, bool]]:
    """For each (context, continuation), ids of at least one token each: the sum of the continuation's log-probabilities in
    nats, and whether each of its tokens is the likeliest.

    Rows of one length go together, so nothing is padded; pairs that differ in their last token alone share a row.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(pairs):
        if not context or not continuation or len(continuation) > longest:
            raise EvaluationError(f"a continuation of {len(continuation)} tokens after {len(context)} cannot be scored")
        rows.setdefault(tuple([*context, *continuation][-longest - 1 : -1]), []).append(index)
    results: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
    done = 0
    for batch in _equally_long(list(rows), batch_tokens):
        logits = source.logits(torch.tensor(batch, dtype=torch.int64))
        for row, found in zip(batch, logits, strict=True):
            for index in rows[row]:
                results[index] = _score(found, pairs[index][1])
        done += len(batch)
        if progress is not None:
            progress(done, len(rows))
    return results


def _score(logits: torch.Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
    """logits [L, V] whose last rows predict the continuation."""
    targets = torch.tensor(continuation, device=logits.device)
    log_p = torch.log_softmax(logits[-len(continuation) :], dim=-1)
    likely = bool((log_p.argmax(dim=-1) == targets).all())
    return log_p.gather(1, targets[:, None]).double().sum().item(), likely


def _equally_long(rows: list[tuple[int, ...]], batch_tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """The rows in batches of one length each, the longest first: what does not fit memory shows at once."""
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for row in rows:
        by_length.setdefault(len(row), []).append(row)
    for length, equal in sorted(by_length.items(), reverse=True):
        size = max(1, batch_tokens // length)
        for start in range(0, len(equal), size):
            yield equal[start : start + size]


def _results(source: LogitsSource, tokenizer: Any, request: TaskRequest) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if request.path is None else str(request.path))
    if unknown := [name for name in request.names if name not in manager.all_tasks]:
        raise EvaluationError(f"tasks: lm-eval knows no {unknown[0]!r}{nearest(unknown[0], manager.all_tasks)}")
    try:
        found: dict[str, Any] | None = lm_eval.simple_evaluate(
            model=_adapter(source, tokenizer, request.longest),
            tasks=list(request.names),
            num_fewshot=request.few_shot,
            limit=request.limit,
            task_manager=manager,
            log_samples=False,
        )
    except OSError as error:  # what datasets and the hub's client raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EvaluationError(f"tasks: the questions of {', '.join(request.names)} cannot be had: {reason}") from None
    assert found is not None
    return found


def _adapter(source: LogitsSource, tokenizer: Any, longest: int) -> Any:
    """`source` as lm-eval's model. Texts are tokenized as its own HFLM does, so that figures can be compared."""
    from lm_eval.api.model import TemplateLM

    class LogitsSourceLM(TemplateLM):  # type: ignore[misc]
        tokenizer_name = str(getattr(tokenizer, "name_or_path", ""))

        @property
        def eot_token_id(self) -> int:
            return int(tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            return int(tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **named: Any) -> list[int]:
            if add_special_tokens is None:
                add_special_tokens = not string.startswith(tokenizer.decode(self.prefix_token_id))
            return list(tokenizer.encode(string, add_special_tokens=add_special_tokens))

        def _loglikelihood_tokens(self, requests: list[Any], **named: Any) -> list[tuple[float, bool]]:
            return loglikelihoods(source, [(context, answer) for _, context, answer in requests], longest=longest)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            raise EvaluationError("tasks: scoring whole texts is what --text does; name multiple-choice tasks")

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            raise EvaluationError("tasks: a task wants text to be generated; name multiple-choice tasks")

    return LogitsSourceLM()


def _scores(judged: dict[str, Any], beside: dict[str, Any] | None) -> Iterator[TaskScore]:
    library = f"lm-eval {importlib.metadata.version('lm-eval')}"
    for task, metrics in sorted(judged["results"].items()):
        others = beside["results"][task] if beside else {}
        for key, value in metrics.items():
            metric, _, chosen = key.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, float) or not chosen:
                continue
            spread = f"{metric}_stderr,{chosen}"
            yield TaskScore(
                task=task,
                metric=metric if chosen == "none" else f"{metric} ({chosen})",
                value=value,
                stderr=_number(metrics.get(spread)),
                base_value=_number(others.get(key)),
                base_stderr=_number(others.get(spread)),
                samples=int(judged["n-samples"].get(task, {}).get("effective", 0)),
                few_shot=int(judged["n-shot"].get(task, 0)),
                version=f"{judged['versions'].get(task)}, {library}",
            )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, float) and value == value else None
