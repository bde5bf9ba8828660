"""ModelRunner: loads a checkpoint and computes steps. It holds the weights and the KV cache, and decides nothing.

T tokens, R rows, E hidden size, V vocabulary, N blocks, B block size, G kv heads, D head size.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from narrowgauge.engine.attention.base import make_attention
from narrowgauge.engine.batch import Batch, build_batch
from narrowgauge.engine.config import EngineConfig, EngineConfigError
from narrowgauge.engine.linear_methods.base import LinearOptions
from narrowgauge.engine.memory import KVPlan, plan_kv_cache
from narrowgauge.engine.models.registry import Model, ModelParts, ModelShape, model_class
from narrowgauge.engine.request import PositionLogprobs
from narrowgauge.engine.sampler import Sampled, sample, score
from narrowgauge.engine.scheduler import SchedulePlan
from narrowgauge.engine.weights import WeightLoader
from narrowgauge.kernels.dispatch import select_kernels
from narrowgauge.kernels.hardware import resolve_device, resolve_dtype
from narrowgauge.quant.formats.checkpoint import CheckpointReader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """By index into plan.chunks: the token that follows, and the logprobs of the prompt tokens that the step scored."""

    sampled: Mapping[int, Sampled]
    scores: Mapping[int, list[PositionLogprobs]]


class ModelRunner:
    """One model on one device."""

    def __init__(self, config: EngineConfig) -> None:
        """Loads the weights and allocates the cache. Raises a named error for anything the user can change."""
        started = time.monotonic()
        try:
            self.device = resolve_device(config.device)
        except ValueError as error:
            raise EngineConfigError(f"--device {config.device}: {error}") from None
        if self.device.type == "cpu" and config.threads is not None:
            torch.set_num_threads(config.threads)
        self.dtype = resolve_dtype(config.dtype, self.device)
        reader = CheckpointReader(config.model)
        architecture = model_class(reader.config)
        self.shape: ModelShape = architecture.read_shape(reader.config)
        self.kv: KVPlan = plan_kv_cache(
            config, self.shape, dtype=self.dtype, device=self.device, weight_bytes=reader.size_bytes
        )
        self._block_size = config.block_size
        self.kernels = select_kernels(self.device, config.kernels)
        self.attention = make_attention(config.attention_backend, dtype=self.dtype, device=self.device)
        loader = WeightLoader(reader, choice=config.linear, options=self._linear_options(config))
        with torch.inference_mode():
            parts = ModelParts(
                loader=loader,
                kernels=self.kernels,
                attention=self.attention,
                dtype=self.dtype,
                device=self.device,
                max_model_len=self.kv.max_model_len,
            )
            self.model: Model = architecture(reader.config, parts)
            loader.check_all_taken()
            self.caches = [self._allocate(self.kv.num_blocks) for _ in range(self.shape.layers)]
        self.linear_methods = dict(loader.methods)
        logger.info(
            "%s: %s on %s, linears %s, attention %s, %s; %.0f MiB of weights, %d KV blocks of %d tokens (%.0f MiB), "
            "sequences up to %d tokens, %d threads; loaded in %.1f s",
            config.model.name,
            str(self.dtype).removeprefix("torch."),
            self.device,
            ", ".join(f"{name} x{count}" for name, count in sorted(loader.methods.items())),
            self.attention.name,
            "Triton kernels" if "triton" in self.kernels.origins.values() else "eager kernels",
            loader.nbytes / 2**20,
            self.kv.num_blocks,
            config.block_size,
            self.kv.num_blocks * self.kv.block_bytes / 2**20,
            self.kv.max_model_len,
            torch.get_num_threads(),
            time.monotonic() - started,
        )

    def run(self, plan: SchedulePlan) -> StepResult:
        """Computes one step: writes the cache, samples where a chunk ends its sequence, scores prompts where asked."""
        with torch.inference_mode():
            batch = build_batch(plan.chunks, block_size=self._block_size, backend=self.attention, device=self.device)
            hidden_TE = self.forward(batch)
            if not batch.scored and not batch.sampled:
                return StepResult({}, {})
            logits_RV = self.model.logits(hidden_TE if batch.rows is None else hidden_TE[batch.rows])
            scores = {}
            first_sampled = 0
            for index, first, last in batch.scored:
                sequence = plan.chunks[index].sequence
                start = max(plan.chunks[index].start, len(sequence.prompt_scores)) + 1
                tokens = sequence.tokens[start : start + last - first]
                scores[index] = score(logits_RV[first:last], tokens, sequence.request.params.prompt_logprobs or 0)
                first_sampled = last
            chosen = sample(logits_RV[first_sampled:], [plan.chunks[i].sequence for i in batch.sampled])
            return StepResult(dict(zip(batch.sampled, chosen, strict=True)), scores)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, E] of a batch; call under torch.inference_mode."""
        return self.model.forward(batch.ids_T, batch.positions_T, attention=batch.attention, caches=self.caches)

    def _linear_options(self, config: EngineConfig) -> LinearOptions:
        on_cpu = self.device.type == "cpu"
        copy = on_cpu if config.dense_prefill_copy is None else config.dense_prefill_copy
        return LinearOptions(
            dtype=self.dtype, device=self.device, blocked=config.kernels != "reference", dense_copy=copy
        )

    def _allocate(self, blocks: int) -> torch.Tensor:
        """One layer's cache [N, B, 2, G, D], zeroed: padding is read (and masked), so it must not hold NaN."""
        shape = (blocks, self._block_size, 2, self.shape.kv_heads, self.shape.head_size)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # numpy takes zeroed pages from the kernel without touching them; torch.zeros would claim all of them now.
        raw = np.zeros(shape, dtype=np.int16 if self.dtype.itemsize == 2 else np.int32)
        return torch.from_numpy(raw).view(self.dtype)
