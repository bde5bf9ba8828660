"""llm-compressor's GPTQ on a model and given token ids; run by the Python of an environment that has llm-compressor.

    PEER/bin/python infra/bench/peer_llmcompressor.py --model FOLDER --ids ids.json --output FOLDER

ids.json holds a list of equally long lists of token ids: exactly what is calibrated on, in this order. The last line on
standard output is JSON with the seconds and the versions. Imports nothing of narrowgauge.
"""

import argparse
import importlib.metadata
import json
import time
from pathlib import Path

PACKAGES = ("llmcompressor", "compressed-tensors", "torch", "transformers")


def main() -> None:
    """Quantizes every Linear but lm_head to 4 bits, symmetric, with llm-compressor's own defaults for the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ids", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()

    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    ids = json.loads(arguments.ids.read_text())
    dataset = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": arguments.group,
    }
    recipe = GPTQModifier(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"])
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
