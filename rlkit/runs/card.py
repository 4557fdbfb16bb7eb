"""Write the model card of an exported policy. The card tells the policy's origin, scores and
training. It also says how to load the policy and how to repeat the run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit.runs import folder as runs
from rlkit.training.schedules.paths import flatten_numbers

SHOWN: Mapping[str, str] = {  # row of the card → dotted key of the config
    "algorithm": "algorithm.name",
    "task": "task._target_",
    "data": "task.path",
    "reward": "reward.name",
    "KL": "kl.name",
    "KL coefficient": "kl.coef",
    "prompts a step": "batch.prompts",
    "samples a prompt": "batch.group_size",
    "optimizer": "optimizer._target_",
    "learning rate": "optimizer.lr",
    "LoRA rank": "model.lora.rank",
    "new tokens of a reply": "generation.max_new_tokens",
    "temperature": "generation.temperature",
    "seed": "seed",
}
HUB = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(run: Path, step: int, *, adapters: bool) -> str:
    """Return the model card as Markdown with a header for model hubs.

    The scores are from test problems. Only the policy of the run's last step has scores, because no
    other policy was measured on test problems.

    Args:
      run: a run folder. The card leaves out everything that is missing in the folder.
      step: the RL step of the policy.
      adapters: whether the folder holds adapters in PEFT's format instead of all weights.
    """
    config = runs.read_config(run)
    settings = flatten_numbers(config)
    phases = (config.get("schedule") or {}).get("phases") or [""]
    shown = {
        row: ", then ".join(
            dict.fromkeys(
                str(settings.get(f"schedule.phases.{phase}.{key}", settings[key]))
                for phase in phases
            )
        )
        for row, key in SHOWN.items()
        if settings.get(key) is not None
    }
    summary = runs.read_summary(run) or {}
    start = runs.read_start(run)
    base = str(settings.get("model.path", ""))
    algorithm = shown.get("algorithm", "reinforcement learning")
    known = HUB.fullmatch(base) and not Path(base).exists()
    tags = ["rlkit", "reinforcement-learning", re.sub(r"[^\w.-]+", "-", algorithm)]
    header = [f"base_model: {base}"] if known else []
    header += [
        f"library_name: {'peft' if adapters else 'transformers'}",
        "pipeline_tag: text-generation",
        f"tags: [{', '.join(tags)}]",
    ]
    what = "Adapters for" if adapters else "A policy that started as"
    parts = [
        "---\n" + "\n".join(header) + "\n---",
        f"# {settings.get('name', run.name)}, step {step}",
        f"{what} `{base or 'a model'}`, trained for {step} RL steps with `{algorithm}` by rlkit.",
        _results(summary, step),
        "## How it was trained",
        _table(
            ("setting", "value"),
            [(row, f"`{value}`") for row, value in shown.items()],
        ),
        "## Load it",
        (
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\nmodel ="
            ' AutoModelForCausalLM.from_pretrained("FOLDER")\ntokenizer ='
            ' AutoTokenizer.from_pretrained("FOLDER")\n```'
        ),
        (
            "The weights are in float32, as in training. The chat template is in the folder of the"
            " tokenizer."
        ),
        _repeat(run, summary, start),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _results(summary: Mapping[str, Any], step: int) -> str:
    """Write the results on test problems before and after training. If this policy was not
    measured, write a sentence that says so."""
    before = summary.get("before") or {}
    after = summary.get("after") or {}
    if not (after and step == summary.get("steps")):
        return "It was not measured on test problems."
    rows = []
    for name, interval in (("accuracy", "interval"), ("reward", "reward_interval")):
        sides = [_figure(side, name, interval) for side in (before, after)]
        rows += (
            [(name, *sides)]
            if name == "accuracy" or sides[1] != _figure(after, "accuracy", "interval")
            else []
        )
    how = (
        f"{after.get('n')} problems, sampled at temperature {after.get('temperature', 0):g}; in"
        " brackets 95 % intervals over problems."
    )
    return (
        "## Results on test problems\n\n"
        + _table(("figure", "before", "after"), rows)
        + f"\n\n{how}"
    )


def _figure(side: Mapping[str, Any], name: str, interval: str) -> str:
    value = side.get(name)
    bounds = side.get(interval)
    if value is None:
        return "not measured"
    return f"{value:.3f}" + (
        f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds and None not in bounds else ""
    )


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    )


def _repeat(run: Path, summary: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    """Write the section on repeating the run: its command, versions and costs."""
    # leave out overrides of Hydra's own settings, because these name folders of this machine
    kept = (text for text in runs.read_overrides(run) if not text.lstrip("+~").startswith("hydra"))
    overrides = " ".join(shlex.quote(text) for text in kept)
    versions = ", ".join(
        f"{name} {version}" for name, version in (start.get("versions") or {}).items()
    )
    costs = [f"{summary['tokens']:,} tokens"] if isinstance(summary.get("tokens"), int) else []
    costs += (
        [f"{summary['wall_seconds'] / 60:.0f} minutes on {summary.get('device', 'one device')}"]
        if summary.get("wall_seconds")
        else []
    )
    said = [f"Commit {start['git']}."] if start.get("git") else []
    said += [f"Versions: {versions}."] if versions else []
    said += [f"It cost {', '.join(costs)}."] if costs else []
    command = f"```\nrlkit train {overrides}".rstrip() + "\n```"
    if not (run / ".hydra" / "overrides.yaml").is_file():
        command = "Parts of this run are Python objects, and its folder does not keep them."
    return "\n\n".join(["## Repeat it", command, " ".join(said)])
