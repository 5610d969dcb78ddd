"""The command line: `inkling-rl train | init | serve | verify | convert | draft train | draft measure`.

Parsing comes first; what a command needs is imported inside it, so that `--help` answers at once. A fault of the user's
is one message on standard error and exit status 2; a failed run or a failed comparison is 1.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

app = typer.Typer(
    name="inkling-rl",
    help="Reinforcement-learning post-training for Inkling 2 Small.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich costs more than the rest of --help
)

draft_app = typer.Typer(
    help="Train and measure DSpark drafts.", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)
app.add_typer(draft_app, name="draft")

Overrides = Annotated[
    list[str] | None, typer.Option("-s", "--set", metavar="KEY=VALUE", help="Override a recipe field; repeatable.")
]


@app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(help="Recipe file, or the name of one that ships.")] = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue this run from its checkpoint.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the resolved recipe, start nothing.")
    ] = False,
) -> None:
    """Train a recipe with reinforcement learning."""
    from inkling_rl.recipe import dump, load

    if (recipe is None) == (resume is None):
        raise typer.BadParameter("give a recipe or --resume RUN, one of the two")
    source = recipe or _recipe_of(resume or Path())
    resolved = load(source, overrides or [])
    if dry_run:
        typer.echo(dump(resolved), nl=False)
        for line in _preview(resolved):
            typer.echo(f"# {line}")
        return
    from trainer.run import train as run

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # The run has a handler of its own; before and after it, Ctrl-C ends the process without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise typer.Exit(run(resolved, resume, name=Path(source).stem))


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="New or empty directory.")],
    seed: Annotated[int, typer.Option(min=0, help="Of every random number.")] = 0,
    pretrain: Annotated[
        str | None, typer.Option(metavar="TASK", help="Pre-train on this task (arithmetic); minutes on two cores.")
    ] = None,
) -> None:
    """Write a tiny Inkling 2 as a release checkpoint: every mechanism of the big one."""
    if pretrain is None:
        from inkling_rl.checkpoint.tiny import write_tiny

        typer.echo(f"wrote {write_tiny(directory, seed)} (random weights, seed {seed})")
        return
    if pretrain != "arithmetic":
        raise typer.BadParameter(f"must be arithmetic; got {pretrain}", param_hint="--pretrain")
    from trainer.pretrain import pretrain as run

    def report(step: int, num_steps: int, loss: float) -> None:
        if step % 25 == 0 or step == num_steps:
            typer.echo(f"step {step}/{num_steps}: loss {loss:.3f}", err=True)

    score = run(directory, seed=seed, report=report)
    typer.echo(f"wrote {directory} (held-out score {score.score:.3f}, greedy {score.greedy_score:.3f}, seed {seed})")


@app.command()
def serve(
    model: Annotated[str | None, typer.Argument(help="Checkpoint directory or builtin:NAME.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Take model and engine settings from this recipe.")] = None,
    overrides: Overrides = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=DIR", help="Serve a PEFT adapter; repeatable.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    vllm_args: Annotated[str, typer.Option(metavar="JSON", help="Further vLLM arguments, merged last.")] = "{}",
    log: Annotated[Path | None, typer.Option(help="File for the engine's output.")] = None,
) -> None:
    """Serve a checkpoint or a recipe's model over the OpenAI API."""
    from inkling_rl.recipe import load

    settings = load(recipe, overrides or []) if recipe else None
    if overrides and not recipe:
        raise typer.BadParameter("needs --recipe", param_hint="-s")
    path = model or (settings.model.path if settings else None)
    if path is None:
        raise typer.BadParameter("give a checkpoint or --recipe")
    adapters, extra = dict(map(_named, adapter or [])), _json_object(vllm_args)
    from rollout.service import serve as run

    run(path, settings, host=host, port=port, adapters=adapters, extra=extra, log=log)


@app.command()
def verify(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint directory or builtin:NAME.")],
    adapter: Annotated[Path | None, typer.Option(metavar="DIR", help="Compare with this PEFT adapter too.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts, one a line (.txt or .jsonl); random without.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the engine.")] = "float32",
    num_prompts: Annotated[int, typer.Option(min=1, help="Random prompts.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated for each prompt.")] = 24,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="float32: largest, bfloat16: mean difference.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the JSON report here, not to standard output.")] = None,
) -> None:
    """Compare the engine's log-probabilities with transformers' on one checkpoint."""
    from inkling_rl.metrics import to_json
    from rollout.verify import read_prompts
    from rollout.verify import verify as run

    if report and not report.absolute().parent.is_dir():
        raise typer.BadParameter(f"must be in an existing directory; got {report}", param_hint="--report")
    given = read_prompts(prompts) if prompts else None
    result = run(
        checkpoint, adapter, given, dtype=dtype, num_prompts=num_prompts, max_tokens=max_tokens, tolerance=tolerance
    )
    text = json.dumps(to_json(result), indent=2, allow_nan=False) + "\n"  # NaN is no JSON
    if report:
        report.write_text(text, encoding="utf-8")
    else:
        typer.echo(text, nl=False)
    typer.echo(result["line"], err=True)
    raise typer.Exit(0 if result["ok"] else 1)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint directory or builtin:NAME.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="New or empty directory.")],
    to: Annotated[
        Literal["bf16", "release"], typer.Option(help="BF16 experts with their scales beside, or NVFP4 and MXFP8.")
    ],
    layers: Annotated[
        str | None, typer.Option(metavar="0-3,7", help="Convert only these layers' experts, copy the rest.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Read the result again and prove it.")] = False,
) -> None:
    """Convert a checkpoint's experts to BF16, or back to the release's formats."""
    chosen = None if layers is None else _layer_numbers(layers)
    from inkling_rl.checkpoint.convert import convert as run
    from inkling_rl.checkpoint.progress import Progress
    from inkling_rl.checkpoint.proof import ProofError

    try:
        summary = run(source, target, to, layers=chosen, check=check, progress=Progress())
    except ProofError as error:
        typer.echo(f"check failed: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(summary.line)


Data = Annotated[
    str, typer.Option(help="arithmetic/train, arithmetic/heldout, or .jsonl/.parquet: prompts, or tokens as sampled.")
]
DraftPath = Annotated[
    str | None, typer.Option("--draft", metavar="DIR", help="Draft to take; the checkpoint's own without.")
]
NumCompletions = Annotated[int, typer.Option(min=1, help="To sample from the target where the data are prompts.")]
Temperature = Annotated[float, typer.Option(min=0.01, help="Of that sampling.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Longest completion sampled.")]
MaxPromptLength = Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")]
Effort = Annotated[float, typer.Option(min=0.0, max=0.99, help="Of the prompts, as in rollout.effort.")]
Seed = Annotated[int, typer.Option(min=0, help="Of every random number.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")]
TargetDtype = Annotated[
    Literal["float32", "bfloat16"] | None, typer.Option(help="Of the target: float32 on a CPU, else bfloat16.")
]


@draft_app.command("train")
def draft_train(
    checkpoint: Annotated[str, typer.Argument(help="Target: checkpoint directory or builtin:NAME.")],
    data: Data,
    out: Annotated[Path, typer.Option(help="New or empty directory.")],
    draft: DraftPath = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin with random weights; only the shape is taken.")] = False,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="Write a copy of the checkpoint with the draft in it.")
    ] = False,
    num_epochs: Annotated[float, typer.Option(min=0.0, help="Times that every completion is seen.")] = 10.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Completions per optimiser step.")] = 512,
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Completions at a time.")] = 16,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Highest.")] = 6e-4,
    max_anchors: Annotated[int, typer.Option(min=1, help="Blocks per completion and epoch.")] = 512,
    num_completions: NumCompletions = 8192,
    temperature: Temperature = 1.0,
    max_tokens: MaxTokens = 48,
    max_prompt_length: MaxPromptLength = 1024,
    effort: Effort = 0.2,
    seed: Seed = 0,
    device: Device = None,
    dtype: TargetDtype = None,
) -> None:
    """Train a draft on completions of its frozen target. Ctrl-C keeps the state: the same command continues."""
    from trainer.draft.completions import Sampling
    from trainer.draft.loop import Plan
    from trainer.draft.run import Job
    from trainer.draft.run import train as run

    plan = Plan(
        num_epochs=num_epochs, batch_size=batch_size, micro_batch_size=micro_batch_size,
        learning_rate=learning_rate, max_anchors=max_anchors, seed=seed,
    )  # fmt: skip
    sampling = Sampling(
        num_completions=num_completions, temperature=temperature, max_tokens=max_tokens, effort=effort,
        max_prompt_length=max_prompt_length,
    )  # fmt: skip
    job = Job(
        checkpoint=checkpoint, data=data, out=out, draft=draft, is_fresh=fresh, is_bundled=bundle, plan=plan,
        sampling=sampling, device=device, dtype=dtype,
    )  # fmt: skip
    raise typer.Exit(run(job))


@draft_app.command("measure")
def draft_measure(
    checkpoint: Annotated[str, typer.Argument(help="Target: checkpoint directory or builtin:NAME.")],
    data: Data,
    draft: DraftPath = None,
    num_tokens: Annotated[int | None, typer.Option(min=1, help="Drafted per step; the whole block without.")] = None,
    num_completions: NumCompletions = 512,
    temperature: Temperature = 1.0,
    max_tokens: MaxTokens = 48,
    max_prompt_length: MaxPromptLength = 1024,
    effort: Effort = 0.2,
    seed: Seed = 1,
    device: Device = None,
    dtype: TargetDtype = None,
) -> None:
    """Compute how many tokens a verification step emits with a draft, on completions of its target."""
    from trainer.draft.completions import Sampling
    from trainer.draft.run import measure_draft as run

    sampling = Sampling(
        num_completions=num_completions, temperature=temperature, max_tokens=max_tokens, effort=effort,
        max_prompt_length=max_prompt_length,
    )  # fmt: skip
    worth = run(
        checkpoint, data, draft=draft, num_tokens=num_tokens, sampling=sampling, seed=seed, device=device, dtype=dtype
    )
    shares = " ".join(f"{share:.3f}" for share in worth.acceptance)
    typer.echo(f"{worth.tokens_per_step:.3f} tokens per verification step, acceptance by position {shares}")
    typer.echo(
        f"{worth.num_completions} completions, {worth.num_steps:.0f} steps expected, "
        f"confidence off by {worth.confidence_error:.3f} on average"
    )


def _layer_numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = [first, last if dash else first]
        # No model has a layer of five digits, and a range up to one is not for this memory.
        if not all(end.isdecimal() and len(end) < 5 for end in ends) or int(ends[1]) < int(ends[0]):
            raise typer.BadParameter(f"must be numbers and ranges like 0-3,7; got {text[:80]}", param_hint="--layers")
        numbers += range(int(ends[0]), int(ends[1]) + 1)
    return numbers


def _recipe_of(run: Path) -> str:
    from inkling_rl.recipe import RecipeError

    path = run / "recipe.yaml"
    if not path.is_file():
        raise RecipeError(f"--resume must name the directory of a run; {run} holds no recipe.yaml. Give runs/NAME.")
    return str(path)


def _preview(recipe: Any) -> list[str]:
    """What a run of this recipe does per step, in a few lines.

    Raises:
        ValueError: checkpoint and draft are on this machine and do not fit each other, the recipe or the engine.
    """
    batch = recipe.trainer.train_batch_size * recipe.algorithm.n_samples_per_prompt
    updates = recipe.trainer.train_batch_size // recipe.policy_mini_batch_size
    model = recipe.model.path
    found = model.startswith("builtin:") or Path(model).is_dir()
    return [
        f"{recipe.trainer.num_steps} steps of {batch} completions, {updates} optimiser step{'s' * (updates > 1)} each",
        f"at most {batch * recipe.rollout.max_generate_length:,} generated tokens per step",
        f"model.path {model}: {'found' if found else 'not on this machine; a run checks it before anything starts'}",
        *(_preview_draft(recipe) if recipe.rollout.draft and found else ()),
        "dry run: nothing was started",
    ]


def _preview_draft(recipe: Any) -> list[str]:
    from inkling_rl.engine_args import draft_arguments, installed_device

    draft, batch = recipe.rollout.draft, recipe.trainer.train_batch_size * recipe.algorithm.n_samples_per_prompt
    arguments = draft_arguments(recipe, recipe.model.path, installed_device())
    lines = [f"rollout.draft: {draft.num_tokens} tokens at a time from the draft in {arguments['model']}"]
    if draft.refresh:
        every = draft.refresh.interval
        lines.append(f"rollout.draft.refresh: after every {every} steps, on the {every * batch} completions of them")
    return lines


def _named(item: str) -> tuple[str, str]:
    name, separator, path = item.partition("=")
    if not (name and separator and path):
        raise typer.BadParameter(f"must be NAME=DIR; got {item}", param_hint="--adapter")
    return name, path


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"must be a JSON object; got {text}", param_hint="--vllm-args")
    return {key.replace("-", "_"): item for key, item in value.items()}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script; arguments of the process unless given."""
    try:
        app(arguments)
    except ValueError as error:  # every error of a user's is one; anything else is ours and keeps its traceback
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename} must be usable; got: {error.strerror}. Check the path", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


if __name__ == "__main__":
    main()
