"""The offline front."""

from collections.abc import Callable
from pathlib import Path

import pytest

from narrowgauge import LLM, SamplingParams
from narrowgauge.engine.request import RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


@pytest.fixture
def llm(make_llama: Callable[..., Path]) -> LLM:
    return LLM(make_llama(), dtype="float32", threads=1)


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["alpha", "b", "a longer prompt than the others"]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.text for c in together] == [c.text for c in alone]
    assert [c.prompt_ids for c in together] == [tuple(prompt.encode()) for prompt in prompts]


def test_ids_are_taken_as_they_are(llm: LLM) -> None:
    assert llm.generate(list(b"alpha"), GREEDY)[0].token_ids == llm.generate("alpha", GREEDY)[0].token_ids


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=2)
    assert [len(c.token_ids) for c in llm.generate(["x", "y"], [short, GREEDY])] == [2, 16]
    with pytest.raises(RequestError, match="2 prompts, but 1 SamplingParams"):
        llm.generate(["x", "y"], [short])


def test_one_bad_prompt_runs_nothing_and_leaves_the_engine_usable(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["fine", []], GREEDY)
    assert len(llm.generate("fine", GREEDY)[0].token_ids) == 16


def test_a_stop_text_ends_an_answer(llm: LLM) -> None:
    free = llm.generate("alpha", GREEDY)[0]
    stop = free.text[3:5]
    cut = llm.generate("alpha", SamplingParams(temperature=0.0, max_tokens=16, stop=(stop,)))[0]
    assert cut.text == free.text[: free.text.find(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_chat_uses_the_models_template(smollm2: Path) -> None:
    llm = LLM(smollm2, max_model_len=256, dtype="float32", threads=1)
    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)[0]
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
