"""ModelRunner: loads a checkpoint and computes steps. It holds the weights and the KV cache, and decides nothing.

T tokens, R rows, E hidden size, V vocabulary, N blocks, B block size, G kv heads, D head size.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from narrowgauge.engine.attention.base import make_attention
from narrowgauge.engine.batch import Batch, build_batch
from narrowgauge.engine.config import EngineConfig, EngineConfigError
from narrowgauge.engine.linear_methods.base import LinearOptions
from narrowgauge.engine.memory import KVPlan, plan_kv_cache
from narrowgauge.engine.models.registry import Model, ModelParts, ModelShape, model_class
from narrowgauge.engine.request import PositionLogprobs
from narrowgauge.engine.sampler import BROKEN_MODEL, Sampled, Unusable, sample, score
from narrowgauge.engine.scheduler import SchedulePlan
from narrowgauge.engine.weights import WeightLoader
from narrowgauge.kernels.dispatch import select_kernels
from narrowgauge.kernels.hardware import resolve_device, resolve_dtype
from narrowgauge.quant.formats.checkpoint import CheckpointReader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """By index into plan.chunks: the token that follows, and the logprobs of the prompt tokens that the step scored.

    `failed` says why a chunk has neither: what was computed for it is not finite, and nor may be its blocks.
    """

    sampled: Mapping[int, Sampled] = field(default_factory=dict)
    scores: Mapping[int, list[PositionLogprobs]] = field(default_factory=dict)
    failed: Mapping[int, Unusable] = field(default_factory=dict)


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
            found = self._broken_chunks(hidden_TE, batch)
            if not batch.scored and not batch.sampled:
                return StepResult(failed=found)
            logits_RV = self.model.logits(hidden_TE if batch.rows is None else hidden_TE[batch.rows])
            scores = self._score(logits_RV, plan, batch)
            first_sampled = batch.scored[-1][2] if batch.scored else 0
            chosen = sample(logits_RV[first_sampled:], [plan.chunks[i].sequence for i in batch.sampled])
            tokens = dict(zip(batch.sampled, chosen, strict=True))
            for index, outcome in (*scores.items(), *tokens.items()):
                if isinstance(outcome, Unusable):
                    found.setdefault(index, outcome)
            return StepResult(
                sampled={i: o for i, o in tokens.items() if isinstance(o, Sampled) and i not in found},
                scores={i: o for i, o in scores.items() if not isinstance(o, Unusable) and i not in found},
                failed=found,
            )

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zeroes blocks that may hold NaN: whoever gets them next reads (and masks) the slots that it has not written."""
        with torch.inference_mode():
            for cache in self.caches:
                cache[list(blocks)] = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, E] of a batch; call under torch.inference_mode."""
        return self.model.forward(batch.ids_T, batch.positions_T, attention=batch.attention, caches=self.caches)

    def _broken_chunks(self, hidden_TE: torch.Tensor, batch: Batch) -> dict[int, Unusable]:
        """Chunks whose last token is not finite: it attends to all before it, so that their cache is as good as it is."""
        finite = hidden_TE[batch.last_rows].isfinite().all(-1).tolist()
        return {index: BROKEN_MODEL for index, good in zip(batch.order, finite, strict=True) if not good}

    def _score(
        self, logits_RV: torch.Tensor, plan: SchedulePlan, batch: Batch
    ) -> dict[int, list[PositionLogprobs] | Unusable]:
        scores = {}
        for index, first, last in batch.scored:
            sequence = plan.chunks[index].sequence
            start = max(plan.chunks[index].start, len(sequence.prompt_scores)) + 1
            tokens = sequence.tokens[start : start + last - first]
            scores[index] = score(logits_RV[first:last], tokens, sequence.request.params.prompt_logprobs or 0)
        return scores

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
