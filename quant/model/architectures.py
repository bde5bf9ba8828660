"""What the structure of a model does not show: one row for a family whose files name things in another way.

A family without a row is read as it is: modules under the names that transformers gives them, experts as gate_proj,
up_proj and down_proj.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One family.

    renames: parts of module names and what stands in their place in the files, applied where the files do so.
    experts: names of the three Linears of one expert in the files: gate, up, down.
    """

    renames: tuple[tuple[str, str], ...] = ()
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


ARCHITECTURES: dict[str, Architecture] = {
    "mixtral": Architecture(renames=((".mlp.", ".block_sparse_moe."),), experts=("w1", "w3", "w2")),
}


def architecture(model_type: str) -> Architecture:
    """The row of a model type (config.json's `model_type`), or the plain one."""
    return ARCHITECTURES.get(model_type, Architecture())


def attention_implementation(config: Any) -> str:
    """The attention function of transformers that can run the model: eager for those that sdpa cannot run.

    It has no soft-capping, as Gemma 2 wants it, and some model classes say that they do without it.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    supported = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", True)
    return "eager" if not supported or getattr(config, "attn_logit_softcapping", None) is not None else "sdpa"
