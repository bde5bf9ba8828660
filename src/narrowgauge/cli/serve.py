"""`narrowgauge serve`: one replica."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

_Count = int | None
Checkpoint = Annotated[
    str, typer.Argument(help="Folder, file://, models:/NAME@ALIAS, models:/NAME/VERSION, hf: or pypi: URI.")
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one and prints it.")]
Descriptor = Annotated[_Count, typer.Option(help="Inherited socket to serve on, in place of --host and --port.")]
Name = Annotated[str | None, typer.Option(help="Name that clients ask for; default from CHECKPOINT.")]
Revision = Annotated[str | None, typer.Option(help="Id sent with every answer; default from the digest.")]
Digest = Annotated[str | None, typer.Option(help="Refuse a checkpoint of another digest.")]
AdminSocket = Annotated[Path | None, typer.Option(help="Unix socket (mode 600) for POST /drain.")]
DieWith = Annotated[_Count, typer.Option(help="End when this parent process ends.", metavar="PID")]
DrainTimeout = Annotated[float, typer.Option(min=0, help="Seconds that running answers get after SIGTERM.")]
DType = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
MaxModelLen = Annotated[_Count, typer.Option(help="Tokens of prompt and answer; default the model's.")]
MaxNumSeqs = Annotated[int, typer.Option(help="Sequences computed together.")]
MaxBatched = Annotated[int, typer.Option(help="Tokens of one step, prompts and answers.")]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block of the KV cache.")]
KvBlocks = Annotated[_Count, typer.Option(help="Blocks of the KV cache; default by free memory.")]
KvBytes = Annotated[_Count, typer.Option(help="Bytes of the KV cache, in place of --num-kv-blocks.")]
Attention = Annotated[str, typer.Option(help="Attention backend; auto chooses by device.")]
Linear = Annotated[str, typer.Option(help="Quantized Linears: auto, int4 (packed kernel) or dequantize (at load).")]
Kernels = Annotated[str, typer.Option(help="auto, reference (torch) or triton.")]
MaxWaiting = Annotated[int, typer.Option(help="Requests queued before new ones get 503.")]
Threads = Annotated[_Count, typer.Option(help="CPU threads of torch; default torch's.")]
Seed = Annotated[int, typer.Option(help="Where requests without a seed get theirs from.")]
Json = Annotated[bool, typer.Option("--json", help="Events as JSON lines on stdout.")]


def serve(
    context: typer.Context,
    checkpoint: Checkpoint,
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    fd: Descriptor = None,
    served_model_name: Name = None,
    revision: Revision = None,
    digest: Digest = None,
    admin_socket: AdminSocket = None,
    die_with: DieWith = None,
    drain_timeout: DrainTimeout = 30.0,
    dtype: DType = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 32,
    max_num_batched_tokens: MaxBatched = 256,
    block_size: BlockSize = 16,
    num_kv_blocks: KvBlocks = None,
    kv_cache_bytes: KvBytes = None,
    attention_backend: Attention = "auto",
    linear: Linear = "auto",
    kernels: Kernels = "auto",
    max_waiting: MaxWaiting = 1024,
    threads: Threads = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Serve one checkpoint over HTTP with OpenAI's endpoints, until SIGTERM drains it."""
    from narrowgauge.serving.engine_args import ENGINE_FLAGS
    from narrowgauge.serving.replica import ReplicaOptions, run_replica
    from narrowgauge.serving.settings import read_settings

    options = ReplicaOptions(
        checkpoint=checkpoint,
        host=host,
        port=port,
        descriptor=fd,
        served_model_name=served_model_name,
        revision=revision,
        digest=digest,
        admin_socket=admin_socket,
        die_with=die_with,
        drain_timeout_s=drain_timeout,
        engine_args={name: context.params[name] for name in ENGINE_FLAGS},
    )
    sys.exit(run_replica(options, read_settings(), on_event=_print_json if as_json else _print))


def _print(event: str, facts: Mapping[str, Any]) -> None:
    from narrowgauge.serving.lifecycle import announce

    if event == "listening":
        announce("replica", facts["socket"])
    elif event == "ready":
        text = "replica ready after {seconds:.1f} s: {model}, revision {revision}, digest {digest}"
        print(text.format(**facts), file=sys.stderr, flush=True)
    else:
        print(f"replica draining: {facts['in_flight']} requests in flight", file=sys.stderr, flush=True)


def _print_json(event: str, facts: Mapping[str, Any]) -> None:
    from narrowgauge.serving.lifecycle import socket_url

    if event == "listening":
        facts = {"url": socket_url(facts["socket"])}
    print(json.dumps({"event": event, **facts}), flush=True)
