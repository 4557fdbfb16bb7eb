"""`rlkit export run=…`: write a run's policy as a Hugging Face folder, with tokenizer, chat
template and model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit.commands.arguments import Arguments, read_flag, take_settings
from rlkit.commands.trust import read_model
from rlkit.errors import ConfigError, refuse_problems
from rlkit.runs import folder as runs
from rlkit.runs.card import model_card
from rlkit.system.files import refuse_unwritable


def export(
    model: Mapping[str, Any],
    *,
    checkpoint: Path,
    out: Path,
    merge: bool = False,
    run: Path | None = None,
) -> tuple[Path, int]:
    """Write the policy of a checkpoint as a folder for `from_pretrained(out)`, with the same
    logits. Return the checkpoint's file and RL step.

    Adapters are written as they are, with the name of their base model; with `merge` they are added
    to the base model's weights. All weights are written in float32, the precision of their
    training. The folder appears completely or not at all.

    Args:
      model: the config of the run's model, arguments of rlkit.models.load_policy.
      checkpoint: a file, or a folder whose newest checkpoint is taken.
      out: a new folder.
      run: the run's folder; if given, README.md is a model card.
    Raises: ConfigError if `out` exists, or if other programs cannot find the adapters' base model.
      DataError if there is no checkpoint.
    """
    from rlkit.commands.evaluate import restore_policy
    from rlkit.config.schema import build, check
    from rlkit.models.load import EMBEDDED, find_adapters_base
    from rlkit.models.save import save_policy
    from rlkit.system.adapters import has_adapters
    from rlkit.system.device import silence_frameworks

    refuse_problems(check(dict(model), "model"))
    if out.exists():
        raise ConfigError(f"to={out}: exists already; name a new folder")
    silence_frameworks()
    # the caller has checked its code: rlkit.config.trust
    policy = build(dict(model))(device="cpu")
    adapters = has_adapters(policy.model)
    own = model.get("path")
    if adapters and not merge and (not own or EMBEDDED.get(own) or find_adapters_base(own)):
        what = "model of a function" if not own else "folder of adapters"
        what = "embedded model" if own and EMBEDDED.get(own) else what
        raise ConfigError(
            f"model.path={own}: no other program can load adapters on this {what}; use merge=true"
        )
    path, step = restore_policy(policy, checkpoint)
    written = policy.model.merge_and_unload() if adapters and merge else policy.model
    card = model_card(run, step, adapters=adapters and not merge) if run else ""
    with refuse_unwritable(out):
        save_policy(out, policy._replace(model=written), card=card)
    return path, step


def command(arguments: Arguments) -> int:
    """Write the policy of a run as a folder that `from_pretrained` loads.

    run=FOLDER  a run folder or one of its checkpoints
    to=FOLDER   where it goes; by default into the run folder
    merge=true  add adapters to the weights

        rlkit export run=outputs/latest
        rlkit export run=outputs/latest to=my_model merge=true
    """

    names = ("run", "to", "merge")
    named, place, merge = map(take_settings(arguments, names, "export").get, names)
    if not named:
        raise ConfigError(
            "rlkit export takes one run: run=outputs/NAME/TIME, or one of its checkpoints"
        )
    merged = read_flag("merge", merge)
    run = runs.find_run(named, "run")
    name = "merged" if merged else "export"
    out = Path(place).expanduser() if place else run / name
    path, step = export(
        read_model(run, f"run={named}", arguments),
        checkpoint=runs.find_checkpoint(named, run),
        out=out,
        merge=merged,
        run=run,
    )
    print(
        f"{path}, step {step}\nwritten to {out}\nload it with"
        f" AutoModelForCausalLM.from_pretrained({str(out)!r}), or model.path={out}"
    )
    return 0
