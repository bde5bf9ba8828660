"""GPTQModel's GPTQ on a model and given token ids; run by the Python of an environment that has GPTQModel.

    PEER/bin/python infra/bench/peer_gptqmodel.py --model FOLDER --ids ids.json --output FOLDER

ids.json holds a list of equally long lists of token ids: exactly what is calibrated on, in this order. The last line on
standard output is JSON with the seconds and the versions. Imports nothing of narrowgauge.
"""

import argparse
import importlib.metadata
import json
import os
import time
from pathlib import Path

PACKAGES = ("gptqmodel", "torch", "transformers")


def main() -> None:
    """Quantizes every Linear but lm_head, symmetric, with GPTQModel's own defaults for the rest, and saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ids", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="samples of one forward pass")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()

    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # by itself it takes 1 on 2 cores, and then refuses to load
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    ids = json.loads(arguments.ids.read_text())
    samples = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids]
    started = time.monotonic()
    config = QuantizeConfig(bits=arguments.bits, group_size=arguments.group, sym=True)
    model = GPTQModel.load(str(arguments.model), config, device="cpu")
    model.quantize(samples, batch_size=arguments.batch, calibration_sort=None)
    model.save(str(arguments.output))
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    print(json.dumps({"seconds": round(time.monotonic() - started, 1), "versions": versions}))


if __name__ == "__main__":
    main()
