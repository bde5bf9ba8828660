"""What several tests of the engine share: the real model under transformers as the oracle, and tiny models made here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from narrowgauge.engine.config import EngineConfig
from narrowgauge.engine.llm_engine import LLMEngine
from narrowgauge.engine.request import Request, SamplingParams
from narrowgauge.engine.tokenizer import Tokenizer

NEW_TOKENS = 32
TEXTS = (
    "A",
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village near the sea,",
    "1, 2, 3, 4, 5,",
    "Water boils at",
    "The three laws of thermodynamics are:\n1.",
    "To be, or not to be, that is the",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n",
    "Liebe Freunde, heute",
    "Q: What is the largest planet?\nA:",
    "The following list names the days of the week: Monday, Tuesday,",
    "In mathematics, a prime number is a natural number greater than 1 that has no positive divisors other than 1 and itself. "
    "The first few are",
    "SELECT name, age FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to complain about the state of the railway between the two towns. Last week the train "
    "was late by more than an hour, the carriage was cold, and nobody could tell us when it would arrive. I would like to ask",
    "{\n  \"name\": \"narrow\",\n  \"values\": [1, 2,",
)  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2)


@pytest.fixture(scope="session")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Sixteen prompts of 1 to about 70 tokens."""
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="session")
def expected(smollm2: Path, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' greedy continuation of each prompt, alone, in fp32."""
    return transformers_greedy(smollm2, prompts)


@pytest.fixture
def greedy() -> Callable[..., list[list[int]]]:
    """Runs prompts together through our engine and returns their tokens."""
    return run_greedy


@pytest.fixture
def greedy_oracle() -> Callable[[Path, list[list[int]]], list[list[int]]]:
    """transformers' greedy tokens for any checkpoint."""
    return transformers_greedy


@pytest.fixture
def make_llama(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny random Llama checkpoint; keywords go to LlamaConfig."""

    def make(name: str = "tiny", **overrides: Any) -> Path:
        settings: dict[str, Any] = {
            "vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False, "initializer_range": 0.2,
            "bos_token_id": 256, "eos_token_id": 257,
        }  # fmt: skip
        torch.manual_seed(7)
        model = LlamaForCausalLM(LlamaConfig(**{**settings, **overrides}))
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases start at zero and norms at one: make them count
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save(str(tmp_path / name / "tokenizer.json"))
        return tmp_path / name

    return make


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token a byte, and two special ones: 256 begins, 257 ends."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    by_byte = {bytes_of(character): character for character in alphabet}
    vocabulary = {by_byte[bytes([byte])]: byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    return tokenizer


def bytes_of(character: str) -> bytes:
    """The byte that byte-level BPE writes as this character (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    code = ord(character)
    return bytes([code if code in kept else [b for b in range(256) if b not in kept][code - 256]])


def run_greedy(
    folder: Path, prompts: list[list[int]], *, new_tokens: int = NEW_TOKENS, **engine_args: Any
) -> list[list[int]]:
    """Greedy tokens of all prompts, run together in fp32 unless `dtype` says otherwise; checks the books at the end."""
    engine = LLMEngine(
        EngineConfig(model=folder, **{"dtype": "float32", "max_model_len": 512, "threads": 1, **engine_args}),
        eos_ids=frozenset(),
    )
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0)
        engine.add_request(Request(request_id=str(index), prompt_ids=tuple(prompt), params=params))
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    while engine.has_work:
        for output in engine.step():
            assert output.token_id is not None
            tokens[output.request_id].append(output.token_id)
        engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    return [tokens[str(index)] for index in range(len(prompts))]


def transformers_greedy(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The oracle: generate() on one prompt at a time, in fp32, without an end token."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(answer[0, len(prompt) :].tolist())
    return answers
