"""A tiny random Llama with a real tokenizer, and recipes for it."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from narrowgauge.flows.prefect_server import prefect_server
from narrowgauge.flows.settings import read_flow_settings
from narrowgauge.quant.recipe import Recipe, load_recipe


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a two-layer Llama with random weights and a byte-pair tokenizer of 320 tokens."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.islice(topics.values(), 5), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One Prefect server for the tests of a file; its URL."""
    with prefect_server(read_flow_settings({"NG_HOME": str(tmp_path_factory.mktemp("prefect"))})) as url:
        yield url


@pytest.fixture
def make_recipe(tiny_llama: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """Writes and reads a recipe for the tiny model: `make_recipe(bits=4, gate="{kl_mean_max: 0.1}")`."""

    def make(bits: int = 4, gate: str = "{}", method: str = "{name: rtn}") -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(f"""
version: 1
model: {{source: "{tiny_llama}", name: tiny}}
calibration: {{sources: [{{text: pydoc}}], samples: 4, length: 64, seed: 0}}
methods: [{method}]
scheme: {{weights: {{bits: {bits}, group: 32}}}}
gate: {gate}
""")
        return load_recipe(path)

    return make
