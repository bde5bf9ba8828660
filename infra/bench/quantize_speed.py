"""How long GPTQ takes: ours and other programs on the same model, tokens and scheme, in turn on one machine.

    python infra/bench/quantize_speed.py --work WORK --llmcompressor PEER/bin/python --gptqmodel PEER/bin/python

Every run is a process of its own that reads SmolLM2, calibrates, rounds to W4 with groups of 64 and saves; a program's
imports do not count. Ours also tokenizes the calibration text, which the others are handed as token ids. Runs alternate, so
that a slow hour of the machine is everybody's; nothing is taken from an earlier run. Writes results/quantize-<machine>.json
with the fastest run of each (a machine can disturb a run, but not speed it up) and the extremes.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import quality_material as shared
import torch
from peer_runs import BenchError, quantize_by, threads, told_versions
from quality_material import W4G64, Material, say
from quant_quality import CASES, NAMES

from narrowgauge.cli.results import make_result, write_result
from narrowgauge.kernels.hardware import cpu_class

HERE = Path(__file__).resolve().parent
_METHODS = [{"name": "gptq"}]


def run_ours(material: Material) -> float:
    """Seconds of `narrowgauge quantize` in a process of its own; its checkpoint is thrown away."""
    recipe, output = material.work / "speed-recipe.yaml", material.work / "speed-ours"
    recipe.write_text(json.dumps(shared.recipe_of(material, _METHODS, W4G64, seed=0)))
    shutil.rmtree(output, ignore_errors=True)
    code = (
        "import json, sys, torch\n"
        "from pathlib import Path\n"
        "from narrowgauge.quant.recipe import load_recipe\n"
        "from narrowgauge.quant.pipeline.sequential import quantize\n"
        "from narrowgauge.quant.sources import resolve\n"
        "recipe, cache, output, threads = sys.argv[1:]\n"
        "torch.set_num_threads(int(threads))\n"
        "recipe = load_recipe(Path(recipe))\n"
        "base = resolve(recipe.model.source, cache=Path(cache))\n"
        "result = quantize(recipe, base, Path(output))\n"
        "assert not result.reused and not any(layer.fallback for layer in result.layers)\n"
        "print(json.dumps(result.seconds))"
    )
    arguments = [str(recipe), str(material.work / "models"), str(output), str(torch.get_num_threads())]
    try:
        ran = subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    except subprocess.CalledProcessError as error:
        raise BenchError(f"narrowgauge: {error}") from None
    shutil.rmtree(output)
    return float(json.loads(ran.stdout.splitlines()[-1]))


def make_rows(
    ours: list[float], peers: dict[str, list[float]], names: dict[str, str], *, tokens: str
) -> list[dict[str, Any]]:
    """One row a peer; ratio = peer / ours of the fastest runs, above 1 where ours is faster."""
    return [
        {
            "name": f"gptq_w4g64/{tokens}_{peer}",
            "unit": "s",
            "ours": round(min(ours), 2),
            "peer": round(min(seconds), 2),
            "peer_name": names[peer],
            "ratio": round(min(seconds) / min(ours), 3),
            "ours_min": round(min(ours), 2),
            "ours_max": round(max(ours), 2),
            "peer_min": round(min(seconds), 2),
            "peer_max": round(max(seconds), 2),
        }
        for peer, seconds in peers.items()
    ]


def main() -> None:
    """Runs all in turn and writes the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the model, texts and checkpoints")
    for peer, name in NAMES.items():
        parser.add_argument(f"--{peer}", type=Path, metavar="PYTHON", help=f"of an environment that has {name}")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each")
    parser.add_argument("--samples", type=int, default=shared.SAMPLES)
    parser.add_argument("--length", type=int, default=shared.LENGTH)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="results file (default: results/quantize-<machine>.json)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pythons = {peer: path.absolute() for peer in NAMES if (path := getattr(arguments, peer)) is not None}
    if not pythons:
        parser.error("name at least one peer: --llmcompressor PYTHON, --gptqmodel PYTHON")
    material = shared.prepare(arguments.work.absolute(), samples=arguments.samples, length=arguments.length)
    recipe = shared.make_recipe(material, _METHODS, W4G64, seed=0)
    ours: list[float] = []
    seconds: dict[str, list[float]] = {peer: [] for peer in pythons}
    versions: dict[str, dict[str, str]] = {}
    for _ in range(arguments.rounds):
        ours.append(run_ours(material))
        say(f"narrowgauge: {ours[-1]:.1f} s")
        for peer, python in pythons.items():
            told = [*CASES["gptq_w4g64"].peers[peer], *threads()]
            now = str(time.time_ns())
            run = quantize_by(material, recipe, f"peer_{peer}.py", python=python, arguments=told, again=now)
            run.discard()
            seconds[peer].append(run.seconds)
            versions[peer] = run.versions
    names = {peer: f"{NAMES[peer]} {found[peer]}" for peer, found in versions.items()}
    rows = make_rows(ours, seconds, names, tokens=f"{arguments.samples}x{arguments.length}")
    command = (
        f"python infra/bench/quantize_speed.py --work WORK {' '.join(f'--{p} {p.upper()}/bin/python' for p in pythons)}"
    )
    result = make_result(
        "quantize",
        rows,
        f"{command} --rounds {arguments.rounds} --threads {arguments.threads}",
        packages=shared.LIBRARIES,
        peer_versions=told_versions(versions),
    )
    output = arguments.output or HERE / "results" / f"quantize-{cpu_class()}.json"
    write_result(output, result)
    say(f"written: {output}")


if __name__ == "__main__":
    main()
