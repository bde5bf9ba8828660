"""`narrowgauge evaluate`: perplexity of a checkpoint, its distance from a reference, its layers, its answers to tasks."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from narrowgauge.flows.progress import Terminal
    from narrowgauge.quant.evaluate.multiple_choice import TaskRequest
    from narrowgauge.quant.evaluate.perplexity import LogitsSource
    from narrowgauge.quant.evaluate.report import EvalReport
    from narrowgauge.quant.evaluate.windows import Cut, HeldOut
    from narrowgauge.quant.sources import LocalModel


class Via(StrEnum):
    """What computes the logits."""

    reference = "reference"
    engine = "engine"


class Part(StrEnum):
    """Which part of a text is scored."""

    heldout = "heldout"
    all = "all"


class Bos(StrEnum):
    """What begins a window."""

    auto = "auto"
    none = "none"
    once = "once"
    each = "each"


class Dtype(StrEnum):
    """The dtype of activations."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class AttentionChoice(StrEnum):
    """transformers' attention implementations."""

    sdpa = "sdpa"
    eager = "eager"


TEXT_HELP = (
    "Held-out text: pydoc, a .txt, .jsonl or .parquet file, hub:NAME, wikitext2[:FILE] (as GPTQ's scripts take it)."
)
WINDOWS_HELP = "Windows of text to score, 0: all.  [default: 8; wikitext2: all]"
BOS_HELP = (
    "BOS before each window as the tokenizer has it (auto), none, once before the text, or each.  [default: auto]"
)
INPUTS_HELP = "Round inputs of Linears as the schemes say; off shows what it costs."

# What is scored.
Against = Annotated[str | None, typer.Option(metavar="REF", help="The model to compare with, usually its base.")]
Text = Annotated[str, typer.Option(help=TEXT_HELP)]
PartOption = Annotated[Part, typer.Option(help="The half that calibration never sees, or all of the text.")]
Windows = Annotated[int | None, typer.Option(min=0, help=WINDOWS_HELP)]
Length = Annotated[int | None, typer.Option(min=2, help="Tokens of a window.  [default: 512; wikitext2: 2048]")]
Stride = Annotated[int | None, typer.Option(min=1, help="Tokens between two windows; only new tokens are scored.")]
BosOption = Annotated[Bos | None, typer.Option(help=BOS_HELP)]
# How it is computed.
With = Annotated[Via, typer.Option("--with", help="Compute logits by transformers' modules, or by our engine.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Activations; auto is what suits the processor.")]
Device = Annotated[str, typer.Option(help="Where the reference runs: cpu, cuda, cuda:1, auto.")]
Attention = Annotated[AttentionChoice | None, typer.Option(help="The reference's attention.  [default: the model's]")]
Batch = Annotated[int, typer.Option(min=1, help="Windows at a time; changes no figure.")]
RoundInputs = Annotated[bool, typer.Option("--round-activations/--no-round-activations", help=INPUTS_HELP)]
RoundKV = Annotated[bool, typer.Option("--round-kv/--no-round-kv", help="The same for stored keys and values.")]
# More figures.
Layers = Annotated[int, typer.Option(min=0, help="Compare layer by layer on so many windows (needs --against).")]
Tasks = Annotated[str | None, typer.Option(help="lm-eval tasks, such as arc_easy,hellaswag (extra lm-eval).")]
TasksPath = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder with task YAMLs of your own.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Questions of each task.  [default: all]")]
FewShot = Annotated[int | None, typer.Option(min=0, help="Examples before each question.  [default: the task's]")]
# What comes out.
Output = Annotated[Path | None, typer.Option(metavar="DIR", help="Write report.json, report.md, report.html there.")]
Compare = Annotated[
    list[Path] | None, typer.Option(metavar="REPORT", help="A report.json to set beside this one; may be repeated.")
]
Note = Annotated[list[str] | None, typer.Option(help="A remark for the report; may be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]


@dataclass(frozen=True, kw_only=True)
class _How:
    """How logits are computed."""

    via: Via
    dtype: Dtype
    device: str
    attention: AttentionChoice | None
    batch: int
    round_activations: bool
    round_kv: bool

    def refuse_engine(self) -> None:
        """Ends with a usage error for options of the reference that the engine would ignore."""
        given = [
            option
            for option, differs in (
                ("--device", self.device != "cpu"),
                ("--attention", self.attention is not None),
                ("--no-round-activations", not self.round_activations),
                ("--no-round-kv", not self.round_kv),
            )
            if differs
        ]
        if self.via is Via.engine and given:
            raise typer.BadParameter(f"{', '.join(given)}: only with --with reference")


def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint to judge: a folder, file://, hf: or pypi: URI.")],
    against: Against = None,
    text: Text = "pydoc",
    part: PartOption = Part.heldout,
    windows: Windows = None,
    length: Length = None,
    stride: Stride = None,
    bos: BosOption = None,
    via: With = Via.reference,
    dtype: DtypeOption = Dtype.auto,
    device: Device = "cpu",
    attention: Attention = None,
    batch: Batch = 1,
    round_activations: RoundInputs = True,
    round_kv: RoundKV = True,
    layers: Layers = 0,
    tasks: Tasks = None,
    tasks_path: TasksPath = None,
    limit: Limit = None,
    few_shot: FewShot = None,
    output: Output = None,
    compare: Compare = None,
    note: Note = None,
    json: Json = False,
) -> None:
    """Measure perplexity and, with --against, the KL divergence and top-1 agreement, token by token."""
    from narrowgauge.flows.register import read_report
    from narrowgauge.quant.evaluate.multiple_choice import TaskRequest
    from narrowgauge.quant.sources import resolve
    from narrowgauge.serving.settings import read_settings

    how = _How(
        via=via, dtype=dtype, device=device, attention=attention, batch=batch,
        round_activations=round_activations, round_kv=round_kv,
    )  # fmt: skip
    how.refuse_engine()
    if layers and against is None:
        raise typer.BadParameter("--layers: needs --against, the model to compare with layer by layer")
    others = [read_report(path) for path in compare or ()]
    models = read_settings().models
    candidate = resolve(checkpoint, cache=models)
    base = None if against is None else resolve(against, cache=models)
    names = tuple(name for name in (tasks or "").split(",") if name)
    judge = _Judge(candidate, base, how, layers, TaskRequest(names, path=tasks_path, limit=limit, few_shot=few_shot))
    cut = _cut(text, windows=windows, length=length, stride=stride, bos=bos)
    report = judge.run(text, cut, part, notes=tuple(note or ()))
    if output is not None:
        report.write(output, others=others)
    if json:
        print(report.to_json(), end="")
    else:
        _show(report, output)


def _cut(text: str, *, windows: int | None, length: int | None, stride: int | None, bos: Bos | None) -> "Cut":
    """The text's own way of being cut, with what was asked for in its place."""
    from dataclasses import replace

    from narrowgauge.quant.evaluate.windows import default_cut

    asked: dict[str, Any] = {"length": length, "stride": stride, "bos": None if bos is None else bos.value}
    changes = {name: value for name, value in asked.items() if value is not None}
    if windows is not None:
        changes["windows"] = windows or None
    return replace(default_cut(text), **changes)


@dataclass(frozen=True)
class _Judge:
    """Everything that one evaluation measures."""

    candidate: "LocalModel"
    base: "LocalModel | None"
    how: _How
    layers: int
    tasks: "TaskRequest"

    def run(self, text: str, cut: "Cut", part: Part, *, notes: tuple[str, ...]) -> "EvalReport":
        """Scores the text, then the layers and the tasks that were asked for."""
        from dataclasses import replace

        from narrowgauge.flows.progress import Terminal
        from narrowgauge.quant.evaluate.evaluate import evaluate as score
        from narrowgauge.quant.evaluate.evaluate import load_tokenizer
        from narrowgauge.quant.evaluate.multiple_choice import check_installed, run_tasks
        from narrowgauge.quant.evaluate.subject import describe, read_making
        from narrowgauge.quant.evaluate.windows import named_ids

        if self.tasks.names:
            check_installed()
        tokenizer = load_tokenizer(self.candidate.path)
        heldout = named_ids(text, tokenizer, cut, split=part.value)
        making = read_making(self.candidate.path)
        with Terminal() as watch:
            watch.line(f"loading {self.candidate.source}{'' if self.base is None else f' and {self.base.source}'}")
            request = self._within_context()
            longest = max(cut.length, request.longest if request.names else 0)
            source = self._source(self.candidate, longest)
            reference = None if self.base is None else self._source(self.base, longest)
            report = score(
                source,
                reference,
                heldout,
                candidate_subject=describe(self.candidate),
                base_subject=None if self.base is None else describe(self.base),
                batch=self.how.batch,
                layers=making.layers,
                notes=(*notes, *making.notes),
                progress=lambda done, total: watch.progress("windows scored", done, total),
            )
            if request.names:
                report = replace(report, tasks=run_tasks(source, reference, tokenizer, request=request))
            del source, reference  # the layers below come block by block: their memory should not stand on two models'
            if self.layers:
                report = self._with_layers(report, heldout, watch)
        return report

    def _within_context(self) -> "TaskRequest":
        from dataclasses import replace

        from narrowgauge.quant.formats.checkpoint import CheckpointReader

        context = CheckpointReader(self.candidate.path).config.get("max_position_embeddings")
        return replace(self.tasks, longest=min(self.tasks.longest, int(context or self.tasks.longest)))

    def _with_layers(self, report: "EvalReport", heldout: "HeldOut", watch: "Terminal") -> "EvalReport":
        from narrowgauge.quant.evaluate.layers import Precision, measure_layers, merge

        assert self.base is not None
        found = measure_layers(
            self.base.path,
            self.candidate.path,
            heldout.ids[: self.layers],
            precision=Precision(
                device=self.how.device,
                round_activations=self.how.round_activations,
                round_kv=self.how.round_kv,
            ),
            progress=lambda done, total: watch.progress("blocks compared", done, total),
        )
        return merge(report, found)

    def _source(self, model: "LocalModel", length: int) -> "LogitsSource":
        if self.how.via is Via.engine:
            from narrowgauge.engine.scoring import EngineLogits

            return EngineLogits(model.path, max_length=length, dtype=self.how.dtype.value)
        import torch

        from narrowgauge.quant.evaluate.reference import ReferenceModel

        return ReferenceModel(
            model.path,
            dtype=None if self.how.dtype is Dtype.auto else getattr(torch, self.how.dtype.value),
            device=self.how.device,
            attention=None if self.how.attention is None else self.how.attention.value,
            round_activations=self.how.round_activations,
            round_kv=self.how.round_kv,
        )


def _show(report: "EvalReport", output: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from narrowgauge.quant.evaluate.report import FIGURES, shown

    against = "" if report.base is None else f" against {report.base.name}"
    table = Table("figure", "value", title=f"{report.candidate.name}{against}", title_justify="left")
    table.columns[1].justify = "right"
    for name, label in FIGURES.items():
        if getattr(report, name) is not None or name in report.non_finite:
            table.add_row(label, shown(report, name))
    for score in report.tasks:
        base = "" if score.base_value is None else f" (base {score.base_value:.2%})"
        table.add_row(f"{score.task} {score.metric}", f"{score.value:.2%}{base}")
    console = Console(soft_wrap=True)
    console.print(table)
    how = report.conventions
    console.print(
        f"{how.tokens:,} tokens of {', '.join(how.dataset)} ({how.split}), {how.windows} windows of {how.window}; "
        f"{report.source}, {how.dtype}; {report.seconds:.0f} s",
        highlight=False,
    )
    if output is not None:
        console.print(
            f"written  {', '.join(str(output / f'report.{kind}') for kind in ('json', 'md', 'html'))}", highlight=False
        )
