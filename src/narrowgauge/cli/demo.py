"""demo: a good release, a bad one stopped offline, and the bad one forced and stopped by a rollout's gate."""

import json
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from narrowgauge.flows.demo import Act, DemoResult


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Keep this run's stored checkpoints.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Quantize, judge, register and roll out a real model under traffic; then stop a bad release, twice."""
    from narrowgauge.cli.main import EXIT_FAILED
    from narrowgauge.flows.demo import run_demo
    from narrowgauge.flows.progress import Terminal
    from narrowgauge.flows.settings import read_flow_settings

    with Terminal() as watch:
        result = run_demo(read_flow_settings(), watch, keep=keep)
    if as_json:
        print(json.dumps(_summary(result)))
    else:
        _print(result)
    if result.all_problems:
        raise typer.Exit(EXIT_FAILED)


def _summary(result: "DemoResult") -> dict[str, Any]:
    from narrowgauge.quant.formats.read import plain

    return {
        "ok": not result.all_problems,
        "problems": list(result.all_problems),
        "home": str(result.home),
        "seconds": result.seconds,
        "setup_s": result.setup_s,
        "acts": [
            {
                "name": act.name,
                "exit_code": act.outcome.exit_code,
                "verdict": act.outcome.version.verdict,
                "reasons": list(act.outcome.judgement.reasons),
                "figures": act.outcome.judgement.report.figures(),
                "size_bytes": act.outcome.checkpoint.size_bytes,
                "base_size_bytes": act.outcome.checkpoint.base_size_bytes,
                "rollout": plain(act.outcome.rollout),
                "answers": act.answers,
                "step_s": act.step_s,
                "seconds": act.seconds,
                "problems": list(act.problems),
            }
            for act in result.acts
        ],
        "answers": dict(result.served.answers),
        "stream_tokens_s": dict(result.served.stream_tokens_s),
        "failures": len(result.served.failures),
        "bad_revision": result.bad_revision,
        "bad_answers": result.bad_answers,
    }


def _print(result: "DemoResult") -> None:
    console = Console()
    console.print(_revisions(result))
    console.print(_acts(result))
    total = result.served.total
    console.print(
        f"consumer: {total} answers, {result.bad_answers} of them from the bad revision, "
        f"failures {len(result.served.failures)}; {result.seconds:.0f} s in all"
    )
    console.print("The base's weights had 4 bits once: its figures compare methods on this base, nothing else.")
    for problem in result.all_problems:
        console.print(f"went wrong: {problem}", style="red", markup=False, highlight=False)
    console.print("Registry, rollouts and logs of this run:")
    line = f"  NG_HOME={shlex.quote(str(result.home))} narrowgauge list"
    console.print(line, markup=False, highlight=False, soft_wrap=True)  # to be copied whole


def _revisions(result: "DemoResult") -> Table:
    """Size, quality, speed and answers of the base, the good revision and the bad one."""
    good, bad = result.acts[0].outcome, result.acts[-1].outcome
    table = Table("", title="Revisions (tok/s: of one stream among several, the median)")
    for heading in ("revision", "weights", "perplexity", "KL mean", "tok/s", "answers"):
        table.add_column(heading, no_wrap=True)
    report = good.judgement.report
    rows: list[tuple[str, str, int, float | None, float | None]] = [
        ("base", result.base.revision, good.checkpoint.base_size_bytes, report.base_perplexity, None)
    ]
    for outcome in (good, bad):
        if outcome.rollout is not None:
            figures = outcome.judgement.report
            name, size = outcome.checkpoint.scheme, outcome.checkpoint.size_bytes
            rows.append((name, outcome.rollout.revision, size, figures.perplexity, figures.kl_mean))
    for name, revision, size, perplexity, kl in rows:
        speed = result.served.stream_tokens_s.get(revision)
        table.add_row(
            name,
            revision,
            f"{size / 1e6:.1f} MB",
            "-" if perplexity is None else f"{perplexity:.4g}",
            "-" if kl is None else f"{kl:.3f}",
            "-" if speed is None else f"{speed:.1f}",
            str(result.served.answers.get(revision, 0)),
        )
    return table


def _acts(result: "DemoResult") -> Table:
    table = Table("act", "end", "answers by revision", "time", title="Acts", show_lines=True)
    setup = "\n".join(f"{name} {seconds:.0f} s" for name, seconds in result.setup_s.items())
    table.add_row("setting up", setup, "", f"{sum(result.setup_s.values()):.0f} s")
    for act in result.acts:
        answers = "\n".join(f"{revision} {count}" for revision, count in sorted(act.answers.items()))
        table.add_row(act.name, Text(_end(act)), answers, f"{act.seconds:.0f} s")
    return table


def _end(act: "Act") -> str:
    """Verdict, gate and figures, and how long the steps and the rollout's phases took."""
    from narrowgauge.flows.demo import describe

    outcome = act.outcome
    lines = [f"offline gate: {outcome.version.verdict}", *outcome.judgement.reasons]
    lines.append(f"{describe(outcome)} (exit code {outcome.exit_code})")
    reused = "; quantized by an earlier run" if outcome.checkpoint.reused else ""
    lines.append(
        "; ".join(f"{name.replace('_', ' ')} {seconds:.0f} s" for name, seconds in act.step_s.items()) + reused
    )
    if outcome.rollout is not None:
        lines.append(", ".join(f"{phase.phase} {phase.seconds:.0f} s" for phase in outcome.rollout.phases))
    return "\n".join(lines)
