"""Which options meet which laws, and how much of each table the fast tests run.

A law is a test that holds for every option of a table, or for every combination of several tables.
`pytest` alone runs each law with representatives: a few cases, and for the tables of options one of
every option. The other cases are marked `slow`, so that `pytest -m slow` runs the rest of the
product, and no case runs in both.
A new option is added to its table here; a test fails if a shipped option is in no table.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import re
import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings

import rlkit.functional as f
from rlkit.algorithm import KL
from rlkit.config.compose import conf_dir
from rlkit.system.extras import explain_missing, list_extras

read_yaml = partial(yaml.load, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def cases(
    table: Iterable[Any],
    fast: int | Collection[Any] | Callable[[Any], bool],
    *,
    unpack: bool = False,
) -> list[Any]:
    """Every case of a table, for `pytest.mark.parametrize`; all but the representatives are marked
    slow.

    Args:
      table: values, or `pytest.param(…)` where a case has an id or marks of its own.
      fast: the representatives: how many, spread evenly over the table with its first and its last
        case among them; or the values themselves; or a function of a value. A value that the table
        lacks is an error, since its law would lose its representative.
      unpack: each value is a tuple with one value for each of several names.
    Returns: the same cases in the same order.
    """
    params = [
        row if hasattr(row, "marks") else pytest.param(*row) if unpack else pytest.param(row)
        for row in table
    ]
    values = [param.values if unpack else param.values[0] for param in params]
    if isinstance(fast, int):
        step = (len(params) - 1) / max(fast - 1, 1)
        places = {round(i * step) for i in range(fast)}
        chosen = [i in places for i in range(len(params))]
    elif callable(fast):
        chosen = [fast(value) for value in values]
    else:
        missing = [value for value in fast if value not in values]
        assert not missing, f"no such case: {missing}"
        chosen = [value in fast for value in values]
    assert any(chosen), "a law needs a representative among the fast tests"
    slow = [pytest.param(*p.values, id=p.id, marks=(*p.marks, pytest.mark.slow)) for p in params]
    return [param if keep else late for param, late, keep in zip(params, slow, chosen, strict=True)]


def count_threads() -> int:
    """Threads of this process without the watcher (rlkit.system.waiting), which ends by itself soon
    after the last wait."""
    return sum(thread.name != "rlkit watcher" for thread in threading.enumerate())


def each(
    names: str | tuple[str, ...], table: Iterable[Any], *, ids: Any = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, all cases in one test: for large tables of cheap cases, where a
    test for each costs more than it does.

    The first case that fails ends the test and is named. No fixture of a single test (tmp_path,
    monkeypatch) is made again for a case.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = list(table)
    assert not any(getattr(row, "marks", ()) for row in rows), (
        "a case with a mark of its own needs a test of its own"
    )

    def loop(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def every(**fixtures: Any) -> None:
            assert rows
            for row in rows:
                values = row.values if hasattr(row, "marks") else row if len(keys) > 1 else (row,)
                given = dict(zip(keys, values, strict=True))
                try:
                    test(**given, **fixtures)
                except BaseException as error:
                    error.add_note(f"in the case {given!r:.2000}")
                    raise

        signature = inspect.signature(test)
        every.__signature__ = signature.replace(
            parameters=[p for p in signature.parameters.values() if p.name not in keys]
        )  # type: ignore[attr-defined]
        return every

    return loop


def examples(
    *strategies: Any, fast: int, slow: int, **more: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As hypothesis' `given`: so many examples with the fast tests, and so many with the slow ones.
    `more` goes to hypothesis' settings."""

    def loop(test: Callable[..., None]) -> Callable[..., None]:
        runs = {
            n: settings(max_examples=n, deadline=None, **more)(given(*strategies)(test))
            for n in (fast, slow)
        }

        @pytest.mark.parametrize("examples", [fast, pytest.param(slow, marks=pytest.mark.slow)])
        def some(examples: int) -> None:
            runs[examples]()

        some.__name__, some.__doc__, some.__module__ = test.__name__, test.__doc__, test.__module__
        return some

    return loop


def product(*tables: Iterable[Any]) -> list[tuple]:
    """Every combination of the tables' options."""
    return list(itertools.product(*tables))


def diagonal(*tables: Collection[Any]) -> list[tuple]:
    """The fewest combinations in which every option of every table occurs: the tables side by side,
    shorter ones repeated."""
    longest = max(map(len, tables))
    return list(
        zip(*(itertools.islice(itertools.cycle(table), longest) for table in tables), strict=True)
    )


def draw(table: Iterable[Any], count: int) -> list[Any]:
    """So many values of a table, or all of a shorter one, in its order: the same in each run."""
    values = list(table)
    places = random.Random(0).sample(range(len(values)), min(count, len(values)))
    return [values[i] for i in sorted(places)]


def cover(rows: Iterable[tuple], more: int = 0, also: Collection[tuple] = ()) -> list[tuple]:
    """Rows of a table in which every value of each of its columns occurs, `also` among them, and so
    many more, drawn from the rest: the same in each run, in the table's order.

    For products whose cases cost a second each, where what can go wrong goes wrong with one value,
    or with most pairs of values.
    """
    table = list(rows)
    chosen = [row for row in table if row in also]
    missing = {pair for row in table for pair in enumerate(row)}
    missing -= {pair for row in chosen for pair in enumerate(row)}
    while missing:
        best = max(table, key=lambda row: len(missing & {*enumerate(row)}))
        missing -= {*enumerate(best)}
        chosen.append(best)
    chosen += draw([row for row in table if row not in chosen], more)
    return [row for row in table if row in chosen]


def combinations(*tables: Collection[Any], slow: int | None = None) -> list[Any]:
    """Combinations of the tables' options as cases of one name, each a tuple.

    The diagonal is fast: it has every option. Slow is the rest of the product, or so many of it:
    enough where what can go wrong goes wrong in one option, or in most pairs of two.
    """
    fast = diagonal(*tables)
    rest = [case for case in product(*tables) if case not in fast]
    if slow is not None:
        rest = draw(rest, slow)
    return cases([case for case in product(*tables) if case in fast or case in rest], fast)


# -------------------------------------------------------------------- functions of rlkit.functional

POLICY_LOSSES: dict[str, Callable[..., Any]] = {
    "cispo": f.cispo,
    "clipped": f.clipped,
    "clipped dual": partial(f.clipped, dual_clip=1.5),
    "clipped delta": partial(f.clipped, clip_high=0.28, delta=1.5),
    "dppo": f.dppo,
    "dppo two-sided": partial(f.dppo, divergence="kl", delta=0.05, two_sided=True),
    "gmpo": f.gmpo,
    "kl_cov": partial(f.kl_cov, share=0.5),
    "reinforce": f.reinforce,
    "sapo": f.sapo,
    "vespo": f.vespo,
}
KLS = {
    name: getattr(f, name)
    for name in (
        "confident",
        "forward",
        "full",
        "k1",
        "k2",
        "k3",
        "k3_straight_through",
        "reverse",
        "truncated",
    )
}
AGGREGATIONS: dict[str, Callable[..., Any]] = {
    "token_mean": f.token_mean,
    "sequence_mean": f.sequence_mean,
    "sequence_sum": partial(f.sequence_sum, constant=8.0),
    "prompt_mean": f.prompt_mean,
}

# ----------------------------------------------------------------- slots of an algorithm, by option

SLOTS: dict[str, dict[str, Any]] = {
    "advantage": {
        "raw": f.raw,
        "batch_mean": f.batch_mean,
        "group_mean": f.group_mean,
        "leave_one_out": f.leave_one_out,
        "opo": f.length_weighted,
        "max_rl": f.max_rl,
        "pass_at_k": partial(f.pass_at_k_advantage, k=2),
        "best_minus_second": f.best_minus_second,
        "reward_to_go": f.reward_to_go,
        "gae": f.gae,
        "turn_gae": f.turn_gae,
        "pairwise": f.pairwise,
        "gpg": f.gpg,
        "gdpo": f.gdpo,
        "turn_group_mean": f.turn_group_mean,
        "remax": f.remax,
        "adaptive_gae": partial(f.gae, alpha=0.5),
    },
    "normalization": {
        "none": f.no_normalization,
        "group": f.normalize_group,
        "batch": f.normalize_batch,
        "advantages": f.normalize_advantages,
        "whiten": f.whiten,
    },
    "overlong": {
        "none": f.keep_overlong,
        "penalty": partial(f.soft_penalty, limit=4, buffer=0.5),
        "mask": f.mask_truncated,
    },
    "group_filter": {"none": f.keep_all, "mixed": f.mixed_groups, "accuracy": f.mixed_component},
    "token_filter": {
        "none": f.every_token,
        "top_entropy": partial(f.top_entropy, fraction=0.5),
        "clip_cov": f.clip_cov,
    },
    "correction": {
        "auto": f.no_correction,  # what it stands for is decided before the first step
        "none": f.no_correction,
        "token_truncate": f.token_correction,
        "token_mask": partial(f.token_correction, mode="mask"),
        "sequence_truncate": f.sequence_correction,
        "sequence_mask": partial(f.sequence_correction, mode="mask"),
        "icepop": partial(f.token_correction, mode="mask", floor=0.5, cap=5.0),
        "token_band": partial(f.token_correction, mode="keep", floor=0.5),
        "mis": partial(f.sequence_correction, mode="mask", floor=0.5),
        "geometric_mask": f.geometric_mask,
        "k1_mask": partial(f.geometric_mask, low=1e-3, high=1e-3, scaled=False),
        "k3_mask": f.divergence_mask,
        "veto": partial(f.divergence_mask, estimator="k2", over="max", bound=42.4),
        "kpop": f.binary_kl_mask,
        "m2po": f.second_moment_mask,
        "product": partial(
            f.product_correction, parts={"weight": f.token_correction, "mask": f.geometric_mask}
        ),
    },
    "kl": {
        "none": KL("none"),
        "loss": KL("k1", f.k1, "loss", 0.3),
        **{
            f"{placement}, {'before' if inside else 'behind'} the baseline": KL(
                "k1", f.k1, placement, 0.3, in_baseline=inside
            )
            for placement in ("reward", "reward_sequence")
            for inside in (False, True)
        },
    },
}

# --------------------------------------------------------------- overrides, from the files of conf/


EXTRAS = (
    "adapters",
    "bench",
    "forecast",
    "notebook",
    "pretrained",
    "programs",
    "report",
    "vllm",
    "why",
)


def every_extra() -> bool:
    """Whether all extras are there: only then is each word of a table used."""
    return set(EXTRAS) <= set(list_extras())


def available(word: str) -> bool:
    """Whether the extras that an option needs are there, those of the options it selects included.

    Args:
      word: an override such as "environment=mcp"; one that selects no option is available.
    """
    group, _, option = word.lstrip("+~").partition("=")
    group = group.partition("@")[0]
    file = conf_dir() / group / f"{option}.yaml"
    if not option or not file.is_file():
        return True
    if option == "by_task":  # composed with the parts that the task declares
        return True
    targets, selected = _read_option(group, file)
    return not any(map(explain_missing, targets)) and all(map(available, selected))


@functools.cache
def _read_option(group: str, file: Path) -> tuple[list[str], list[str]]:
    """What an option calls, and the options that its defaults list selects, as overrides."""
    text = file.read_text()
    node = read_yaml(text) if "defaults:" in text else {}
    selected = []
    for entry in node.get("defaults", ()):
        for key, value in entry.items() if isinstance(entry, dict) else [("", entry)]:
            name = key.removeprefix("override ").removeprefix("optional ").partition("@")[0]
            place = name[1:] if name.startswith("/") else f"{group}/{name}".rstrip("/")
            selected += [
                f"{place}={each}" for each in (value if isinstance(value, list) else [value])
            ]
    return re.findall(r"_target_: *([\w.]+)", text), selected


def options(group: str) -> list[str]:
    """The options of a group that are available."""
    names = sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))
    return [name for name in names if available(f"{group}={name}")]


def presets() -> list[str]:
    """The presets of conf/experiment, recipes as recipe/NAME, that are available. Those of the
    bench have tests of their own."""
    folder = conf_dir() / "experiment"
    names = [file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml")]
    own = sorted(name for name in names if not name.startswith("bench/"))
    return [name for name in own if available(f"experiment={name}")]


ALGORITHMS = [(f"algorithm={name}",) for name in options("algorithm")]
PARTS = [
    (f"{file.parent.relative_to(conf_dir())}={file.stem}",)
    for file in sorted((conf_dir() / "algorithm").glob("*/**/*.yaml"))
]
PLACED_KLS = [
    (f"kl={name}", f"kl.placement={placement}", *more)
    for name in options("kl")
    for placement, switch in (
        ("loss", "importance_weight"),
        ("reward", "in_baseline"),
        ("reward_sequence", "in_baseline"),
    )
    for more in ((), (f"kl.{switch}=true",))
    if name != "none"
]
OTHERS = [
    ("kl=none",),
    ("kl/coef=adaptive",),
    ("algorithm.entropy_coef=0.1",),
    ("algorithm.old=sampler",),
    ("algorithm.old=loglinear", "algorithm/correction=mis"),
    ("algorithm=ppo", "kl=k1", "kl.placement=reward"),
    ("algorithm=ppo", "kl=k1", "kl.placement=reward_sequence"),
    ("algorithm=reinforce_pp", "kl=k1", "kl.placement=reward"),
]
# One of each kind: a critic, pairs, demonstrations, each ratio; then a KL of each placement, one
# exact and one refused.
KINDS_OF_ALGORITHM = [(f"algorithm={name}",) for name in ("grpo", "gspo", "pairwise", "ppo", "sft")]
KINDS_OF_KL = [
    ("kl=k3", "kl.placement=loss"),
    ("kl=full", "kl.placement=loss"),
    ("kl=k1", "kl.placement=reward", "kl.in_baseline=true"),
    ("kl=k1", "kl.placement=reward_sequence"),
]
