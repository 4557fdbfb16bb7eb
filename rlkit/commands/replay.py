"""`rlkit replay`: repeat the update of a debug bundle, one micro-batch at a time, and show the
numbers that are nan or infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit.commands.arguments import Arguments, take_settings
from rlkit.errors import ConfigError, refuse_problems
from rlkit.system.noted import is_noted
from rlkit.system.redaction import learn


def replay(folder: Path, *, trusted: bool = False) -> tuple[str, bool]:
    """Run the forward and backward pass over the minibatch of a bundle, with the weights before the
    failed update. The optimiser takes no step.

    Args:
      trusted: if True, the config may call code outside rlkit; see docs/security.md.
    Returns: a table with sentences, and whether everything was finite this time.
    Raises: ConfigError if the folder is not a bundle, if its config no longer fits the code, or if
      it calls untrusted code. DataError if one of its files is damaged or cannot be read.
    """
    from rlkit.config.compose import conf_dir
    from rlkit.config.keys import drop_paths, find_leaks
    from rlkit.config.schema import build, check
    from rlkit.config.trust import Folder, find_unsafe_values, require_trust, with_environment
    from rlkit.runs import folder as runs
    from rlkit.system.device import autocast, load_on_device
    from rlkit.training.callbacks.checkpoints import read_checkpoint
    from rlkit.training.callbacks.faults import BATCH, STATE
    from rlkit.training.learner import Learner
    from rlkit.training.update.split import move_to_device as batch_on
    from rlkit.types import Minibatch

    for name in ("config.yaml", BATCH, STATE):
        if not (folder / name).is_file():
            raise ConfigError(
                f"bundle={folder}: there is no {name}; name a folder debug/step_… of a run whose"
                " update failed"
            )
    written = runs.read_config(folder)
    if not is_noted(folder):
        by = Folder(conf_dir())
        require_trust(list(find_unsafe_values(written, by)), f"bundle={folder}", trusted=trusted)
        # an update needs no secret
        written = drop_paths(written, frozenset(leak.path for leak in find_leaks(written, by)))
    config = with_environment(written)
    learn(config, written)
    refuse_problems(check(config, f"{folder}/config.yaml"))
    x = build(config)
    policy, device = load_on_device(x)
    learner = Learner(x, policy)
    learner.load_state_dict(read_checkpoint(folder / STATE))
    batch = batch_on(Minibatch(**read_checkpoint(folder / BATCH)), device)
    with autocast(x, device):
        return examine(learner, batch)


def examine(learner: Any, batch: Any) -> tuple[str, bool]:
    """Write a line for each micro-batch. For a micro-batch with nan or infinity, also write a line
    for each of its rows."""
    import torch

    from rlkit.training.update.split import split_into_micro_batches

    lines = [
        f"step {learner.rl_step + 1}, {learner.x.algorithm.name}: {len(batch.ids)} rows of up to"
        f" {batch.ids.shape[1]} tokens"
    ]
    lines += find_nonfinite({name: p for name, p in learner.nets.named_parameters()}, "weights")
    mask = batch.response_mask
    for name, value in vars(batch).items():
        if (
            isinstance(value, torch.Tensor)
            and value.shape == mask.shape
            and value.is_floating_point()
            and not value[mask].isfinite().all()
        ):
            bad = (~value.isfinite() & mask).any(1).nonzero()[:, 0].tolist()
            lines.append(f"{name} is not finite in row(s) {', '.join(map(str, bad))}")
    lines.append(f"{'rows':<24}{'tokens':>8}{'loss':>14}{'gradient':>14}")
    fine = True
    for rows in split_into_micro_batches(batch, learner.micro.limit):
        loss, norm, names = backward(learner, batch, rows)
        lines.append(_line(rows, mask, loss, norm))
        if names or not math.isfinite(loss):
            fine = False
            lines += names[:1]
            for row in rows if len(rows) > 1 else ():
                loss, norm, _ = backward(learner, batch, row[None])
                lines.append("  " + _line(row[None], mask, loss, norm))
    lines.append(
        "everything is finite: the fault did not come again" if fine else "the fault came again"
    )
    return "\n".join(lines), fine


def backward(learner: Any, batch: Any, rows: Any) -> tuple[float, float, list[str]]:
    """Compute the loss and gradient norm of some rows. Return them with sentences on gradients with
    nan or infinity."""
    from rlkit.models import pack
    from rlkit.training.update.loss import surrogate, value_surrogate
    from rlkit.training.update.minibatch import compute_trained_logprobs
    from rlkit.training.update.split import select

    x = learner.x
    critic = learner.x.algorithm.critic
    part = select(batch, rows)
    learner.nets.zero_grad()
    scores = compute_trained_logprobs(learner.record(), pack(part.ids, part.response_mask))
    loss, _ = surrogate(part, scores, x.algorithm, x.kl)
    if critic.active:
        loss = loss + value_surrogate(part, scores, critic)[0]
    if loss.requires_grad:
        loss.backward()
    grads = {name: p.grad for name, p in learner.nets.named_parameters() if p.grad is not None}
    norm = sum(float(g.float().square().sum()) for g in grads.values()) ** 0.5
    return float(loss.detach()), norm, find_nonfinite(grads, "the gradient")


def find_nonfinite(tensors: Mapping[str, Any], what: str) -> list[str]:
    """Name the first tensor with nan or infinity in a sentence."""
    bad = [name for name, value in tensors.items() if not value.isfinite().all()]
    return [f"{what} of {bad[0]} is not finite ({len(bad)} in all)"] if bad else []


def _line(rows: Any, mask: Any, loss: float, norm: float) -> str:
    """Write one row of the table."""
    names = ", ".join(map(str, rows.tolist()))
    names = names if len(names) < 23 else f"{names[:20]}…"
    return f"{names:<24}{int(mask[rows].sum()):>8}{loss:>14.6g}{norm:>14.6g}"


def command(arguments: Arguments) -> int:
    """Repeat the failed update of a debug bundle, and show which rows and gradients are not finite.
    The exit status is 1 if it fails again.

    bundle=FOLDER  outputs/NAME/TIME/debug/STEP
    trust=true     the bundle may run code that is not declared safe

        rlkit replay bundle=outputs/latest/debug/step_000007
        rlkit replay bundle=outputs/latest/debug/step_000007 trust=true
    """
    named = take_settings(arguments, ("bundle",), "replay").get("bundle")
    if named is None:
        raise ConfigError(
            "rlkit replay takes one debug bundle: rlkit replay"
            " bundle=outputs/NAME/TIME/debug/step_000007"
        )
    text, fine = replay(Path(named).expanduser(), trusted=arguments.trusted)
    print(text)
    return 0 if fine else 1
