"""`narrowgauge gateway`: the front door."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

_Seconds = float
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one and prints it.")]
NoController = Annotated[bool, typer.Option("--no-controller", help="Start no controller.")]
ControllerArg = Annotated[list[str] | None, typer.Option(help="An argument for the controller it starts; repeatable.")]
Ephemeral = Annotated[
    bool, typer.Option("--ephemeral", help="The controller dies with the gateway, however that ends.")
]
DieWith = Annotated[int | None, typer.Option(metavar="PID", help="End when this parent process ends.")]
Drain = Annotated[_Seconds, typer.Option(min=0, help="Seconds that open requests get after SIGTERM.")]
Connect = Annotated[_Seconds, typer.Option(help="Seconds to connect to a replica.")]
Idle = Annotated[_Seconds, typer.Option(help="Seconds of silence after which a stream is given up.")]
Answer = Annotated[_Seconds, typer.Option(help="Seconds an answer without stream may take.")]
EarlyHeaders = Annotated[_Seconds, typer.Option(help="Seconds of silence after which a stream's headers go out.")]
CommentEvery = Annotated[_Seconds, typer.Option(help="Seconds of silence after which a stream gets a comment.")]
ProbeInterval = Annotated[_Seconds, typer.Option(help="Seconds between probes of a replica.")]
ProbeTimeout = Annotated[_Seconds, typer.Option(help="Seconds a probe may take.")]
ProbeMisses = Annotated[int, typer.Option(help="Missed probes after which a replica is out.")]
ProbeReturns = Annotated[int, typer.Option(help="Good probes after which it is back.")]
MaxBody = Annotated[int, typer.Option(help="Bytes of the largest request body.")]
Shadows = Annotated[int, typer.Option(help="Shadow copies at a time; further ones are dropped.")]
Json = Annotated[bool, typer.Option("--json", help="Events as JSON lines on stdout.")]

_CONFIG = (
    *("connect_s", "idle_s", "answer_s", "early_headers_s", "comment_s", "drain_s"),
    *("max_body_bytes", "shadow_in_flight"),
)
_FLAGS = {"connect_s": "connect_timeout", "idle_s": "idle_timeout", "answer_s": "answer_timeout"}
_FLAGS |= {"early_headers_s": "early_headers_after", "comment_s": "comment_every", "drain_s": "drain_timeout"}


def gateway(
    context: typer.Context,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    *,
    no_controller: NoController = False,
    controller_arg: ControllerArg = None,
    ephemeral: Ephemeral = False,
    die_with: DieWith = None,
    drain_timeout: Drain = 30.0,
    connect_timeout: Connect = 2.0,
    idle_timeout: Idle = 60.0,
    answer_timeout: Answer = 600.0,
    early_headers_after: EarlyHeaders = 2.0,
    comment_every: CommentEvery = 5.0,
    probe_interval: ProbeInterval = 1.0,
    probe_timeout: ProbeTimeout = 1.0,
    probe_misses: ProbeMisses = 3,
    probe_returns: ProbeReturns = 2,
    max_body_bytes: MaxBody = 8 << 20,
    shadow_in_flight: Shadows = 16,
    as_json: Json = False,
) -> None:
    """Serve the OpenAI API: split traffic between revisions, repeat what a replica lost, write request records.

    SIGTERM or Ctrl-C drains it and ends it and the controller that it started; replicas go on, and the next gateway finds
    them. `narrowgauge stop` ends all of it in the right order.
    """
    from narrowgauge.serving.gateway.config import GatewayConfig
    from narrowgauge.serving.gateway.process import Launch, run_gateway
    from narrowgauge.serving.gateway.replicas import ProbeRules
    from narrowgauge.serving.settings import read_settings

    probes = ProbeRules(interval_s=probe_interval, timeout_s=probe_timeout, misses=probe_misses, returns=probe_returns)
    values = {name: context.params[_FLAGS.get(name, name)] for name in _CONFIG}
    launch = Launch(
        host=host,
        port=port,
        controller=not no_controller,
        controller_args=tuple(controller_arg or ()),
        ephemeral=ephemeral,
        die_with=die_with,
    )
    config = GatewayConfig(probes=probes, **values)
    run_gateway(config, launch, read_settings(), on_event=_print_json if as_json else _print)


def _print(event: str, facts: Mapping[str, Any]) -> None:
    import sys

    from narrowgauge.serving.lifecycle import announce

    if event == "listening":
        announce("gateway", facts["socket"])
    else:
        print(f"gateway {event}: {facts['in_flight']} requests in flight", file=sys.stderr, flush=True)


def _print_json(event: str, facts: Mapping[str, Any]) -> None:
    from narrowgauge.serving.lifecycle import socket_url

    if event == "listening":
        facts = {"url": socket_url(facts["socket"])}
    print(json.dumps({"event": event, **facts}), flush=True)
