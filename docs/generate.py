"""Write the generated pages from the code and the comments of conf/: python docs/generate.py

The pages are docs/config/GROUP.md, extension_points.md, metrics.md and the table of programs.md. Do
not edit them by hand. tests/laws/test_docs.py fails if they differ from this script's output.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import yaml

import rlkit.types
from rlkit.config.options import conf_dir, group_options_by_shelf, read_shelf
from rlkit.config.schema import describe, resolve
from rlkit.system.extras import list_extras
from rlkit.training import glossary

DOCS = Path(__file__).resolve().parent
MARK = "<!-- written by `python docs/generate.py`; do not edit -->"


def pages() -> dict[Path, str]:
    """Return every generated page: path → text."""
    groups = sorted(f for f in conf_dir().iterdir() if f.is_dir() and f.name != "hydra")
    out = {DOCS / "config" / f"{group.name}.md": group_page(group) for group in groups}
    out[DOCS / "config" / "README.md"] = index(groups)
    out[DOCS / "extension_points.md"] = extension_points()
    out[DOCS / "metrics.md"] = metrics_page()
    if "programs" in list_extras():
        out[DOCS / "programs.md"] = programs_page()
    return out


# ------------------------------------------------------------------------------------ config groups


class Key(NamedTuple):
    """One value set in an option's file."""

    path: str
    value: str
    comment: str


def read_option(file: Path) -> tuple[str, list[str], list[Key]]:
    """Return an option's first comment, the options it chooses, and its keys.

    A key has the comment above it.
    """
    title: list[str] = []
    comment: list[str] = []
    choices: list[str] = []
    keys: list[Key] = []
    stack: list[tuple[int, str]] = []
    for line in file.read_text().splitlines():
        text = line.strip()
        if text.startswith("#"):
            if not text.startswith("# @package"):
                (comment if keys or stack or choices else title).append(text.lstrip("# "))
            continue
        if not text:
            comment = []
            continue
        depth = len(line) - len(line.lstrip())
        if text.startswith("- "):
            if stack and stack[0][1] == "defaults" and text != "- _self_":
                choices.append(text[2:].partition(" #")[0].strip())
            comment = []
            continue
        name, _, value = text.partition(":")
        stack = [(d, n) for d, n in stack if d < depth] + [(depth, name)]
        value = re.sub(r"\s+#.*", "", value).strip()
        path = ".".join(n for _, n in stack)
        if path == "shelf":
            continue
        if name == "_target_" or (value and not name.startswith("_") and stack[0][1] != "defaults"):
            keys.append(Key(path, value, " ".join(comment)))
        comment = []
    return " ".join(title), choices, keys


def takes(keys: list[Key], key: Key) -> str:
    """Return the type of a key according to the signature of the part's function.

    The result is an empty string if no function of this file names the key.
    """
    parent, _, name = key.path.rpartition(".")
    target = next(
        (k.value for k in keys if k.path == (f"{parent}._target_" if parent else "_target_")), None
    )
    if target is None or target == "???":
        return ""
    function = resolve(target)
    plain = inspect.isclass(function) and not issubclass(function, tuple)
    try:
        hint = get_type_hints(function.__init__ if plain else function).get(name)
    except (NameError, TypeError, AttributeError):
        return ""
    if hint is None:
        return ""
    said = describe(hint)
    return "" if "a part (" in said else said


def group_page(group: Path) -> str:
    """Return the page of a group.

    For each option it lists the functions called, and the keys with default and meaning.
    """
    files = sorted(
        group.rglob("*.yaml"),
        key=lambda f: (len(f.parts), f.parent, read_shelf(f) != "everyday", f.name),
    )
    lines = [MARK, "", f"# `{group.name}`", "", "| option | shelf | what it is |", "|---|---|---|"]
    lines += [
        f"| `{chosen(group, f)}` | {read_shelf(f)} | {cell(first_sentence(read_option(f)[0]))} |"
        for f in files
    ]
    for file in files:
        title, choices, keys = read_option(file)
        above = inherited(file, choices)
        lines += ["", f"## `{chosen(group, file)}`", "", title]
        parents = [choice for choice in choices if ":" not in choice]
        others = [choice for choice in choices if ":" in choice]
        if parents:
            lines += ["", "Has the keys of " + ", ".join(f"`{p}`" for p in parents) + " too."]
        if others:
            named = [choice.removeprefix("override ").replace(": ", "=") for choice in others]
            lines += ["", "Chosen with it: " + ", ".join(f"`{n}`" for n in named) + "."]
        called = [k.value for k in keys if k.path.endswith("_target_") and k.value[:1] not in "?$"]
        if calls := list(dict.fromkeys(called)):
            lines += ["", "Calls " + ", ".join(f"`{c}`" for c in calls) + "."]
        rows = [k for k in keys if not k.path.endswith("_target_")]
        if rows:
            lines += ["", "| key | default | takes | meaning |", "|---|---|---|---|"]
            lines += [
                f"| `{k.path}` | `{cell(k.value)}` | {cell(takes([*keys, *above], k))} |"
                f" {cell(k.comment or meaning(above, k))} |"
                for k in rows
            ]
    return "\n".join(lines) + "\n"


def first_sentence(text: str) -> str:
    """Return a text up to the first full stop before a capital letter."""
    return re.split(r"(?<=\w[.)]) (?=[A-Z])", text)[0]


def inherited(file: Path, choices: list[str]) -> list[Key]:
    """Return the keys of the options on which an option builds.

    Their comments give the meaning of keys without a comment.
    """
    named = [
        choice for choice in choices if ":" not in choice
    ]  # in a subfolder of a group, an option names others relative to the group
    parents = [
        next(p for folder in file.parents if (p := folder / f"{choice}.yaml").is_file())
        for choice in named
    ]
    return [
        key
        for parent in parents
        for key in read_option(parent)[2] + inherited(parent, read_option(parent)[1])
    ]


def meaning(keys: list[Key], key: Key) -> str:
    """Return the comment on a key in another file, "" without one."""
    return next((k.comment for k in keys if k.path == key.path and k.comment), "")


def chosen(group: Path, file: Path) -> str:
    """Return the words that choose an option on the command line."""
    if group.name == "experiment":  # its folders hold presets and are no groups
        return f"experiment={file.relative_to(group).with_suffix('').as_posix()}"
    return f"{file.parent.relative_to(group.parent).as_posix()}={file.stem}"


def cell(text: str) -> str:
    """Escape a text for a cell of a table."""
    return text.replace("|", "\\|")


SHELVES = """
Each option stands on a shelf. *Everyday* options are the ones that most runs choose, the defaults,
and the parts that those use. The *catalogue* holds all others, which work and are tested in the
same way. The shelf is the key `shelf` of the option's file. It sorts lists only: it is no part of a
run's config or identity, and an option of your own may leave it out.
""".strip()


def index(groups: list[Path]) -> str:
    """Return the page with all groups and their options, and with the keys of the entry config."""
    lines = [
        MARK,
        "",
        "# Config groups",
        "",
        *SHELVES.splitlines(),
        "",
        "| group | everyday | catalogue |",
        "|---|---|---|",
    ]
    for group in groups:
        everyday, catalogue = (
            ", ".join(names) for names in group_options_by_shelf(group.name).values()
        )
        lines.append(f"| [{group.name}]({group.name}.md) | {everyday} | {catalogue} |")
    title, _, keys = read_option(conf_dir() / "train.yaml")
    lines += ["", "## `train.yaml`", "", title, "", "| key | default | meaning |", "|---|---|---|"]
    lines += [
        f"| `{k.path}` | `{k.value}` | {cell(k.comment)} |"
        for k in keys
        if k.comment and "_target_" not in k.path
    ]
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------- extension points

# Named tuple → its path in a config. NAME is chosen by the user.
PLACES = {
    "rlkit.training.experiment.Experiment": "",
    "rlkit.training.experiment.Sampling": "generation",
    "rlkit.training.experiment.Evaluation": "evaluation",
    "rlkit.algorithm.Algorithm": "algorithm",
    "rlkit.algorithm.Critic": "algorithm.critic",
    "rlkit.algorithm.KL": "kl",
    "rlkit.rewards.Reward": "reward",
    "rlkit.rewards.Term": "reward.terms.NAME",
    "rlkit.types.Environment": "environment",
    "rlkit.types.Table": "environment.table",
    "rlkit.types.Reference": "reference",
    "rlkit.training.schedules.Schedule": "schedule",
    "rlkit.training.schedules.Phase": "schedule.phases.NAME",
    "rlkit.types.Controller": "schedule.numbers.PATH",
    "rlkit.models.chat.Renderer": "model → renderer",
}

# Parts named in a config by the function that loads them → their path.
LOADED = {
    "rlkit.training.experiment.TaskSource": "task",
    "rlkit.training.experiment.ModelSpec": "model",
}

# Types with keys chosen by the user.
NAMED = {
    "Mapping[str, Any]": (
        "config path of a number, such as kl.coef → a function of the step, or a Controller; for"
        " callbacks: name → a Lightning callback"
    ),
    "Mapping[str, Phase]": "name → a phase",
    "Mapping[str, Term]": "name → a term",
}


class Point(NamedTuple):
    """A place in a config that accepts a user's function."""

    place: str
    signature: str
    meaning: str


def protocols() -> dict[str, type]:
    """Return all Protocols of rlkit/types.py: name → Protocol."""
    return {
        n: v
        for n, v in vars(rlkit.types).items()
        if getattr(v, "_is_protocol", False) and v.__module__ == "rlkit.types"
    }


@functools.cache
def points() -> tuple[Point, ...]:
    """Return every place that accepts a function.

    A place is a field of the configs' named tuples, or a parameter of a shipped part.
    """
    out: dict[str, Point] = {}
    for name, place in LOADED.items():
        loader = resolve(name)
        out[place] = Point(place, written_hints(loader)["load"], field_comments(loader)["load"])
    for name, place in PLACES.items():
        owner: Any = resolve(name)
        comments = field_comments(owner)
        for field, hint in written_hints(owner).items():
            if takes_function(hint) or hint in NAMED:
                path = f"{place}.{field}" if place else field
                out[path] = Point(
                    path, hint, comments.get(field) or NAMED.get(hint) or link_protocol(hint)
                )
    for path, target in targets():
        function = resolve(target)
        for name, hint in written_hints(function).items():
            if takes_function(hint) and target not in PLACES and not positional(function, name):
                out.setdefault(f"{path}.{name}", Point(f"{path}.{name}", hint, f"of `{target}`"))
    del out["algorithm.streams.reward.aggregation"]  # refused: it is algorithm/aggregation
    return tuple(out.values())


def link_protocol(hint: str) -> str:
    """Return a link to the section of the Protocol in an annotation, "" without one."""
    named = next((name for name in protocols() if re.search(rf"\b{name}\b", hint)), "")
    return f"[{named}](#{named.lower()})" if named else ""


def positional(function: Callable[..., Any], name: str) -> bool:
    """Return whether a parameter is passed in the call of a part, instead of being set in a
    config.
    """
    p = inspect.signature(function).parameters.get(name)
    return p is None or (
        p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty and not inspect.isclass(function)
    )


def written_hints(owner: Any) -> dict[str, str]:
    """Return the annotations of a class or function as written in the source."""
    own = owner.__annotations__ if inspect.isclass(owner) else getattr(owner, "__annotations__", {})
    words = {
        name: hint if isinstance(hint, str) else getattr(hint, "__forward_arg__", str(hint))
        for name, hint in own.items()
    }
    return {name: hint for name, hint in words.items() if name != "return"}


def takes_function(hint: str) -> bool:
    """Return whether an annotation names a callable."""
    called = ("Callable", "Tool", "Controller", "Environment", "Reference", *protocols())
    return any(re.search(rf"\b{name}\b", hint) for name in called)


def field_comments(owner: Any) -> dict[str, str]:
    """Return field → the comment on the same line of the source, or on the lines before it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(owner).splitlines():
        field = re.match(r"    (\w+): (?:.*?  # (.*))?", line)
        if field:
            found[field[1]] = field[2] or " ".join(above)
        comment = re.match(r"    # (.*)", line)
        above = [*above, comment[1]] if comment else []
    return {name: text for name, text in found.items() if text}


@functools.cache
def targets() -> tuple[tuple[str, str], ...]:
    """Return (place, function) of every part named in conf/, except in experiments."""
    found: list[tuple[str, str]] = []
    for file in sorted(conf_dir().rglob("*.yaml")):
        group = file.parent.relative_to(conf_dir()).as_posix()
        if group.split("/")[0] in ("experiment", "hydra", "debug", "."):
            continue
        found += _targets(yaml.safe_load(file.read_text()), group.replace("/", "."))
    return tuple(found)


def _targets(node: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        if str(node.get("_target_", "???")).startswith("rlkit."):
            yield path, node["_target_"]
        for key, value in node.items():
            yield from _targets(value, f"{path}.{key}")


def extension_points() -> str:
    """Return the page of all places, all Protocols and all quantities."""
    found = points()
    lines = [MARK, "", "# Extension points", ""]
    lines += [
        f"{len(found)} places in a config accept a function of your own. Name it as `_target_:"
        " my_module.my_function`. Add"
    ]
    lines += [
        (
            "`_partial_: true` if rlkit calls it later. Its keyword-only parameters are its keys."
            " You need not register it."
        ),
        "",
    ]
    lines += ["| place | takes | meaning |", "|---|---|---|"]
    lines += [f"| `{p.place}` | `{cell(p.signature)}` | {cell(p.meaning)} |" for p in found]
    lines += ["", "## Protocols", ""]
    for name, protocol in protocols().items():
        lines += [
            f"### {name}",
            "",
            *(f"`{signature}`" for signature in signatures(protocol)),
            "",
            inspect.getdoc(protocol) or "",
            "",
        ]
        lines += (
            [f"Shipped: {', '.join(f'`{s}`' for s in shipped(name))}.", ""] if shipped(name) else []
        )
    lines += [
        "## Quantities",
        "",
        (
            "A part of an algorithm or of a KL gets these values by the names of its positional"
            " parameters:"
        ),
        "",
    ]
    lines += [f"- `{name}` {meaning}" for name, meaning in rlkit.types.QUANTITIES.items()]
    return "\n".join([*lines, *MEASURING.splitlines(), *declarations_page()]) + "\n"


MEASURING = """
An advantage that uses a term of the reward and the metadata:

    import torch

    def of_format(rewards, components, metadata):
        easy = torch.tensor([row["level"] < 3 for row in metadata], device=rewards.device)
        return torch.where(easy, components["format"], rewards)

## Metrics of a part

A part may return `(value, metrics)` instead of its value. Metrics map names to numbers or to tensors
[N] or [B, T], and are logged in the step's row as `PART/NAME`, such as `policy_loss/NAME`. A tensor is
averaged over the trained tokens of all updates, or over the rollouts that have one; entries that are nan
are left out. A number is weighted by the trained tokens of the rows that the part was given, so a mean does
not depend on the split into micro-batches, but a maximum does. The update of a reference returns
`rlkit.types.Measured(state, metrics)`, because its state may itself be a pair.

    def loss(ratio, advantages):
        return -ratio * advantages, {"above": (ratio > 1).float()}

A reward function may return `(score, metrics)` too, plain or async. The row has the mean of its numbers as
`reward/TERM/NAME`:

    def few_words(rollout):
        words = len(rollout.final_content.split())
        return float(words < 50), {"words": words}

A callback logs with `module.log(NAME, VALUE)` in any of its hooks. The row has the mean of what was logged
since the row before, over all ranks.

    import lightning as L

    class Clock(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            module.log("mine/hour", 12)

    def clock(run):  # callbacks: +callbacks.clock={_target_: my_parts.clock, _partial_: true}
        return Clock()
"""  # noqa: E501


DECLARING = """
## What parts assume and give

Some parts need a property of others. For example, an advantage may need rewards of 0 and 1. A run that
breaks a declared assumption is refused, and the message says what to choose instead. Declarations are
optional. A part without them assumes and guarantees nothing. If another part relies on it, the run prints a
warning and continues.

    from rlkit.types import assumes, gives, keeps, vanishes

    @gives("binary")  # a reward function: every score is 0 or 1
    def solved(rollout): ...

    @gives("binary", strict=True)  # only while its hyperparameter `strict` is true
    def graded(rollout, *, strict=False): ...

    @keeps("non_negative", "raw")  # an aggregator or overlong rule: what it does not destroy
    def halves(scores, weights): ...

    @assumes("binary_rewards")  # an advantage
    def share_of_right(rewards, group_ids): ...

    @vanishes("without_advantages")  # a policy loss: a token without an advantage has no gradient
    def plain(ratio, advantages): ...

With `vanishes`, rlkit can skip an update or a backward pass. If the rewards are equal in every group of a
minibatch, all advantages are 0. If the loss has no other term, the gradient is then 0, and an update would only
decay the weights and repeat old momentum. rlkit skips it only if the policy loss has the declaration. On one
device it also leaves out the backward pass of a micro-batch without advantages. If the dry run finds a gradient
where a part declares none, the run is refused.

`functools.partial` and `functools.wraps` keep the declarations of what they wrap, but `functools.wraps` drops
`vanishes`, because a wrapper may add a term. A weight other than 1 removes `binary`, and a negative weight also
removes `non_negative`. The sum of several components is not `binary`. `reward.normalize` removes all words,
except for the group filter, which reads the rewards before they are normalised.

`@stateful` marks a function or a class that remembers its earlier calls, such as a reward that counts
([what your code shares with the run](own_parts.md#what-your-code-shares-with-the-run)).
"""  # noqa: E501


def declarations_page() -> list[str]:
    """Return the lines about declarations: the known words, and the shipped parts' declarations."""
    lines = [*DECLARING.splitlines(), ""]
    lists = {
        "Words for `@gives` and `@keeps`": rlkit.types.GUARANTEES,
        "Words for `@assumes`": rlkit.types.ASSUMPTIONS,
        "Words for `@vanishes`": rlkit.types.VANISHING,
    }
    for title, known in lists.items():
        lines += [
            f"{title}:",
            "",
            *(f"- `{word}` {meaning}" for word, meaning in known.items()),
            "",
        ]
    lines += [
        "The table is for the functions' default numbers. `nothing` is a declaration without a",
        "word, and an empty cell is no declaration.",
        "",
    ]
    lines += ["| shipped part | assumes | gives | keeps | vanishes |", "|---|---|---|---|---|"]
    for target in dict.fromkeys(target for _, target in targets()):
        words = [
            rlkit.types.declarations(resolve(target), kind)
            for kind in ("assumes", "gives", "keeps", "vanishes")
        ]
        if any(found is not None for found in words):
            lines.append(
                f"| `{target}` | "
                + " | ".join("" if w is None else ", ".join(sorted(w)) or "nothing" for w in words)
                + " |"
            )
    return lines


def signatures(protocol: type) -> list[str]:
    """Return the attributes of a Protocol's objects, and the signature of its function or of each
    method of its objects."""
    attributes = {
        name: inspect.get_annotations(value.fget)["return"]
        for name, value in vars(protocol).items()
        if isinstance(value, property)
    } | inspect.get_annotations(protocol)
    methods = {
        n: f
        for n, f in inspect.getmembers(protocol, inspect.isfunction)
        if n == "__call__" or not n.startswith("_")
    }
    kinds = {
        name: "async " if inspect.iscoroutinefunction(f) else "" for name, f in methods.items()
    }
    shown = {
        name: (
            str(inspect.signature(f))
            .replace("(self, ", "(")
            .replace("(self)", "()")
            .replace("'", "")
            .replace("= ,", '= "",')
            .replace("= )", '= "")')
        )
        for name, f in methods.items()
    }
    return [f"{name}: {hint}  " for name, hint in attributes.items()] + [
        signature if name == "__call__" else f"{kinds[name]}{name}{signature}  "
        for name, signature in shown.items()
    ]


def shipped(protocol: str) -> list[str]:
    """Return the functions in conf/ at the places for this Protocol."""
    places = [p.place for p in points() if re.search(rf"\b{protocol}\b", p.signature)]
    names = [
        target
        for path, target in targets()
        if path in places or re.sub(r"terms\.\w+", "terms.NAME", path) in places
    ]
    return list(dict.fromkeys(names))


# ------------------------------------------------------------------------------------------ metrics

READING = """
Every number in `metrics.jsonl`: its meaning and unit, the value of a healthy run, and the remedy for another
value. Replace a word in capitals by a name: TERM by a reward term, PART by a part of a mixture, NAME by any
name. A number that does not apply to a run is null in the file. The metrics of your own callbacks stand beside
these, under their names.
"""  # noqa: E501


def metrics_page() -> str:
    """Return the glossary page with a table for each section."""
    lines = [MARK, "", "# Metrics", *READING.splitlines(), ""]
    for section in glossary.read_sections():
        lines += [
            f"## {section.title}",
            "",
            "| metric | meaning | healthy | otherwise |",
            "|---|---|---|---|",
        ]
        for entry in section.entries:
            names = ", ".join(f"`{name}`" for name in entry.names)
            lines.append(
                f"| {names} | {cell(entry.means)} *In: {cell(entry.unit)}.* | {cell(entry.usual)} |"
                f" {cell(entry.act)} |"
            )
        lines += [
            "",
            "Computed by " + ", ".join(f"`{name}`" for name in section.computed) + ".",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def programs_page() -> str:
    """Return docs/programs.md with a new table of request settings between its marks."""
    from rlkit.extras.programs.settings import write_table

    head, begin, rest = (DOCS / "programs.md").read_text().partition(MARK)
    _, end, tail = rest.partition("<!-- end -->")
    return f"{head}{begin}\n\n{write_table()}\n\n{end}{tail}"


def main() -> None:
    """Write the pages and remove pages of deleted groups."""
    written = pages()
    for old in (DOCS / "config").glob("*.md"):
        if old not in written:
            old.unlink()
    for path, text in written.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
