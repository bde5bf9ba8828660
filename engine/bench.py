"""Decode speed on a CPU: ours and transformers' generate on the same checkpoint, in turns, in one process.

A rate is tokens per second after the first token, over all sequences of the batch; rows hold medians and extremes over the
rounds. Turns keep what disturbs the machine from falling on one side only.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from narrowgauge.engine.config import EngineConfig
from narrowgauge.engine.llm_engine import LLMEngine
from narrowgauge.engine.request import Request, SamplingParams
from narrowgauge.engine.tokenizer import Tokenizer
from narrowgauge.quant.formats.checkpoint import CheckpointReader

PROMPT = "The history of the railways begins with"
BATCHES = (1, 8)
PEER = "transformers"
PACKAGES = ("torch", "transformers", "compressed-tensors", "numpy")
"""Whose versions a results file names."""

Rate = Callable[[int], float]
"""Batch size -> tokens per second."""


class BenchError(ValueError):
    """A measurement that cannot be made here; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class BenchSpec:
    """What to measure: `tokens` new ones a sequence, `rounds` turns, on `threads` CPU threads; peer or none."""

    threads: int = 2
    tokens: int = 128
    rounds: int = 3
    against: str | None = PEER


def bench_engine(
    model: Path, quantized: Path | None, spec: BenchSpec, *, progress: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Result rows `<mode>/b1` and `<mode>/b8` for the model and, if given, its quantized checkpoint.

    Raises BenchError where the peer is unknown or missing, FormatError and friends for a checkpoint that cannot be read.
    """
    if spec.against not in (None, PEER):
        raise BenchError(f"--against {spec.against}: unknown peer; known: {PEER}")
    rows: list[dict[str, Any]] = []
    for folder in (model, quantized):
        if folder is not None:
            rows += _bench_checkpoint(folder, spec, progress)
    return rows


def _bench_checkpoint(folder: Path, spec: BenchSpec, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    torch.set_num_threads(spec.threads)
    ids = tuple(Tokenizer.from_folder(folder).encode(PROMPT))
    engine = LLMEngine(
        EngineConfig(
            model=folder, threads=spec.threads, max_num_seqs=max(BATCHES), max_model_len=len(ids) + spec.tokens
        ),
        eos_ids=frozenset(),
    )
    mode = _mode(folder, engine.runner.dtype)
    sides: dict[str, Rate] = {"ours": partial(_our_rate, engine, ids, tokens=spec.tokens)}
    if spec.against:
        sides[PEER] = _transformers_rate(folder, ids, spec.tokens, dtype=engine.runner.dtype)
    measured: dict[tuple[str, int], list[float]] = {(side, batch): [] for side in sides for batch in BATCHES}
    for turn in range(spec.rounds + 1):
        for batch in BATCHES:
            for side, rate in sides.items():
                value = rate(batch)
                if turn:  # the first warms up
                    measured[side, batch].append(value)
                progress(f"{mode}/b{batch} {side}: {value:.1f} tok/s{'' if turn else ' (warm-up)'}")
    return [_row(f"{mode}/b{batch}", measured["ours", batch], measured.get((PEER, batch))) for batch in BATCHES]


def _our_rate(engine: LLMEngine, ids: tuple[int, ...], batch: int, *, tokens: int) -> float:
    for index in range(batch):
        params = SamplingParams(max_tokens=tokens, temperature=0.0)
        engine.add_request(Request(request_id=str(index), prompt_ids=ids, params=params))
    begun: set[str] = set()
    counted, started, now = 0, 0.0, 0.0
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        if len(begun) == batch:
            counted += len(outputs)
        else:
            begun.update(output.request_id for output in outputs)
            started = now
    return counted / (now - started)


def _transformers_rate(folder: Path, ids: tuple[int, ...], tokens: int, *, dtype: torch.dtype) -> Rate:
    from transformers import AutoModelForCausalLM

    if CheckpointReader(folder).layout is not None and not _installed("compressed-tensors"):
        raise BenchError(
            "transformers reads this checkpoint only with the package compressed-tensors: install it, or --against none"
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def rate(batch: int) -> float:
        times: list[float] = []

        def note_time(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(batch, dtype=torch.bool)

        prompt = torch.tensor([ids] * batch)
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[note_time],
        )
        return batch * (len(times) - 1) / (times[-1] - times[0])

    return rate


def _row(name: str, ours: list[float], peer: list[float] | None) -> dict[str, Any]:
    def of(pick: Callable[[list[float]], float], values: list[float] | None) -> float | None:
        return round(pick(values), 2) if values else None

    middle, theirs = statistics.median(ours), statistics.median(peer) if peer else None
    return {
        "name": name,
        "unit": "tok/s",
        "ours": round(middle, 2),
        "peer": None if theirs is None else round(theirs, 2),
        "peer_name": PEER if peer else None,
        "ratio": None if theirs is None else round(middle / theirs, 3),
        "ours_min": of(min, ours),
        "ours_max": of(max, ours),
        "peer_min": of(min, peer),
        "peer_max": of(max, peer),
    }


def _mode(folder: Path, dtype: torch.dtype) -> str:
    layout = CheckpointReader(folder).layout
    if layout is not None and layout.linears:
        return next(iter(layout.linears.values())).name.lower()
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package.replace("-", "_")) is not None
