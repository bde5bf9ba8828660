"""narrowgauge: from a full-precision language model to a health-gated production rollout."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowgauge.engine.llm import LLM
    from narrowgauge.engine.request import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"

_LAZY = {"LLM": "narrowgauge.engine.llm", "SamplingParams": "narrowgauge.engine.request"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'narrowgauge' has no attribute {name!r}")
