"""The reference: transformers' own modules with weights through CheckpointReader, whatever the checkpoint's format.

It knows nothing of our kernels or engine, so that it can judge them.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from narrowgauge.kernels.hardware import resolve_dtype
from narrowgauge.quant.formats.checkpoint import CheckpointReader

logger = logging.getLogger(__name__)


class ReferenceModelError(ValueError):
    """A checkpoint or a window that the reference modules cannot run; the message says why."""


class ReferenceModel:
    """A LogitsSource: the model class that transformers has for the config, weights dequantized to `dtype`.

    The hidden states are computed in `dtype`; the output head multiplies in float32, because bfloat16 logits (steps of
    0.06 near 16) would drown the differences that are measured here. `dtype` None is what suits this processor. `threads` sets
    torch's thread count for the whole process. Raises FormatError for a damaged folder, ReferenceModelError for an
    architecture or a scheme that cannot be run.
    """

    name = "reference"

    def __init__(self, folder: Path, *, dtype: torch.dtype | None = None, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        compute = resolve_dtype("auto", torch.device("cpu")) if dtype is None else dtype
        self._model = _load(CheckpointReader(folder), compute)
        self.dtype = str(compute).removeprefix("torch.")
        self.attention = str(self._model.config._attn_implementation)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [S, L] int64 -> logits [S, L, V] float32. Raises ReferenceModelError for windows or tokens beyond the model's."""
        context = getattr(self._model.config, "max_position_embeddings", None)
        if context is not None and ids.shape[1] > context:
            raise ReferenceModelError(
                f"windows of {ids.shape[1]} tokens are longer than the model's {context} positions; use a --length of at most that"
            )
        vocabulary, highest = self._model.get_input_embeddings().num_embeddings, int(ids.max())
        if highest >= vocabulary:
            raise ReferenceModelError(
                f"token {highest} lies outside the model's {vocabulary}: the tokenizer is another's"
            )
        with torch.inference_mode():
            logits: torch.Tensor = self._model(ids, use_cache=False).logits
        return logits.float()


class _Float32Head(torch.nn.Module):
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        weight, bias = head.weight, getattr(head, "bias", None)
        assert isinstance(weight, torch.Tensor)
        self.register_buffer("weight", weight.detach().float(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden.float(), self.weight, self.bias)


def _load(reader: CheckpointReader, dtype: torch.dtype) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    _refuse_rounded_activations(reader)
    with _quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(reader.folder)
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        except (ValueError, KeyError) as error:
            kind = reader.config.get("model_type")
            raise ReferenceModelError(
                f"{reader.folder}: transformers has no causal model for {kind!r}: {error}"
            ) from None
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # the weights below are dequantized: transformers must not do it again
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=_weights(reader, dtype),
            dtype=dtype,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
    _check_loaded(reader.folder, report)
    model.eval()
    if dtype != torch.float32:
        model.set_output_embeddings(_Float32Head(model.get_output_embeddings()))
    return model


def _refuse_rounded_activations(reader: CheckpointReader) -> None:
    if reader.layout is None:
        return
    rounded = [name for name, scheme in reader.layout.linears.items() if scheme.activations is not None]
    what = f"the activations of {rounded[0]}" if rounded else "the KV cache" if reader.layout.kv_cache else None
    if what:
        raise ReferenceModelError(
            f"{reader.folder}: quantizes {what}; the reference of this release rounds weights only and would flatter it"
        )


def _weights(reader: CheckpointReader, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every parameter by the name it has in full precision."""
    quantized = set(reader.layout.linears) if reader.layout else set()
    weights = {f"{module}.weight": reader.weight(module, dtype) for module in sorted(quantized)}
    for name in reader.names():
        module, _, local = name.rpartition(".")
        if module not in quantized or local == "bias":
            tensor = reader.tensor(name)
            weights[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return weights


def _check_loaded(folder: Path, report: dict[str, Any]) -> None:
    if missing := sorted(report["missing_keys"]):
        raise ReferenceModelError(f"{folder}: {missing[0]} is not stored ({len(missing)} parameters are missing)")
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        raise ReferenceModelError(f"{folder}: {name} has shape {tuple(stored)}; the config wants {tuple(wanted)}")
    if unexpected := sorted(report["unexpected_keys"]):
        logger.warning(
            "%s: %d stored tensors have no place in the model: %s ...", folder, len(unexpected), unexpected[0]
        )


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silences transformers' load report and bar: what matters in them is checked here and raised."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
