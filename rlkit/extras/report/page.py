"""The page: one HTML file with its style, its script and its data inside. Its content policy lets
nothing else in."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from importlib.resources import files
from typing import Any

from rlkit.extras.report.charts import (
    BINS,
    OTHER,
    SECTIONS,
    Chart,
    chart_others,
    page_data,
    phase_starts,
    seconds_data,
    solve_rates,
)
from rlkit.extras.report.conversations import Shown, compress_data, trim_text
from rlkit.extras.report.tables import (
    HeldOutRow,
    mark_change,
    reward_rows,
    tabulate_held_out,
)
from rlkit.runs.comparing import TO_CLAIM, WithInterval
from rlkit.runs.reading import Group, ReadRun, find_differences, find_rollout_file, is_number
from rlkit.runs.trends import find_symptoms
from rlkit.runs.verdicts import (
    UNITS,
    average_budgets,
    describe_basis,
    find_falls,
    find_shared_figure,
    judge_lines,
    list_notes,
    list_repeated_seeds,
)
from rlkit.system.contents import PROMPTS
from rlkit.system.files import read_regular
from rlkit.tasks.splits import count_in_words

SCRIPTS = ("charts.js", "report.js")
NOSCRIPT = (
    "<noscript><p class=note>The charts need JavaScript; the last line of this page names the same"
    " data as files.</p></noscript>"
)
SOLVED = (
    "<p class=note>How many of a step's problems have which share of samples with a reward above 0:"
    " pale over the first fifth of the steps, full over the last. Problems at 0 and at 1 teach"
    " nothing to a group algorithm.</p>"
)
SHOWN = 80  # differing settings


def render(
    found: Sequence[ReadRun],
    groups: Sequence[Group],
    told: Sequence[Chart],
    shown: Shown,
    notes: Sequence[str],
    beside: str,
    smooth: int | None,
) -> str:
    """Write the whole file. `beside` names the folder with pictures, "" if there are none;
    `notes` list the omissions."""
    title = f"rlkit report: {' · '.join(group.label for group in groups) or found[0].name}"
    every = [*told, *chart_others(groups, told)]
    held_out = tabulate_held_out(groups)
    curves = [section(name, place_charts(name, every, groups)) for name in SECTIONS]
    sections = [
        section("Which is better", verdict_list(groups)),
        section(
            "Before and after",
            (held_out_table(held_out) if held_out else "") + fall_list(groups),
        ),
        section("Health", health_list(groups)),
        *curves,
        section(
            "Solve rates",
            (
                '<div class=charts id="solved"></div>' + SOLVED
                if any(p.solved for p in shown.played)
                else ""
            ),
        ),
        section("Rewards", rewards_table(groups)),
        section("Turns", turns_table(shown)),
        section("Runs", runs_table(found) + phases_list(groups)),
        section("Settings that differ", settings_table(groups)),
        section("Prompts", prompts_list(found)),
        section(
            "Conversations",
            files(__package__).joinpath("viewer.html").read_text() if shown.entries else "",
            wide=True,
        ),
    ]
    links = "".join(
        f'<a href="#{ident}">{escape(name)}</a>' for ident, name, text in sections if text
    )
    drawn = page_data(every, groups, smooth) | {"seconds": seconds_data(groups), "beside": beside}
    drawn |= {
        "bins": BINS,
        "solved": [solve_rates(played.solved) for played in shown.played],
        "runs": shown.runs,
    }
    drawn |= {"files": [chart.name for chart in told if beside]}
    blocks = {"curves": drawn, "list": {"runs": shown.runs, "rollouts": shown.entries}}
    data = {
        **{name: compress_data(block) for name, block in blocks.items()},
        **{f"page-{i}": text for i, text in enumerate(shown.pages)},
    }
    said = "".join(f"<p class=note>{escape(note)}</p>" for note in notes)
    body = _with_controls(sections, [ident for ident, _, text in curves if text])
    main = f"{said}{body}<footer>{_footer(beside)}</footer>\n"
    return document(title, links, main, data)


def document(title: str, links: str, main: str, data: Mapping[str, str]) -> str:
    """Write the file around a page's HTML, with style, script and content policy. `data` holds
    compressed blocks by name."""
    css, *scripts = (
        files(__package__).joinpath(name).read_text() for name in ("report.css", *SCRIPTS)
    )
    script = "".join(scripts)
    policy = (
        f"default-src 'none'; style-src {source_hash(css)}; script-src {source_hash(script)};"
        " base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width,'
        f' initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{css}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1><button id=theme type=button>Light or"
        f" dark</button></header>\n<nav>{links}</nav>\n"
        f"<main>\n{main}</main>\n"
        + "".join(
            f'<script type="application/gzip" id="data-{name}">{text}</script>\n'
            for name, text in data.items()
        )
        + f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _with_controls(sections: Sequence[tuple[str, str, str]], curves: Sequence[str]) -> str:
    """The sections in order; all charts stand in one box with their common controls."""
    controls = files(__package__).joinpath("controls.html").read_text()
    out = []
    for ident, _, text in sections:
        opened = f'<div id="curve-box">{controls}' if curves and ident == curves[0] else ""
        out.append(f"{opened}{text}{'</div>' if curves and ident == curves[-1] else ''}")
    return "".join(out)


def _footer(beside: str) -> str:
    """Say where the same data is as files."""
    pictures = (
        f"The charts as SVG and PDF are in the folder <code>{escape(beside)}/</code> beside this"
        " file; "
        if beside
        else ""
    )
    said = (
        f"{pictures}the numbers are in metrics.csv and the conversations in completions/ and"
        " rollouts/ of each run."
    )
    return said[0].upper() + said[1:]


def source_hash(text: str) -> str:
    """The name of a script or style sheet in a content policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def section(name: str, text: str, *, wide: bool = False) -> tuple[str, str, str]:
    """(id, heading, HTML); nothing without text."""
    ident = name.lower().replace(" ", "-")
    kind = " class=wide" if wide else ""
    return (
        ident,
        name,
        f'<section id="{ident}"{kind}><h2>{escape(name)}</h2>{text}</section>\n' if text else "",
    )


# ------------------------------------------------------------------------------------------- tables


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML; on a narrow screen the table scrolls in its own box."""
    head = "".join(f"<th>{name}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        "<div class=scroll"
        f" tabindex=0><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def held_out_table(rows: Sequence[HeldOutRow]) -> str:
    """Before and after."""
    cells = [
        (
            escape(row.line),
            escape(row.split),
            escape(row.figure),
            interval(row.before),
            interval(row.after),
            marked_change(row.change, claims=row.claims()),
            count_in_words(row.problems, row.distinct),
            str(row.seeds),
        )
        for row in rows
    ]
    several = any(row.seeds > 1 for row in rows)
    note = (
        "In brackets 95 % intervals: of one seed over problems, that of the change as of two"
        " independent samples (Newcombe)"
    )
    note += (
        "; of three seeds and more Student's t over seeds, of these problems; two seeds have none"
        if several
        else ""
    )
    note += f", and fewer than {TO_CLAIM} seeds claim nothing." if several else "."
    if any(row.distinct < row.problems for row in rows):
        note += " Rows that repeat a problem count once in an interval of one seed."
    return (
        html_table(
            ("line", "problems of", "figure", "before", "after", "change", "problems", "seeds"),
            cells,
        )
        + f"<p class=note>{note}</p>"
    )


def verdict_list(groups: Sequence[Group]) -> str:
    """Compare each line with the first, and their spending. Without a comparison, only name the
    repeated seeds."""
    compared = find_shared_figure(groups)
    found = judge_lines(groups, compared) if compared else []
    if not compared or not found:
        return list_paragraphs(list_repeated_seeds(groups))
    kinds = {"better": "good", "worse": "bad", "open": "open"}
    items = [f"<li class={kinds[v.claim]}>{escape(v.sentence)}</li>" for v in found]
    said = list_paragraphs([describe_basis(compared, found), *list_notes(groups, compared)])
    spent = average_budgets(groups)
    rows = [
        [escape(group.label), *(f"{values[i]:,.0f}" for values in spent.values())]
        for i, group in enumerate(groups)
    ]
    table = html_table(["spent by a run", *(UNITS[unit] for unit in spent)], rows) if spent else ""
    return f"<ul class=health>{''.join(items)}</ul>{said}{table}"


def list_paragraphs(notes: Sequence[str]) -> str:
    """Write each note as a paragraph."""
    return "".join(f"<p class=note>{escape(text)}</p>" for text in notes)


def fall_list(groups: Sequence[Group]) -> str:
    """List the lines that end below their start; nothing if there is none."""
    items = [
        f"<li class={'bad' if fall.claim else 'open'}>{escape(fall.sentence)}</li>"
        for fall in find_falls(groups)
    ]
    return f"<ul class=health>{''.join(items)}</ul>" if items else ""


def marked_change(change: WithInterval, *, claims: bool = True) -> str:
    """Write a change in the colour of its mark."""
    kind = mark_change(change, claims=claims)
    return f"<span class={kind}>{interval(change, sign='+')}</span>"


def interval(estimate: WithInterval, *, sign: str = "") -> str:
    """0.984 [0.961, 0.994]."""
    value, low, high = estimate
    if math.isnan(value):
        return "not known"
    own = f"{value:{sign}.3f}"
    return (
        own
        if math.isnan(low)
        else f"{own} <span class=interval>[{low:{sign}.3f}, {high:{sign}.3f}]</span>"
    )


def health_list(groups: Sequence[Group]) -> str:
    """The verdict of the checks, a line a run."""
    out = []
    for group, run in ((own, run) for own in groups for run in own.runs):
        steps = sum("reward/mean" in row for row in run.rows)
        found = find_symptoms(run)
        name = escape(run_name(group, run))
        where = [
            f", on {len(f.steps)} of {steps} steps, first at {f.steps[0]}" if f.steps else ""
            for f in found
        ]
        items = "".join(
            f"<li><b>{escape(f.check)}</b>{at}: {escape(f.text)}</li>"
            for f, at in zip(found, where, strict=True)
        )
        if not steps:
            out.append(f"<li class=open>{name}: nothing to check, no step was finished</li>")
        elif found:
            out.append(f"<li class=bad><span class=mark>!</span> {name}:<ul>{items}</ul></li>")
        else:
            out.append(
                f"<li class=good><span class=mark>✓</span> {name}: the checks found nothing in"
                f" {steps} steps</li>"
            )
    return f"<ul class=health>{''.join(out)}</ul>" if out else ""


def prompts_list(found: Sequence[ReadRun]) -> str:
    """List the policies' first prompts; a text common to several runs stands once."""
    readers: dict[str, list[str]] = {}
    for run in found:
        with suppress(OSError):
            text = read_regular(run.folder / PROMPTS).decode(errors="replace")
            readers.setdefault(text, []).append(run.name)
    texts = "".join(
        f"<details><summary>{escape(', '.join(dict.fromkeys(names)))}</summary>"
        f"<div class=text>{escape(trim_text(text))}</div></details>"
        for text, names in readers.items()
    )
    note = (
        "<p class=note>A first prompt of each part and environment, as the policy reads it: with"
        " the system prompt, the list of tools and the control tokens of the template.</p>"
    )
    return f"{note}{texts}" if texts else ""


def run_name(group: Group, run: ReadRun) -> str:
    """Name the line, and the run in it."""
    return group.label if len(group.runs) == 1 else f"{group.label}, seed {run.seed}"


def runs_table(found: Sequence[ReadRun]) -> str:
    """List each run's settings and its end."""
    rows = []
    for run in found:
        s = run.summary
        unfinished = "unfinished" if find_rollout_file(run.folder) is None else "episodes"
        ended = str(s.get("ended", "")) or unfinished
        good = ended in ("finished", "episodes")
        steps = run.rows[-1]["step"] if run.rows else None
        rows.append(
            (
                escape(run.name),
                "" if run.seed is None else str(run.seed),
                f"<span class={'plain' if good else 'bad'}>{escape(ended)}</span>",
                _number(steps),
                _number(s.get("tokens")),
                seconds(s.get("wall_seconds", s.get("seconds"))),
                _number(s.get("peak_memory_gb"), " GiB"),
                escape(str(s.get("device", ""))),
                f"<code>{escape(str(run.folder))}</code>",
            )
        )
    return html_table(
        ("run", "seed", "ended", "steps", "tokens", "time", "peak memory", "device", "folder"), rows
    )


def _number(value: Any, unit: str = "") -> str:
    """1,234."""
    return f"{value:,}{unit}" if is_number(value) else ""


def seconds(value: Any) -> str:
    """90 s, 12 min or 3.4 h."""
    if not is_number(value):
        return ""
    if value < 120:
        return f"{value:.0f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


def phases_list(groups: Sequence[Group]) -> str:
    """List each run's messages at a change of phase."""
    said = [
        f"<li>{escape(run_name(group, run))}: {escape(text)}</li>"
        for group in groups
        for run in group.runs
        for _, text in run.switches
    ]
    return f"<h3>Phases</h3><ul>{''.join(said)}</ul>" if said else ""


def settings_table(groups: Sequence[Group]) -> str:
    """List the settings that differ between the lines; seeds aside."""
    changed = find_differences([group.runs[0] for group in groups])
    if not changed:
        return ""
    rows = [
        (f"<code>{escape(key)}</code>", *(setting(v) for v in values))
        for key, values in list(changed.items())[:SHOWN]
    ]
    more = (
        f"<p class=note>{len(changed) - SHOWN} more settings differ.</p>"
        if len(changed) > SHOWN
        else ""
    )
    return html_table(("setting", *(escape(group.label) for group in groups)), rows) + more


def setting(value: Any) -> str:
    """Write a value of a config; a dash if the run has no such setting."""
    return "–" if value is None else f"<code>{escape(str(value))}</code>"


def rewards_table(groups: Sequence[Group]) -> str:
    """List every component of the reward, at the start and at the end; nothing if the reward has
    one."""
    rows = reward_rows(groups)
    if all(not row.name for row in rows) or len({row.name for row in rows}) < 3:
        return ""
    cells = [
        (
            escape(row.line),
            (escape(row.name) or "<b>reward</b>")
            + (" <span class=note>shadow</span>" if row.shadow else ""),
            f"{row.first:.3f}",
            f"{row.last:.3f}",
            "" if math.isnan(row.explains) else f"{row.explains:.0%}",
            ", ".join(f"{status} {share:.0%}" for status, share in row.statuses.items()),
        )
        for row in rows
    ]
    note = (
        "Means over the first and the last tenth of the steps. Explains: the share of the reward's"
        " variance within groups that the "
    )
    note += "component alone explains. A shadow is scored and not trained on."
    return (
        html_table(("line", "reward", "start", "end", "explains", "scores at the end"), cells)
        + f"<p class=note>{note}</p>"
    )


def turns_table(shown: Shown) -> str:
    """Put the n-th replies of training episodes together, over the steps read; nothing if every
    episode has one reply."""
    rows = []
    for name, played in zip(shown.runs, shown.played, strict=False):
        if len(played.turns) < 2:
            continue
        for number, turn in enumerate(played.turns, 1):
            share = {
                what: f"{count / turn.replies:.0%}"
                for what, count in turn._asdict().items()
                if what in ("called", "failed", "ended")
            }
            mean = f"{turn.reward / turn.scored:.3f}" if turn.scored else ""
            tokens = f"{turn.tokens / turn.replies:.1f}"
            rows.append(
                (
                    escape(name),
                    str(number),
                    f"{turn.replies:,}",
                    tokens,
                    share["called"],
                    share["failed"],
                    share["ended"],
                    mean,
                )
            )
    columns = (
        "run",
        "turn",
        "replies",
        "tokens",
        "called a tool",
        "call failed",
        "ended here",
        "reward of those",
    )
    return f"<div class=tall tabindex=0>{html_table(columns, rows)}</div>" if rows else ""


# ------------------------------------------------------------------------------------------- charts


def place_charts(name: str, told: Sequence[Chart], groups: Sequence[Group]) -> str:
    """Write the places of a section's charts; the script draws them."""
    own = [chart for chart in told if chart.section == name and chart.against == "steps"]
    if not own:
        return ""
    boxes = f'<div class=charts data-section="{escape(name)}"></div>'
    if name == OTHER:
        return (
            f"<details><summary>{len(own)} more, metrics of your own among"
            f" them</summary>{boxes}</details>"
        )
    return boxes + (NOSCRIPT + explain_reading(groups) if name == SECTIONS[0] else "")


def explain_reading(groups: Sequence[Group]) -> str:
    """Explain how to read the charts."""
    said = [
        "Lines are smoothed over a twelfth of the run unless smooth= says otherwise, with the"
        " unsmoothed values faint behind them."
    ]
    said.append(
        "An axis has a least range, so noise stays small. A green band is where a figure needs no"
        " attention."
    )
    if any(len(group.runs) > 1 for group in groups):
        said.append(
            "A line of several seeds is their mean, its band the lowest and the highest of them; "
            "where a seed ended early, the others go on thin."
        )
    if any(len(group.runs) == 1 and group.runs[0].summary.get("before") for group in groups):
        said.append("The interval of an accuracy of one run is at 95 % over problems.")
    said.append(
        "Bars stand at steps that were measured, in place of a band, where not every step was."
    )
    if any(True for group in groups for _ in phase_starts(group)):
        said.append("A dotted vertical line is where a phase began.")
    return f"<p class=note>{' '.join(said)}</p>"
