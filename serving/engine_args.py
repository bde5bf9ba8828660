"""Engine arguments as a specification writes them: `narrowgauge serve`'s engine flags without their dashes, checked early."""

import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowgauge.engine.config import EngineConfig, EngineConfigError
from narrowgauge.quant.formats.read import nearest

ENGINE_FLAGS = (
    *("dtype", "device", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"),
    *("num_kv_blocks", "kv_cache_bytes", "attention_backend", "linear", "kernels", "max_waiting", "threads", "seed"),
)
"""The fields of EngineConfig that `narrowgauge serve` has flags for."""

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def check_engine_args(arguments: Mapping[str, object]) -> None:
    """Raises ValueError with the key, what is wrong with it and what would do, as `serve` would when a replica starts."""
    hints = typing.get_type_hints(EngineConfig)
    known = {name.replace("_", "-"): hints[name] for name in ENGINE_FLAGS}
    for flag, value in arguments.items():
        if flag not in known:
            raise ValueError(f"engine_args.{flag}: unknown key{nearest(flag, known)}; allowed: {', '.join(known)}")
        wanted = _scalar(known[flag])
        if type(value) is not wanted:
            raise ValueError(f"engine_args.{flag}: must be {_KINDS[wanted]}, not {value!r} ({type(value).__name__})")
    values: dict[str, Any] = {flag.replace("-", "_"): value for flag, value in arguments.items()}
    try:
        EngineConfig(model=Path(), **values)
    except EngineConfigError as error:
        raise ValueError(f"engine_args: {error}") from None


def _scalar(hint: Any) -> type:
    """The type behind `X`, `X | None` and `Literal[...]`."""
    if typing.get_origin(hint) is typing.Literal:
        return type(typing.get_args(hint)[0])
    if isinstance(hint, types.UnionType):
        return _scalar(next(part for part in typing.get_args(hint) if part is not type(None)))
    assert isinstance(hint, type)
    return hint
