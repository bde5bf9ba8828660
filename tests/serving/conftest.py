"""Replicas to test against: real processes, and a tiny random Llama that loads in a moment."""

import json
import shutil
import subprocess
import sys
import threading

import pytest

LISTEN_S, LOAD_S, STOP_S = 60, 120, 60


class ReplicaProcess:
    """A `narrowgauge serve` child; reads its events, so that nothing is waited for by sleeping."""

    def __init__(self, *arguments, command=(sys.executable, "-m", "narrowgauge", "serve"), **options):
        self.child = subprocess.Popen(
            [*command, *map(str, arguments), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        self.errors = ""
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        self._watchdog = threading.Timer(LISTEN_S + LOAD_S, self.child.kill)
        self._watchdog.start()
        self.url = self.event("listening")["url"]

    def _read_errors(self):
        self.errors = self.child.stderr.read()

    def event(self, name):
        """The next event, which must be of this name."""
        line = self.child.stdout.readline()
        if not line:
            self.child.wait(STOP_S)
            self._reader.join()
            pytest.fail(f"the replica ended with {self.child.returncode} before {name!r}: {self.errors}")
        event = json.loads(line)
        assert event["event"] == name
        return event

    def ready(self):
        """Waits until it serves."""
        self.facts = self.event("ready")
        return self

    def wait(self):
        """(exit code, stderr) once it has ended."""
        code = self.child.wait(STOP_S)
        self._reader.join()
        self._watchdog.cancel()
        return code, self.errors

    def close(self):
        """Kills it if it still runs."""
        self.child.kill()
        self.wait()
        self.child.stdout.close()
        self.child.stderr.close()


@pytest.fixture(scope="session")
def replica(smollm2, tmp_path_factory):
    """One replica of the real model for all tests that leave it as they found it."""
    admin = tmp_path_factory.mktemp("run") / "replica.sock"
    arguments = ("--port", 0, "--threads", 1, "--served-model-name", "smollm2", "--revision", "rev-1")
    process = ReplicaProcess(smollm2, *arguments, "--admin-socket", admin, "--max-model-len", 2048).ready()
    process.admin = admin
    yield process
    process.close()


@pytest.fixture(scope="session")
def tiny_llama(smollm2, tmp_path_factory):
    """A random two-layer Llama in float32 with SmolLM2's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2 / name, folder / name)
    return folder


@pytest.fixture
def start_replica(tiny_llama):
    """Starts replicas of the tiny model (or of what `checkpoint` names) that end with the test."""
    processes = []

    def start(*arguments, checkpoint=tiny_llama, **options):
        process = ReplicaProcess(checkpoint, "--threads", 1, *arguments, **options)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.close()
