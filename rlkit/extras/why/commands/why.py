"""why a run does not learn: causes with their evidence, and remedies tried: RUN minutes=10"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.commands.arguments import Answer, Arguments, read_flag, take_settings
from rlkit.errors import ConfigError, Refusal, RLKitError
from rlkit.runs import folder as runs
from rlkit.runs.reading import find_runs

if TYPE_CHECKING:
    from rlkit.extras.why.evidence import Evidence, Finding
    from rlkit.extras.why.forks import Fork, Place, Setting
    from rlkit.extras.why.remedies import Remedy

TAKES_TEXTS = True
SETTINGS = ("minutes", "steps", "step", "rollout", "token", "attack", "brief")


def command(arguments: Arguments) -> int | Answer:
    """Say why a run does not learn: causes with their evidence and a remedy each. With minutes=N
    the run is continued with each remedy, and the effects are measured.

    RUN          a run folder, finished or not
    minutes=N    continue it with the remedies, as many as fit
    steps=N      RL steps of each continuation, 8 by default
    step=N       begin at the checkpoint of this step; 0 is the start
    step=N rollout=I token=J  the origin of a sampled token, and its change by its step; rollouts of
                 the step and tokens of the rollout are counted from 0
    attack=true  try empty and constant answers also on a reward that is async, takes the whole
                 batch or contacts a server
    brief=true   two sentences at most on one run or on several, as at the end of a run; nothing is
                 said of runs that rise or have fewer than ten steps
    trust=true   the run may use code that nothing declares safe

        rlkit why outputs/latest
        rlkit why outputs/latest minutes=10
    """
    from rlkit.extras.why.evidence import read_evidence
    from rlkit.extras.why.findings import say_findings, say_healthy, say_progress
    from rlkit.extras.why.remedies import STEPS
    from rlkit.extras.why.suspicions import say_suspicions

    given = read_settings(arguments)
    if read_flag("brief", given.get("brief")):
        said = say_suspicions(find_runs(arguments.texts, "rlkit why"))
        return Answer({"suspicions": said}, "\n".join(said))
    [named] = arguments.texts
    folder = runs.find_run(named, "rlkit why")
    e = read_evidence(folder)
    if not e.steps:
        raise ConfigError(
            f"rlkit why {named}: the run has no finished step, so nothing can be said"
        )
    if "token" in given:
        return explain(e, given, named, arguments)
    if not e.demonstrated:
        print(say_progress(e))
    findings, notes = diagnose(e, named, arguments, attack=read_flag("attack", given.get("attack")))
    print("\n".join(say_findings(findings, e.given) or [say_healthy(e)]))
    for note in notes:
        print(f"note: {note}")
    if e.demonstrated:
        print("note: demonstrations are not scored, so no change is tried on the reward")
        return 0
    steps = int(given.get("steps", STEPS))
    minutes = float(given["minutes"]) if "minutes" in given else None
    asked = int(given["step"]) if "step" in given else None
    lines = prove(e, findings, named, arguments, minutes=minutes, steps=steps, step=asked)
    for line in lines:
        print(line, flush=True)
    return 0


def read_settings(arguments: Arguments) -> dict[str, str]:
    """Read the settings on the command line. Raises: ConfigError for an unknown word, a wrong
    number, or anything but exactly one run."""
    given = take_settings(arguments, SETTINGS, "why")
    if len(arguments.texts) != 1 and given.get("brief") != "true":
        raise ConfigError("rlkit why takes one run folder: rlkit why outputs/latest")
    if {"rollout", "token"} & given.keys() and not {"step", "rollout", "token"} <= given.keys():
        raise ConfigError("step=, rollout= and token= name a token together")
    for key in ("minutes", "steps", "step", "rollout", "token"):
        least = 1 if key in ("minutes", "steps") or (key == "step" and "token" in given) else 0
        if key in given and not (given[key].isdigit() and int(given[key]) >= least):
            raise ConfigError(f"{key}={given[key]}: give a whole number, {least} or more")
    return given


def explain(e: Evidence, given: Mapping[str, str], named: str, arguments: Arguments) -> int:
    """Print the origin of a token, and how its step changed its probability."""
    from rlkit.config.problems.rows import load_tasks
    from rlkit.extras.why.tokens import explain_token, find_token, read_step

    step, rollout, place = (int(given[key]) for key in ("step", "rollout", "token"))
    token = find_token(read_step(e.run.folder, step), step, rollout, place)
    x = compose_run(e.run.folder, named, arguments, ()).x
    for line in explain_token(x, load_tasks(x), e, token):
        print(line, flush=True)
    return 0


def diagnose(
    e: Evidence, named: str, arguments: Arguments, *, attack: bool
) -> tuple[list[Finding], list[str]]:
    """Return the findings of a run, and notes on parts that were not examined."""
    from rlkit.extras.why.attacks import explain_unsafe
    from rlkit.extras.why.findings import list_findings

    notes = []
    reward = None
    if not e.played:
        notes.append(
            "no rollouts are kept (callbacks.rollouts.every), so rows, tools and rewards were not"
            " looked at"
        )
    else:
        try:
            reward = compose_run(e.run.folder, named, arguments, ()).x.reward
            why = explain_unsafe(reward, e.tasks)
        except Refusal as error:
            why = str(error)
        if why and not (attack and reward is not None):
            notes.append(f"no answers were tried on the reward: {why}")
            reward = None
    return list_findings(e, reward), notes


def compose_run(
    folder: Path, named: str, arguments: Arguments, overrides: Sequence[str], title: str = ""
) -> Setting:
    """Compose a run with a remedy, and check it as `rlkit train` does.

    Raises: ConfigError if the check fails, or if parts of the run are Python objects, because a
      folder does not keep them.
    """
    from rlkit.commands.trust import make_asker
    from rlkit.config.compose import compose, experiment
    from rlkit.extras.why.forks import Setting
    from rlkit.extras.why.remedies import Remedy, apply_remedy

    if not (folder / ".hydra" / "overrides.yaml").is_file():
        raise ConfigError("parts of this run are Python objects, which its folder does not keep")
    mine = list(overrides)
    ask = make_asker(f"rlkit why {named}", folder, mine, arguments, entry="train")
    composed = compose(
        apply_remedy(runs.read_overrides(folder), mine),
        config_dir=arguments.config_dir,
        before_import=ask,
    )
    return Setting(Remedy(title, tuple(overrides)), experiment(composed), composed.config)


def prove(
    e: Evidence,
    findings: Sequence[Finding],
    named: str,
    arguments: Arguments,
    *,
    minutes: float | None,
    steps: int,
    step: int | None,
) -> Iterator[str]:
    """Offer to continue the run with each change, or report the outcome."""
    from rlkit.extras.why.effects import list_effects, sum_up
    from rlkit.extras.why.forks import choose_place, read_forks
    from rlkit.extras.why.remedies import choose_budget, forecast_minutes, list_remedies

    folder = e.run.folder
    remedies = list_remedies(e, findings)
    place = choose_place(folder, e, step)
    whole = forecast_minutes(e, remedies, steps)
    where = f"step {place.step}" if place.step else "the start"
    count = "1 change" if len(remedies) == 1 else f"{len(remedies)} changes"
    trial = (
        f"This trains the run as it is and each of {count} for {steps} steps from {where}, in about"
        f" {max(whole, 0.1):.1f} minutes by the times of this run."
    )
    if minutes is None:
        limit = choose_budget(e, remedies, steps)
        yield f"Optional: measure which change helps. {trial} It tries:"
        yield f"   {'; '.join(' '.join(own.overrides) for own in remedies)}"
        untried = list_untried(findings, remedies)
        if untried:
            yield (
                f"   It does not test {untried}: no setting mends it, or the setting changes the"
                " reward."
            )
        yield f"   rlkit why {shlex.quote(named)} minutes={limit}"
        yield (
            f"   After {limit} minutes no further change is begun; the same command again tries the"
            " rest. The forecast is rough."
        )
        return
    yield trial
    done = read_forks(folder, place, steps)
    settings: list[Setting] = []
    for title, overrides in [("The run as it is", ()), *remedies]:
        try:
            settings.append(compose_run(folder, named, arguments, overrides, title))
        except Refusal as error:
            if not overrides:
                raise
            yield f"not tried: {' '.join(overrides)} ({str(error).splitlines()[0]})"
    forks = try_all(e, settings, place, done, minutes=minutes, steps=steps)
    control, *others = forks
    ran = [fork.overrides for fork in forks]
    left = [" ".join(own.remedy.overrides) for own in settings if own.remedy.overrides not in ran]
    if left:
        yield (
            f"Not tried: {'; '.join(left)}. The same command again tries those that minutes="
            f"{minutes:g} left out, and repeats nothing."
        )
    yield from sum_up(control, others, list_effects(control, others), findings)


def list_untried(findings: Sequence[Finding], remedies: Sequence[Remedy]) -> str:
    """List the numbers of the findings whose remedy is not among the tried changes."""
    tried = [own.overrides for own in remedies]
    numbers = [str(i) for i, own in enumerate(findings, 1) if own.remedy not in tried]
    name = "finding" if len(numbers) == 1 else "findings"
    return f"{name} {' and '.join(numbers)}" if numbers else ""


def try_all(
    e: Evidence,
    settings: Sequence[Setting],
    place: Place,
    done: Mapping[tuple[str, ...], Fork],
    *,
    minutes: float,
    steps: int,
) -> list[Fork]:
    """Run a fork for each setting, in order and with the unchanged run first, until the budget is
    spent. A fork finished earlier is not run again, unless the settings of the run have changed.
    Each fork's row is written when it ends."""
    from rlkit.config.changes import identify
    from rlkit.config.problems.rows import load_tasks
    from rlkit.extras.why.forks import run_fork, write_fork

    x = settings[0].x
    quiet = x._replace(evaluation=x.evaluation._replace(n=0, stop_at=None))
    tasks = load_tasks(quiet)
    begun = time.perf_counter()
    forks: list[Fork] = []
    longest = 0.0
    for setting in settings:
        known = done.get((identify(setting.config), *setting.remedy.overrides))
        spent = time.perf_counter() - begun
        if known is None and len(forks) > 1 and spent + longest > 60 * minutes:
            continue
        if known is None:
            try:
                known = run_fork(x, setting, tasks, place, steps)
            except RLKitError as error:
                if not forks:
                    raise
                print(f"not tried: {setting.remedy.title} ({error})")
                continue
            write_fork(e.run.folder, known)
        longest = max(longest, known.seconds)
        forks.append(known)
    return forks
