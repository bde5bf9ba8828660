"""The demo: three acts on a real model, with a consumer that must never see a failed request.

One: a 4-bit release goes through shadow, 10 % and 50 % to everybody. Two: a 2-bit release is stopped by the offline gate.
Three: the same 2-bit version is forced past it, gets a tenth of the traffic, and a gate of the rollout stops it.
"""

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.flows.consumer import REQUEST_TIMEOUT_S, Consumer, Served
from narrowgauge.flows.evaluate import HeldOutText
from narrowgauge.flows.fleet import Fleet, fleet
from narrowgauge.flows.prefect_server import prefect_session
from narrowgauge.flows.progress import Watch
from narrowgauge.flows.register import register_checkpoint
from narrowgauge.flows.release import EXIT_DONE, EXIT_GATE, ReleaseOutcome, ReleaseRequest
from narrowgauge.flows.rollout import RolloutOutcome, StartedRollout, start_rollout, wait_for
from narrowgauge.flows.runs import run_in_session
from narrowgauge.flows.settings import FlowSettings, read_flow_settings
from narrowgauge.flows.steps import Steps, timed
from narrowgauge.quant.recipe import Recipe, load_recipe
from narrowgauge.serving.registry import ModelVersion, Registry
from narrowgauge.serving.rollout.spec import RolloutSpec, load_rollout_spec
from narrowgauge.serving.settings import Settings

FOLDER = Path(__file__).resolve().parent
GOOD_RECIPE = FOLDER / "recipes" / "smollm2-w4a16-gptq.yaml"
BAD_RECIPE = FOLDER / "recipes" / "smollm2-w2a16-rtn.yaml"
GOOD_SPEC = FOLDER / "rollouts" / "demo.yaml"
BAD_SPEC = FOLDER / "rollouts" / "demo-bad.yaml"
TEXT = HeldOutText(windows=8, length=512)
OVERRIDE = "the demo shows how a rollout stops a bad release"
ANSWER_DEADLINE_S = 60.0
_SHARED = ("models", "work")


@dataclass(frozen=True, kw_only=True)
class Act:
    """How an act went: what its release came to, who answered meanwhile, and what was not as it must be."""

    name: str
    outcome: ReleaseOutcome
    answers: dict[str, int]
    step_s: dict[str, float]
    seconds: float
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The whole demo. `bad_revision` is the forced one's id; `problems` are those of no single act."""

    home: Path
    base: RolloutOutcome
    acts: tuple[Act, ...]
    served: Served
    bad_revision: str
    setup_s: dict[str, float]
    seconds: float
    problems: tuple[str, ...]

    @property
    def all_problems(self) -> tuple[str, ...]:
        """Everything that was not as it must be; empty: the demo went well."""
        return (*(f"{act.name}: {problem}" for act in self.acts for problem in act.problems), *self.problems)

    @property
    def bad_answers(self) -> int:
        """Answers that clients got from the bad revision."""
        return self.served.answers.get(self.bad_revision, 0)


def run_demo(settings: FlowSettings, watch: Watch, *, keep: bool = False) -> DemoResult:
    """Runs the three acts in a new folder under NG_HOME/demo. Raises what setting up raises; a bad act is a result.

    The stored checkpoints, copies of those under work/, are removed at the end unless `keep`.
    """
    started = time.monotonic()
    good, bad = load_recipe(GOOD_RECIPE), load_recipe(BAD_RECIPE)
    good_spec, bad_spec = load_rollout_spec(GOOD_SPEC), load_rollout_spec(BAD_SPEC)
    home = new_home(settings.shared.home)
    watch.line(f"demo: {home}")
    with _as_home(home), _without_copies(home, keep=keep):
        own = dataclasses.replace(read_flow_settings(), prefect_api_url=settings.prefect_api_url)
        stage = _Stage(own, watch)
        stage.resolve_base(good)
        with prefect_session(own), fleet(own.shared) as running, stage.consuming(running, good.model.name):
            stage.mark("prefect server and gateway")
            base = stage.serve_base(good, good_spec)
            acts = (
                stage.act("act one", ReleaseRequest(recipe=good, rollout=good_spec, text=TEXT), judge_act_one),
                stage.act("act two", ReleaseRequest(recipe=bad, rollout=bad_spec, text=TEXT), judge_act_two),
                stage.act(
                    "act three",
                    ReleaseRequest(recipe=bad, rollout=bad_spec, override=OVERRIDE, text=TEXT),
                    judge_act_three,
                ),
            )
            problems = stage.after_the_acts(acts)
        served = stage.served
    failures = tuple(f"failed request: {failure}" for failure in served.failures)
    rollout = acts[-1].outcome.rollout
    return DemoResult(
        home=home,
        base=base,
        acts=acts,
        served=served,
        bad_revision=rollout.revision if rollout else "",
        setup_s=stage.setup_s,
        seconds=time.monotonic() - started,
        problems=(*problems, *failures, *running.leftovers),
    )


def new_home(parent: Path) -> Path:
    """A new NG_HOME `parent`/demo/<n>: everything of its own but models/ and work/, which link to the parent's."""
    demos = parent / "demo"
    demos.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.name) for path in demos.iterdir() if path.name.isdecimal()]
    number = max(numbers, default=0) + 1
    while True:
        home = demos / str(number)
        try:
            home.mkdir()
            break
        except FileExistsError:  # another demo took the number just now
            number += 1
    for name in _SHARED:
        (parent / name).mkdir(exist_ok=True)
        (home / name).symlink_to(Path("..") / ".." / name)
    return home


def judge_act_one(outcome: ReleaseOutcome, context: "Context") -> list[str]:
    """What is wrong with an act in which the good release must reach everybody."""
    problems = []
    if outcome.exit_code != EXIT_DONE or outcome.rollout is None or not outcome.rollout.completed:
        problems.append(f"the release should have been promoted, but {describe(outcome)}")
    if context.champion is None or context.champion.digest != outcome.checkpoint.digest:
        problems.append("champion should be the released version")
    return problems


def judge_act_two(outcome: ReleaseOutcome, context: "Context") -> list[str]:
    """What is wrong with an act in which the offline gate must say no."""
    problems = []
    if outcome.exit_code != EXIT_GATE or outcome.rollout is not None or outcome.version.verdict != "rejected":
        problems.append(f"the offline gate should have rejected it, but {describe(outcome)}")
    if context.candidate is None or context.candidate.digest == outcome.checkpoint.digest:
        problems.append("candidate should still be the good version")
    return problems


def judge_act_three(outcome: ReleaseOutcome, context: "Context") -> list[str]:
    """What is wrong with an act in which the golden gate must end the forced rollout after it got some traffic."""
    problems = []
    rollout = outcome.rollout
    if outcome.exit_code != EXIT_GATE or rollout is None or rollout.phase != "Aborted" or rollout.gate != "golden":
        problems.append(f"the golden gate should have aborted the rollout, but {describe(outcome)}")
    if rollout is not None and not context.answers.get(rollout.revision):
        problems.append("the forced revision should have answered some requests")
    if context.champion is None or context.champion.digest == outcome.checkpoint.digest:
        problems.append("champion should still be the good version")
    return problems


def describe(outcome: ReleaseOutcome) -> str:
    """How a release ended, in a few words."""
    if outcome.rollout is None:
        return f"it ended registered as {outcome.version.verdict}"
    gate = f" by gate {outcome.rollout.gate}" if outcome.rollout.gate else ""
    return f"its rollout ended {outcome.rollout.phase}{gate}: {outcome.rollout.reason}"


@dataclass(frozen=True, kw_only=True)
class Context:
    """What an act is judged by besides its outcome: the aliases after it, and who answered meanwhile."""

    champion: ModelVersion | None
    candidate: ModelVersion | None
    answers: dict[str, int]


class _Stage:
    """What the acts share: settings, the consumer, the clock."""

    def __init__(self, settings: FlowSettings, watch: Watch) -> None:
        self._settings: Settings = settings.shared
        self._watch = watch
        self._consumer: Consumer | None = None
        self._mark = time.monotonic()
        self.setup_s: dict[str, float] = {}
        self.served = Served()

    def mark(self, name: str) -> None:
        """Notes the time since the last mark under this name."""
        now = time.monotonic()
        self.setup_s[name], self._mark = now - self._mark, now

    def resolve_base(self, recipe: Recipe) -> None:
        """Has the base model at hand before anything is started: a missing package is one line."""
        from narrowgauge.quant import sources

        sources.resolve(recipe.model.source, cache=self._settings.models)
        self.mark("base model")

    @contextlib.contextmanager
    def consuming(self, running: Fleet, model: str) -> Iterator[None]:
        """Has a consumer for the block, started by the first act before its rollout; keeps what it saw."""
        consumer = Consumer(f"{running.url}/v1", model)
        self._consumer = consumer
        try:
            yield
        finally:
            self.served = consumer.stop()

    def serve_base(self, recipe: Recipe, spec: RolloutSpec) -> RolloutOutcome:
        """Registers the base model and makes it the stable revision."""
        self._watch.line("base: registering it and making it the first revision")
        version = register_checkpoint(recipe.model.source, recipe.model.name, settings=self._settings)
        quick = dataclasses.replace(spec, bake_s=0.0)  # there is nothing that one could go back to
        started = start_rollout(version, quick, None, settings=self._settings, watch=self._watch)
        outcome = wait_for(started, settings=self._settings, watch=self._watch)
        if not outcome.completed:
            raise DemoError(f"the base model could not be served: {outcome.phase}: {outcome.reason}")
        self.mark("serving the base model")
        return outcome

    def act(self, name: str, request: ReleaseRequest, judge: Callable[[ReleaseOutcome, Context], list[str]]) -> Act:
        """Runs one release as a flow and judges it."""
        self._watch.line(f"\n{name}: {request.recipe.scheme_name} by {request.recipe.method_names}")
        started, before, step_s = time.monotonic(), self._seen(), dict[str, float]()
        outcome = run_in_session(request, self._watch, lambda steps: timed(self._with_consumer(steps), step_s))
        answers = self._seen().since(before)
        registry = Registry(self._settings.mlflow_tracking_uri, home=self._settings.home)
        model = request.recipe.model.name
        context = Context(
            champion=registry.by_alias(model, "champion"),
            candidate=registry.by_alias(model, "candidate"),
            answers=answers,
        )
        self._watch.line(f"{name}: {describe(outcome)}")
        return Act(
            name=name,
            outcome=outcome,
            answers=answers,
            step_s=step_s,
            seconds=time.monotonic() - started,
            problems=tuple(judge(outcome, context)),
        )

    def after_the_acts(self, acts: tuple[Act, ...]) -> list[str]:
        """Whether the consumer is answered by the champion alone now."""
        champion, consumer = acts[0].outcome.rollout, self._consumer
        if consumer is None or champion is None or not consumer.running:
            return ["the consumer never started"]
        consumer.wait_for_open(timeout_s=REQUEST_TIMEOUT_S)  # those asked before the end, the slowest included
        before = consumer.served()
        consumer.wait_for_more(consumer.in_flight, timeout_s=ANSWER_DEADLINE_S)
        others = consumer.served().since(before).keys() - {champion.revision}
        return [f"after the acts {', '.join(sorted(others))} still answered"] if others else []

    def _with_consumer(self, steps: Steps) -> Steps:
        def start(version: ModelVersion, spec: RolloutSpec, override: str | None) -> StartedRollout:
            if self._consumer is not None and not self._consumer.running:
                self._consumer.start()
                self._consumer.wait_for_more(1, timeout_s=ANSWER_DEADLINE_S)
                self._watch.line("consumer: asking, several streams at once")
                _leave_a_core()
            return steps.start_rollout(version, spec, override)

        return dataclasses.replace(steps, start_rollout=start)

    def _seen(self) -> Served:
        return self._consumer.served() if self._consumer is not None else Served()


def _leave_a_core() -> None:
    """From now on a replica works beside us: threads of ours that wait for a core that it has would slow both down."""
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() - 1))


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why."""


@contextlib.contextmanager
def _without_copies(home: Path, *, keep: bool) -> Iterator[None]:
    """Removes the stored checkpoints at the end, also after Ctrl-C, once nobody serves them any more."""
    try:
        yield
    finally:
        if not keep:
            shutil.rmtree(home / "artifacts", ignore_errors=True)


@contextlib.contextmanager
def _as_home(home: Path) -> Iterator[None]:
    """Makes `home` the NG_HOME of this process and its children, and leaves every other place of ours at its default."""
    ours = {
        name: value for name, value in os.environ.items() if name.startswith("NG_") or name == "MLFLOW_TRACKING_URI"
    }
    for name in ours:
        del os.environ[name]
    os.environ["NG_HOME"] = str(home)
    try:
        yield
    finally:
        del os.environ["NG_HOME"]
        os.environ.update(ours)
