"""Choose the changes with which a run is continued, and forecast their cost. The findings' remedies
come first, then general remedies for a run that stands still."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from rlkit.config.functions import read_key
from rlkit.extras.why.evidence import MIXED, NONE, Evidence, Finding
from rlkit.extras.why.settings import find_rate_key

STEPS = 8  # RL steps of a fork
PATIENCE = 60  # minutes that a user may be asked to wait for all forks
PROBES = 64  # further prompts to measure every fork on
SAMPLES = 4  # replies to each of these prompts
FACTOR = 3.0  # factor by which the learning rate is raised and lowered
# option → those of its settings that another option cannot take; of every other option all
OWN = {"generation": "generation.engine"}
UNTRIED = ("reward", "task", "seed", "model")  # a change of these groups would change the measure


class Remedy(NamedTuple):
    """A change to try on a run."""

    title: str  # the beginning of a sentence
    overrides: tuple[str, ...]


def list_remedies(e: Evidence, findings: Sequence[Finding]) -> list[Remedy]:
    """List the remedies to try, each once, the findings' own first."""
    named = [Remedy(", ".join(f.remedy), f.remedy) for f in findings if f.remedy]
    out: dict[tuple[str, ...], Remedy] = {}
    for remedy in (*named, *list_general_remedies(e)):
        unknown = any(override.endswith("=nan") for override in remedy.overrides)
        tried = not read_groups(remedy.overrides) & {*UNTRIED, *e.replaced}
        if tried and not unknown:  # a scheduled number has no multiple
            known = out.get(remedy.overrides, remedy)
            out[remedy.overrides] = max(known, remedy, key=lambda own: " " in own.title)
    return list(out.values())


def read_groups(overrides: Iterable[str]) -> set[str]:
    """Return the groups of config.yaml changed by overrides."""
    return {read_key(text).replace("/", ".").split(".")[0] for text in overrides}


def list_general_remedies(e: Evidence) -> Iterator[Remedy]:
    """List general changes: learning rate, KL, groups, normalisation, temperature, lengths, critic,
    prompts, exact sampling. A change is left out if the run's settings or figures leave no room for
    it."""
    rate = e.number("optimizer.lr")
    if rate == rate and find_rate_key(e) == "optimizer.lr":
        yield Remedy("A third of the rate", (f"optimizer.lr={rate / FACTOR:.3g}",))
        yield Remedy("Three times the rate", (f"optimizer.lr={rate * FACTOR:.3g}",))
    if e.setting("kl.name", NONE) != NONE:
        yield Remedy("Training without the KL penalty", ("kl=none",))
    size = e.number("batch.group_size")
    if e.mean("group/frac_zero_std") > 0.3:
        yield Remedy("Groups twice as large", (f"batch.group_size={2 * size:.0f}",))
        yield Remedy("Prompts that are solved sometimes", MIXED)
    if "group" in str(e.setting("algorithm.normalization._target_", NONE)):
        yield Remedy("Advantages without the deviation", ("algorithm/normalization=none",))
    if e.number("generation.temperature") != 1:
        yield Remedy("Sampling at temperature 1", ("generation.temperature=1",))
    limit = e.number("generation.max_new_tokens")
    if e.mean("len/truncated_frac") > 0.05 and e.mean("stop_reason/length") > 0.05:
        yield Remedy("Replies twice as long", (f"generation.max_new_tokens={2 * limit:.0f}",))
    if e.values("value/explained_variance"):
        yield Remedy("Groups in place of the critic", ("algorithm=grpo",))
    if e.setting("asynchrony.mode", NONE) != NONE:
        yield Remedy("Sampling with the weights of each step", ("asynchrony=none",))


def forecast_minutes(e: Evidence, remedies: Sequence[Remedy], steps: int) -> float:
    """Forecast the minutes of the unchanged run's fork and of all remedies' forks."""
    forks = [(), *(own.overrides for own in remedies)]
    return sum(forecast_seconds(e, overrides, steps, PROBES) for overrides in forks) / 60


def choose_budget(e: Evidence, remedies: Sequence[Remedy], steps: int) -> int:
    """Choose the minutes to offer for the forks: enough for all if this is at most PATIENCE,
    otherwise enough for the first remedy.

    A half is added to the forecast, in whole minutes, because the run's own steps may have been
    faster. A forecast of NaN, of a run with scheduled sizes, gives 1.
    """
    minutes = 1.5 * forecast_minutes(e, remedies, steps)
    if minutes > PATIENCE:
        minutes = 1.5 * forecast_minutes(e, remedies[:1], steps)
    return 1 if math.isnan(minutes) else max(1, round(minutes + 0.5))


def forecast_seconds(e: Evidence, overrides: Sequence[str], steps: int, probes: int) -> float:
    """Forecast the seconds of a fork from the run's own steps: samples and updates scale with the
    size of the groups."""
    size = e.number("batch.group_size")
    given = [o.partition("=")[2] for o in overrides if o.startswith("batch.group_size=")]
    factor = float(given[-1]) / size if given else 1.0
    step = median(e.values("perf/step_s") or [0.0])
    sampled = median(e.values("perf/generate_s") or [0.0]) / (size * e.number("batch.prompts"))
    return steps * step * factor + probes * SAMPLES * sampled


def apply_remedy(saved: Iterable[str], overrides: Sequence[str]) -> list[str]:
    """Add a remedy to a run's overrides. If it replaces an option, the overrides of this option's
    settings are removed, except for those that the new option has too (`OWN`).

    >>> apply_remedy(["kl=k3", "kl.coef=10", "seed=1"], ["kl=none"])
    ['seed=1', 'kl=none']
    """
    keys = list(map(read_key, overrides))
    groups = tuple(f"{OWN.get(key, key).replace('/', '.')}." for key in keys)
    kept = []
    for text in saved:
        key = read_key(text)
        if key not in keys and not f"{key.replace('/', '.')}.".startswith(groups):
            kept.append(text)
    return [*kept, *overrides]
