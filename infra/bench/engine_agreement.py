"""Whether the engine computes what a checkpoint says: its perplexity against the reference modules', for every scheme.

    python infra/bench/engine_agreement.py --work WORK

The reference dequantizes, rounds inputs, keys and values as the scheme says, and computes in float32; the engine runs its own
kernels in the dtype it picks by itself, unless --dtype names another. Both judge the held-out texts of quant_quality.py, whose
work folder is shared. Writes results/agreement-<machine>.json; a scheme that the engine refuses is named on standard error and
has no row.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quality_material as shared
import torch
from quality_material import FP8_DYNAMIC, W4G64, W8A8, WINDOW, Material, say
from quant_quality import CASES, Figures, Judge, row

from narrowgauge.cli.results import make_result, write_result
from narrowgauge.engine.scoring import EngineLogits
from narrowgauge.kernels.hardware import cpu_class
from narrowgauge.quant.evaluate.perplexity import perplexity, token_losses

HERE = Path(__file__).resolve().parent

_RTN, _FP8 = [{"name": "rtn"}], [{"name": "fp8"}]
_KV_FP8 = {"kv_cache": {"bits": 8, "type": "float"}}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One checkpoint to be judged by both; calibrated on little where it is only about how numbers are stored."""

    methods: list[dict[str, Any]] = field(default_factory=lambda: list(_RTN))
    scheme: dict[str, Any]
    format: str = "compressed-tensors"


CHECKPOINTS = {
    "w4g64": Checkpoint(methods=CASES["gptq_w4g64"].methods, scheme=W4G64),
    "w4g64_asym": Checkpoint(scheme={"weights": {"bits": 4, "group": 64, "symmetric": False}}),
    "w4g32": Checkpoint(scheme={"weights": {"bits": 4, "group": 32}}),
    "w4_channel": Checkpoint(methods=CASES["gptq_w4g64"].methods, scheme={"weights": {"bits": 4}}),
    "w8g64": Checkpoint(scheme={"weights": {"bits": 8, "group": 64}}),
    "w4g64_gptq_v1": Checkpoint(scheme=W4G64, format="gptq"),
    "w4g64_awq_gemm": Checkpoint(scheme={"weights": {"bits": 4, "group": 64, "symmetric": False}}, format="awq"),
    "w8a8": Checkpoint(methods=CASES["smoothquant_gptq_w8a8"].methods, scheme=W8A8),
    "fp8_dynamic": Checkpoint(methods=_FP8, scheme=FP8_DYNAMIC),
    "fp8_static": Checkpoint(
        methods=_FP8,
        scheme={
            "weights": {"bits": 8, "type": "float", "per_tensor": True},
            "activations": {"bits": 8, "type": "float", "granularity": "tensor", "dynamic": False},
        },
    ),
    "fp8_block64": Checkpoint(
        methods=_FP8,
        scheme={
            "weights": {"bits": 8, "type": "float", "block": [64, 64]},
            "activations": {"bits": 8, "type": "float", "granularity": "group", "group": 64},
        },
    ),
    "kv_fp8": Checkpoint(methods=[], scheme={"weights": None, **_KV_FP8}),
    "kv_fp8_head": Checkpoint(
        methods=[], scheme={"weights": None, "kv_cache": {"bits": 8, "type": "float", "granularity": "head"}}
    ),
    "kv_int8": Checkpoint(methods=[], scheme={"weights": None, "kv_cache": {"bits": 8, "type": "int"}}),
    "w4g64_kv_fp8": Checkpoint(methods=CASES["gptq_w4g64"].methods, scheme=W4G64 | _KV_FP8),
}
"""Name -> checkpoint: each kind of weights, of inputs and of KV cache, and each file format, at least once."""


def by_engine(material: Material, folder: Path, dtype: str) -> dict[str, float]:
    """Perplexity by text. Raises what the engine raises for a scheme that it does not run."""
    engine = EngineLogits(folder, max_length=WINDOW, dtype=dtype, threads=torch.get_num_threads())
    say(f"{folder.name}: the engine computes in {engine.dtype}")
    found = {}
    for text, heldout in material.judged.items():
        losses = [token_losses(engine.logits(ids), ids) for ids in heldout.ids.split(1)]
        found[text] = perplexity(torch.cat(losses))
    return found


def make_rows(name: str, engine: dict[str, float], reference: Figures) -> list[dict[str, Any]]:
    """One row a text: ours is the engine's perplexity, the peer's the reference's."""
    return [
        row(
            f"{name}/{text}_ppl",
            [value],
            [reference[text]["perplexity"]],
            unit="perplexity",
            peer_name="reference, float32",
        )
        for text, value in engine.items()
    ]


def main() -> None:
    """Judges every checkpoint by both and writes the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, texts and checkpoints; reused")
    parser.add_argument("--only", nargs="+", choices=CHECKPOINTS, default=list(CHECKPOINTS))
    parser.add_argument("--samples", type=int, default=16, help="calibration samples")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="the engine's")
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--output", type=Path, help="results file (default: results/agreement-<machine>.json)")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    material = shared.prepare(arguments.work.absolute(), samples=arguments.samples)
    judge, rows = Judge(material), []
    told = shared.sources("engine", "kernels", "quant/formats")
    for name in arguments.only:
        wanted = CHECKPOINTS[name]
        recipe = shared.make_recipe(material, wanted.methods, wanted.scheme, seed=0, file_format=wanted.format)
        folder = shared.run_ours(material, recipe)
        kept = material.work / f"engine-{shared.content(folder)}-{told}-{arguments.dtype}.json"
        try:
            engine = shared.remembered(kept, lambda folder=folder: by_engine(material, folder, arguments.dtype))
        except ValueError as error:
            say(f"{name}: not run by the engine: {error}")
            continue
        rows += make_rows(name, engine, judge.figures(folder))
        say("; ".join(f"{one['name']}: engine / reference {one['ours'] / one['peer']:.5f}" for one in rows[-2:]))
    only = "" if arguments.only == list(CHECKPOINTS) else f" --only {' '.join(arguments.only)}"
    command = f"python infra/bench/engine_agreement.py --work WORK --dtype {arguments.dtype}{only}"
    output = arguments.output or HERE / "results" / f"agreement-{cpu_class()}.json"
    write_result(output, make_result("agreement", rows, command, packages=shared.LIBRARIES))
    say(f"written: {output}")


if __name__ == "__main__":
    main()
