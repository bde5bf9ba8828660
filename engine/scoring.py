"""EngineLogits: a quant.evaluate LogitsSource that runs the engine's real kernels. S sequences, L tokens, V vocabulary."""

from pathlib import Path
from typing import Any

import torch

from narrowgauge.engine.batch import build_batch
from narrowgauge.engine.config import EngineConfig
from narrowgauge.engine.kv_cache import KVBlockPool
from narrowgauge.engine.model_runner import ModelRunner
from narrowgauge.engine.request import Request, SamplingParams
from narrowgauge.engine.scheduler import ScheduledChunk
from narrowgauge.engine.sequence import Sequence


class EngineLogits:
    """Logits of every position, computed as a server would: prefill in chunks through the paged cache."""

    def __init__(self, folder: Path, *, max_length: int, chunk: int = 256, **engine_args: Any) -> None:
        """Loads a checkpoint for sequences of up to `max_length` tokens; `engine_args` as in EngineConfig."""
        self._block_size = int(engine_args.pop("block_size", 16))
        self._chunk = chunk
        config = EngineConfig(
            model=folder,
            block_size=self._block_size,
            num_kv_blocks=-(-max_length // self._block_size),
            max_model_len=max_length,
            **engine_args,
        )
        self._runner = ModelRunner(config)
        self.max_length = max_length
        self.name = "engine"
        self.dtype = str(self._runner.dtype).removeprefix("torch.")
        self.attention = self._runner.attention.name

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """[S, L] int64 -> [S, L, V] fp32. L is at most `max_length`."""
        if ids.shape[1] > self.max_length:
            raise ValueError(f"{ids.shape[1]} tokens a sequence, but this source was made for {self.max_length}")
        return torch.stack([self._one(row) for row in ids.tolist()])

    def _one(self, ids: list[int]) -> torch.Tensor:
        sequence = Sequence(
            request=Request(request_id="score", prompt_ids=tuple(ids), params=SamplingParams(max_tokens=None)),
            seed=0,
            max_tokens=0,
            stop_ids=frozenset(),
            arrival_s=0.0,
        )
        pool = KVBlockPool(self._runner.kv.num_blocks, self._block_size)
        pool.reserve(sequence.blocks, len(ids))
        parts = []
        with torch.inference_mode():
            for start in range(0, len(ids), self._chunk):
                chunk = ScheduledChunk(sequence, start, min(self._chunk, len(ids) - start), samples=False)
                batch = build_batch(
                    (chunk,), block_size=self._block_size, backend=self._runner.attention, device=self._runner.device
                )
                parts.append(self._runner.model.logits(self._runner.forward(batch)).float().cpu())
        return torch.cat(parts)
