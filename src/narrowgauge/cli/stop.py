"""`narrowgauge stop`: ends gateway, controller and replicas."""

import json
import sys
from typing import Annotated

import typer

Timeout = Annotated[float, typer.Option(min=0, help="Seconds each process gets to finish its requests.")]
Json = Annotated[bool, typer.Option("--json", help="What was stopped as JSON on stdout.")]


def stop(timeout: Timeout = 60.0, as_json: Json = False) -> None:
    """Stop what runs over this NG_HOME: the gateway (it drains), the controller, then the replicas."""
    from narrowgauge.serving.settings import read_settings
    from narrowgauge.serving.stop import stop as stop_all

    settings, lines = read_settings(), list[str]()

    def told(line: str) -> None:
        lines.append(line)
        if not as_json:
            print(line, flush=True)

    if not stop_all(settings, timeout_s=timeout, told=told):
        print(f"nothing runs over {settings.home}", file=sys.stderr)
    if as_json:
        print(json.dumps(lines))
