"""llm-compressor on a model and given token ids; run by the Python of an environment that has llm-compressor.

    PEER/bin/python infra/bench/peer_llmcompressor.py --model FOLDER --ids ids.json --output FOLDER \
        --methods awq gptq --scheme '{"weights": {"num_bits": 4, "strategy": "group", "group_size": 64}}'

ids.json holds a list of equally long lists of token ids: exactly what is calibrated on, in this order. The scheme is a group
of compressed-tensors: weights and, where they are rounded too, input_activations. The last line on standard output is JSON
with the seconds and the versions. Imports nothing of narrowgauge.
"""

import argparse
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

PACKAGES = ("llmcompressor", "compressed-tensors", "torch", "transformers")
METHODS = ("awq", "smoothquant", "gptq", "rtn")


def make_modifiers(methods: list[str], scheme: dict[str, Any]) -> list[Any]:
    """llm-compressor's modifiers for every Linear but lm_head, with its own defaults for all that is not named."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    groups = {"group_0": {"targets": ["Linear"], **scheme}}
    makers = {
        "awq": lambda: AWQModifier(),
        "smoothquant": lambda: SmoothQuantModifier(smoothing_strength=0.8),
        "gptq": lambda: GPTQModifier(config_groups=groups, ignore=["lm_head"]),
        "rtn": lambda: QuantizationModifier(config_groups=groups, ignore=["lm_head"]),
    }
    return [makers[method]() for method in methods]


def main() -> None:
    """Quantizes and saves; the seconds hold loading, calibration, rounding and saving, but not the imports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ids", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", choices=METHODS, required=True, help="in the order of their work")
    parser.add_argument("--scheme", type=json.loads, required=True)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()

    import torch
    from datasets import Dataset
    from llmcompressor import oneshot

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if not torch.accelerator.is_available():
        # Its AWQ pins memory for faster copies to an accelerator and fails where there is none; the figures are the same.
        torch.Tensor.pin_memory = lambda tensor, device=None: tensor
    ids = json.loads(arguments.ids.read_text())
    dataset = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
    recipe = make_modifiers(arguments.methods, arguments.scheme)
    started = time.monotonic()
    oneshot(
        model=str(arguments.model),
        dataset=dataset,
        recipe=recipe,
        num_calibration_samples=len(ids),
        max_seq_length=len(ids[0]),
        shuffle_calibration_samples=False,
        output_dir=str(arguments.output),
    )
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    print(json.dumps({"seconds": round(time.monotonic() - started, 1), "versions": versions}))


if __name__ == "__main__":
    main()
