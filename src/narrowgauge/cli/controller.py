"""`narrowgauge controller`: the process that carries rollouts out."""

from typing import Annotated

import typer

Once = Annotated[bool, typer.Option(help="One pass over all rollouts, then exit (for cron).")]
Ephemeral = Annotated[bool, typer.Option(help="Replicas end with this process instead of outliving it.")]
DieWith = Annotated[int | None, typer.Option(help="End when this parent process ends.", metavar="PID")]
Json = Annotated[bool, typer.Option("--json", help="With --once: the unfinished rollouts as JSON on stdout.")]


def controller(once: Once = False, ephemeral: Ephemeral = False, die_with: DieWith = None, json: Json = False) -> None:
    """Decide and carry out rollouts: start replicas, set traffic, judge gates, move champion."""
    from narrowgauge.serving.rollout.daemon import ControllerOptions, run_controller
    from narrowgauge.serving.settings import read_settings

    if json and not once:
        raise typer.BadParameter(
            "--json tells what one pass left; use it with --once (else: narrowgauge rollout status)"
        )
    settings = read_settings()
    run_controller(settings, ControllerOptions(once=once, ephemeral=ephemeral, die_with=die_with))
    if json:
        from narrowgauge.cli.rollout import print_json
        from narrowgauge.serving.rollout.admin import describe
        from narrowgauge.serving.rollout.store import Store

        store = Store(settings.store_url)
        print_json([describe(state, store.events(state.rollout.id)) for state in store.states(unfinished=True)])
        store.close()
