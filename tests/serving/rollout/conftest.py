"""A small world on real sockets: the real gateway, the real controller, replicas that are real processes without a model."""

import collections
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from narrowgauge.serving.lifecycle import identify
from narrowgauge.serving.rollout.client import ControllerUnreachable, RolloutClient
from narrowgauge.serving.rollout.spec import read_spec
from narrowgauge.serving.settings import read_settings
from narrowgauge.serving.sockets import admin_client

HERE = Path(__file__).parent
GOLDEN = [{"prompt": f"golden prompt number {number}", "max_tokens": 8} for number in range(6)]


def wait_for(condition, *, timeout_s=30.0, what="condition"):
    """The condition's first true value."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not come true in {timeout_s} s"
        time.sleep(0.02)
    return value


class Consumer:
    """Clients that keep asking the gateway and write down what they got."""

    def __init__(self, url, model, workers=4):
        self.url, self.model = url, model
        self.statuses, self.texts = collections.Counter(), collections.Counter()
        self.failures = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def _run(self):
        body = {"model": self.model, "prompt": "hello", "max_tokens": 2}
        with httpx.Client(timeout=20, trust_env=False) as client:
            while not self._stop.wait(0.02):  # clients that think between requests leave the processors to the rest
                try:
                    response = client.post(f"{self.url}/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    continue
                self.statuses[response.status_code] += 1
                if response.status_code == 200:
                    self.texts[response.json()["choices"][0]["text"]] += 1
                else:
                    self.failures.append(response.text)

    def wait_for_more(self, answers):
        wanted = self.statuses.total() + answers
        wait_for(lambda: self.statuses.total() >= wanted, what=f"{answers} more answers")

    def close(self):
        self._stop.set()
        for thread in self._threads:
            thread.join()


class World:
    """One NG_HOME with its processes."""

    def __init__(self, home):
        self.home = home
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("NG_")} | {"NG_HOME": str(home)}
        self.environment["FAKE_REPLICA_OWNER"] = str(os.getpid())
        self.settings = read_settings({"NG_HOME": str(home)})
        self.client = RolloutClient(self.settings.admin_url)
        self.processes = []
        self.gateway = self.controller = self.url = None
        self._numbers = itertools.count()
        home.mkdir(parents=True)

    def start_gateway(self):
        flags = ["--no-controller", "--port", "0", "--die-with", str(os.getpid()), "--probe-interval", "0.2"]
        code = "import typer; from narrowgauge.cli.gateway import gateway; typer.run(gateway)"
        self.gateway = self._spawn([sys.executable, "-c", code, *flags], stdout=subprocess.PIPE)
        line = self.gateway.stdout.readline().decode()
        assert "listening on http" in line, self.log()
        self.url = line.split()[-1]

    def start_controller(self, *flags):
        script = str(HERE / "run_controller.py")
        self.controller = self._spawn([sys.executable, script, str(os.getpid()), *flags])
        wait_for(self.client.answers, what="the controller's admin API")

    def run_once(self):
        """One pass of a controller that then ends; its replicas go on."""
        command = [sys.executable, str(HERE / "run_controller.py"), str(os.getpid()), "--once"]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)

    def checkpoint(self, **knobs):
        """A fake checkpoint: (uri, digest)."""
        number = next(self._numbers)
        path = self.home / f"checkpoint-{number}.json"
        path.write_text(json.dumps(knobs))
        return str(path), f"{number:064x}"

    def log(self):
        logs = [self.home / "processes.log", *(self.home / "logs").glob("*.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in logs if path.exists())

    def close(self):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait(20)
            if process.stdout:
                process.stdout.close()
        records = [json.loads(path.read_text()) for path in (self.settings.run / "replicas").glob("*.json")]
        pids = [record["pid"] for record in records if record["pid"] is not None and identify(record["pid"])]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(map(identify, pids)), what="the replicas' end")

    def _spawn(self, command, stdout=None):
        with (self.home / "processes.log").open("ab") as log:
            process = subprocess.Popen(command, env=self.environment, stdout=stdout or log, stderr=log)
        self.processes.append(process)
        return process


class Tenant:
    """One model of a world, with its rollouts and its consumer."""

    def __init__(self, world, model):
        self.world, self.client, self.model = world, world.client, model
        self.consumer = None

    def consume(self, workers=4):
        self.consumer = Consumer(self.world.url, self.model, workers)
        return self.consumer

    def spec(self, **changes):
        steps = [
            {"shadow": 1.0, "until": {"requests": 12}},
            {"traffic": 0.1, "until": {"requests": 6}},
            {"traffic": 0.5, "until": {"requests": 40}},
        ]
        gates = [
            {"name": "readiness"},
            {"name": "errors", "max_ratio": 0.05, "min_requests": 5},
            {"name": "golden", "prompts": GOLDEN, "top1_min": 0.8},
        ]
        times = {"deadline_s": 20.0, "bake_s": 0.3, "drain_s": 5.0, "promote_deadline_s": 10.0}
        return read_spec({"version": 1, "model": self.model, "steps": steps, "gates": gates, **times, **changes})

    def start_rollout(self, *, spec=None, override=None, **knobs):
        spec = spec or self.spec()
        uri, digest = self.world.checkpoint(**knobs)
        revision = spec.revision(uri=uri, checkpoint_digest=digest)
        return self.start(revision, spec, override=override)

    def start(self, revision, spec, override=None):
        return self.client.start(model=self.model, revision=revision, spec=spec, override=override)

    def finish(self, rollout, timeout_s=60.0):
        return self.client.wait(rollout["id"], timeout_s=timeout_s, poll_s=0.05)

    def serve_first(self):
        """Rolls a good first revision out and returns its id."""
        done = self.finish(self.start_rollout())
        assert done["phase"] == "Completed", done
        return done["revision_id"]

    def traffic(self):
        with admin_client(self.world.settings.gateway_admin_url) as client:
            response = client.get(f"/admin/v1/traffic/{self.model}")
        return response.json() if response.status_code == 200 else None

    def replicas(self):
        return [replica for replica in self.client.replicas() if replica["model"] == self.model]

    def phases(self, rollout):
        return [entry["phase"] for entry in self.client.get(rollout["id"])["phases"]]

    def wait_phase(self, rollout, *phases):
        def reached():
            try:
                return self.client.get(rollout["id"])["phase"] in phases
            except ControllerUnreachable:
                return False

        wait_for(reached, what=f"phase {phases}")

    def log(self):
        return self.world.log()

    def close(self):
        if self.consumer:
            self.consumer.close()


@pytest.fixture
def world(tmp_path):
    """A running gateway and controller of the test's own, for those that stop or kill them."""
    yield from _running(tmp_path / "home")


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory):
    """A running gateway and controller that several tests share, each with a model of its own."""
    yield from _running(tmp_path_factory.mktemp("shared") / "home")


@pytest.fixture
def tenant(shared_world, request):
    """A model of the test's own in the shared world."""
    yield from _closing(Tenant(shared_world, request.node.name.replace("_", "-")[:60]))


@pytest.fixture
def lone_tenant(world):
    """The only model of a world of the test's own."""
    yield from _closing(Tenant(world, "tiny"))


def _running(home):
    world = World(home)
    try:
        world.start_gateway()
        world.start_controller()
        yield world
    finally:
        world.close()


def _closing(tenant):
    try:
        yield tenant
    finally:
        tenant.close()
