"""EngineConfig: everything that a user may set about one engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DType = Literal["auto", "float32", "bfloat16"]
LinearChoice = Literal["auto", "dequantize", "int4"]
KernelChoice = Literal["auto", "reference", "triton"]


class EngineConfigError(ValueError):
    """A setting that cannot be used; the message names the flag and a value that would do."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine's settings; None and "auto" are resolved at load, and the log tells to what.

    model: checkpoint folder. dtype "auto" on a CPU is bfloat16 where the processor multiplies it natively (AVX512-BF16, AMX),
    else float32. max_model_len: tokens of prompt and output; default the model's. The KV cache has `num_kv_blocks` blocks
    of `block_size` tokens, or as many as fit `kv_cache_bytes`, or as many as the sequences can use within an eighth of free
    memory. max_num_seqs: sequences a step; max_num_batched_tokens: tokens a step, decode and prefill chunks together.
    max_waiting: requests queued before new ones are refused. threads: CPU threads of torch, default torch's.
    linear: how quantized Linears run ("int4" packed kernel, "dequantize" to `dtype` at load). dense_prefill_copy keeps a
    `dtype` copy of int4 weights for wide batches, where the packed kernel is slower; default on a CPU.
    seed: where requests without a seed get theirs from.
    """

    model: Path
    dtype: DType = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 256
    max_waiting: int = 1024
    threads: int | None = None
    attention_backend: str = "auto"
    linear: LinearChoice = "auto"
    kernels: KernelChoice = "auto"
    dense_prefill_copy: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", Path(self.model))
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise EngineConfigError(f"--{_flag(name)} must be at least 1, not {getattr(self, name)}")
        for name in ("max_model_len", "num_kv_blocks", "kv_cache_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EngineConfigError(f"--{_flag(name)} must be at least 1, not {value}")
        if self.num_kv_blocks is not None and self.kv_cache_bytes is not None:
            raise EngineConfigError("--num-kv-blocks and --kv-cache-bytes both size the KV cache: give one of them")
        for name, allowed in (
            ("dtype", ("auto", "float32", "bfloat16")),
            ("linear", ("auto", "dequantize", "int4")),
            ("kernels", ("auto", "reference", "triton")),
        ):
            if getattr(self, name) not in allowed:
                raise EngineConfigError(
                    f"--{_flag(name)} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}"
                )


def _flag(name: str) -> str:
    return name.replace("_", "-")
