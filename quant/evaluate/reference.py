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
from narrowgauge.quant.evaluate import rounded
from narrowgauge.quant.evaluate.dequantized import DequantizedReader
from narrowgauge.quant.evaluate.rounded import KVRounding, ReferenceModelError
from narrowgauge.quant.formats.checkpoint import CheckpointReader
from narrowgauge.quant.model.attention import attention_modules

__all__ = ["ReferenceModel", "ReferenceModelError"]

logger = logging.getLogger(__name__)


class ReferenceModel:
    """A LogitsSource: the model class that transformers has for the config, weights dequantized to `dtype`.

    Inputs of Linears and stored keys and values are rounded exactly as the checkpoint's schemes say (formats/rounding.py);
    `round_activations` and `round_kv` switch that off, to see what it costs. Hidden states are computed in `dtype`; the
    output head multiplies in float32, because bfloat16 logits (steps of 0.06 near 16) would drown the differences that are
    measured here. `dtype` None is what suits the device, `attention` None what transformers takes for the model. `threads`
    sets torch's thread count for the whole process. Raises FormatError for a damaged folder, ReferenceModelError for an
    architecture or a scheme that cannot be run.
    """

    name = "reference"

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        attention: str | None = None,
        threads: int | None = None,
        round_activations: bool = True,
        round_kv: bool = True,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = rounded.find_device(device)
        compute = resolve_dtype("auto", self._device) if dtype is None else dtype
        reader = DequantizedReader(folder, dtype=compute)
        self._model = _load(reader, compute, attention).to(self._device)
        self.dtype = str(compute).removeprefix("torch.")
        self.attention = str(self._model.config._attn_implementation)
        self.device = str(self._device)
        self._one_by_one = _round_inputs(self._model, reader.files) if round_activations else False
        self._kv: tuple[KVRounding, ...] = _round_kv(self._model, reader.files) if round_kv else ()
        self.rounding = _describe_rounding(reader.files, inputs=round_activations, kv=round_kv)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [S, L] int64 -> logits [S, L, V] float32 on the model's device.

        Raises ReferenceModelError for windows or tokens beyond the model's.
        """
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
        # A dynamic scale of a whole tensor is one of a window here: that of a batch would depend on its size.
        parts = torch.split(ids.to(self._device), 1 if self._one_by_one else len(ids))
        with torch.inference_mode():
            logits = torch.cat([self._model(part, use_cache=False).logits.float() for part in parts])
        self._check_kv()
        return logits

    def _check_kv(self) -> None:
        if missed := sorted(rounding.name for rounding in self._kv if not rounding.seen):
            raise ReferenceModelError(
                f"{missed[0]}: does not use transformers' attention interface, so its keys and values cannot be rounded "
                f"({len(missed)} layers); evaluate it --with engine"
            )


class _Float32Head(torch.nn.Linear):
    """The output head with its product in float32, whatever comes in."""

    def __init__(self, head: Any) -> None:
        super().__init__(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        self.weight = torch.nn.Parameter(head.weight.detach().float(), requires_grad=False)
        if head.bias is not None:
            self.bias = torch.nn.Parameter(head.bias.detach().float(), requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.float())


def _describe_rounding(reader: CheckpointReader, *, inputs: bool, kv: bool) -> str | None:
    """What a report says of the candidate's rounding at run time; None for a checkpoint whose schemes have none."""
    linears, kv_cache = rounded.rounded_inputs(reader), reader.layout.kv_cache if reader.layout else None
    parts = []
    if linears:
        names = sorted({scheme.name for scheme in linears.values()})
        parts.append(f"inputs of {len(linears)} Linears ({', '.join(names)}){'' if inputs else ': SWITCHED OFF'}")
    if kv_cache is not None:
        parts.append(f"keys and values ({kv_cache.name}){'' if kv else ': SWITCHED OFF'}")
    return "; ".join(parts) or None


def _round_inputs(model: Any, reader: CheckpointReader) -> bool:
    """Attaches the rounding of inputs; whether one scale then covers a whole batch."""
    wanted = rounded.rounded_inputs(reader)
    linears = _linears(model, reader)
    if set(wanted) - set(linears):
        rounded.separate_experts(model)
        linears = _linears(model, reader)
    if lost := sorted(set(wanted) - set(linears)):
        raise ReferenceModelError(
            f"{reader.folder}: {lost[0]}: its input is rounded, but transformers' {type(model).__name__} has no Linear of "
            f"that name ({len(lost)} such layers)"
        )
    rounded.round_inputs(linears, reader, device=model.device)
    schemes = [scheme.activations for scheme in wanted.values() if scheme.activations is not None]
    return any(scheme.dynamic and scheme.granularity == "tensor" for scheme in schemes)


def _round_kv(model: Any, reader: CheckpointReader) -> tuple[KVRounding, ...]:
    found = set(attention_modules(model))
    attentions = rounded.by_stored_name(model, found.__contains__, reader)
    return rounded.round_keys_and_values(attentions, reader, device=model.device)


def _linears(model: Any, reader: CheckpointReader) -> dict[str, torch.nn.Linear]:
    found = rounded.by_stored_name(model, lambda module: isinstance(module, torch.nn.Linear), reader)
    return {name: module for name, module in found.items() if isinstance(module, torch.nn.Linear)}


def _load(reader: DequantizedReader, dtype: torch.dtype, attention: str | None) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

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
            **({} if attention is None else {"attn_implementation": attention}),
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
    _check_loaded(reader.folder, report)
    model.eval()
    if dtype != torch.float32:
        model.set_output_embeddings(_Float32Head(model.get_output_embeddings()))
    return model


def _weights(reader: DequantizedReader, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every parameter by the name it has in full precision."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in ((name, reader.tensor(name)) for name in reader.names())
    }


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
