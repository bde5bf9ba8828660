"""A small world for the quant tests: random Llamas of a few thousand weights with a byte tokenizer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TinyLlama = Callable[..., Path]


def save_byte_tokenizer(folder: Path) -> None:
    """A tokenizer of one token a byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {symbol: index + 2 for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


@pytest.fixture
def tiny_llama(tmp_path: Path) -> TinyLlama:
    """Makes the folder of a random bfloat16 Llama; keyword arguments change its configuration."""

    def make(name: str = "tiny", **changes: object) -> Path:
        options: dict[str, object] = {
            "vocab_size": 258,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
            **changes,
        }
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**options))
        with torch.no_grad():
            for parameter in model.parameters():  # far from the tiny default range, so that rounding errors show
                if parameter.ndim == 2:
                    parameter.normal_(std=parameter.shape[1] ** -0.5)
        folder = tmp_path / name
        model.to(torch.bfloat16).save_pretrained(folder)
        save_byte_tokenizer(folder)
        return folder

    return make
