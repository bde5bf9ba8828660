"""A model that is broken for some tokens: the requests that meet them fail, and nobody else notices."""

import collections
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from narrowgauge.engine.config import EngineConfig
from narrowgauge.engine.llm import LLM
from narrowgauge.engine.llm_engine import LLMEngine
from narrowgauge.engine.output import StepOutput
from narrowgauge.engine.request import Request, SamplingParams

POISON = 65
"""The id whose embedding is NaN."""


@pytest.fixture
def poisoned(make_llama: Callable[..., Path]) -> Path:
    """A model that is broken for one token only."""
    folder = make_llama("poisoned")
    edit(folder, "model.embed_tokens.weight", row=POISON)
    return folder


def edit(folder: Path, name: str, *, row: int | None = None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    (tensors[name] if row is None else tensors[name][row]).fill_(torch.nan)
    save_file(tensors, path, metadata={"format": "pt"})


def run(engine: LLMEngine, prompts: dict[str, tuple[int, ...]], **params: object) -> dict[str, list[StepOutput]]:
    """All outputs of the requests, run together; checks the books after every step."""
    for name, prompt in prompts.items():
        asked = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **params})  # type: ignore[arg-type]
        engine.add_request(Request(request_id=name, prompt_ids=prompt, params=asked))
    outputs: dict[str, list[StepOutput]] = collections.defaultdict(list)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    return outputs


def make_engine(folder: Path, **options: object) -> LLMEngine:
    settings = {"dtype": "float32", "max_model_len": 128, "threads": 1, "block_size": 4, "num_kv_blocks": 64, **options}
    return LLMEngine(EngineConfig(model=folder, **settings), eos_ids=frozenset())  # type: ignore[arg-type]


# Of like length, so that they decode in one call of the attention, which pads the shorter one.
GOOD = {"good": tuple(range(1, 22)), "short": tuple(range(30, 43))}
BAD = {"bad": (*range(100, 120), POISON, 3, 4)}


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("budget", [8, 256])
@pytest.mark.parametrize(
    "params", [{}, {"logprobs": 2}, {"temperature": 1.0, "seed": 1, "repetition_penalty": 1.2}, {"prompt_logprobs": 1}]
)
def test_a_request_that_meets_broken_weights_fails_alone(
    poisoned: Path, backend: str, budget: int, params: dict[str, object]
) -> None:
    options = {"attention_backend": backend, "max_num_batched_tokens": budget}
    alone = run(make_engine(poisoned, **options), GOOD, **params)
    together = run(engine := make_engine(poisoned, **options), {**BAD, **GOOD}, **params)
    (failure,) = together["bad"]
    assert failure.finish_reason == "error"
    assert failure.token_id is None
    assert failure.error is not None
    assert "numerically broken" in failure.error
    after = run(engine, GOOD, **params)  # in the blocks that the failed one has left
    for name in GOOD:
        tokens = [output.token_id for output in alone[name]]
        assert tokens == [output.token_id for output in together[name]] == [output.token_id for output in after[name]]


def test_a_request_that_is_dropped_before_its_end_leaves_no_nan_to_others(poisoned: Path) -> None:
    alone = run(make_engine(poisoned), GOOD)
    engine = make_engine(poisoned, max_num_batched_tokens=8, num_kv_blocks=32)
    prompt = (POISON, *range(100, 130))
    engine.add_request(Request(request_id="dropped", prompt_ids=prompt, params=SamplingParams(max_tokens=4)))
    (failure,) = engine.step()  # in the first of its chunks already
    assert failure.finish_reason == "error"
    engine.abort("dropped")
    after = run(engine, GOOD)
    assert [o.token_id for o in after["good"]] == [o.token_id for o in alone["good"]]


def test_a_token_that_breaks_a_model_while_it_decodes_ends_its_request_only(poisoned: Path) -> None:
    alone = run(make_engine(poisoned), GOOD)
    engine = make_engine(poisoned)
    forced = SamplingParams(max_tokens=6, temperature=0.0, logit_bias={POISON: 1e4})
    engine.add_request(Request(request_id="bad", prompt_ids=(200, 201), params=forced))
    together = run(engine, GOOD)
    assert [o.token_id for o in together["good"]] == [o.token_id for o in alone["good"]]
    assert [o.token_id for o in together["short"]] == [o.token_id for o in alone["short"]]
    assert [(o.token_id, o.finish_reason) for o in together["bad"]] == [(POISON, None), (None, "error")]


@pytest.mark.parametrize("params", [{}, {"max_tokens": 0, "prompt_logprobs": 2}, {"temperature": 1.0, "logprobs": 1}])
def test_a_model_whose_last_norm_is_nan_fails_every_request_and_lives(
    make_llama: Callable[..., Path], params: dict[str, object]
) -> None:
    folder = make_llama()
    edit(folder, "model.norm.weight")
    engine = make_engine(folder)
    for _ in range(2):
        outputs = run(engine, GOOD, **params)
        assert all([o.finish_reason for o in told] == ["error"] for told in outputs.values())
        assert set(outputs) == set(GOOD)


def test_the_offline_front_says_why_a_prompt_has_no_answer(poisoned: Path) -> None:
    llm = LLM(poisoned, dtype="float32", max_model_len=128, threads=1)
    bad, good = llm.generate([[POISON, 1], [2, 1]], SamplingParams(max_tokens=2, temperature=0.0))
    assert (bad.finish_reason, bad.token_ids) == ("error", ())
    assert bad.error is not None
    assert (good.finish_reason, len(good.token_ids), good.error) == ("length", 2, None)
