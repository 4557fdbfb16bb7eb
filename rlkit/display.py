"""Show a rollout and a run at a prompt and in a notebook: short, as plain text and as HTML without
scripts or anything to load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rlkit.errors import show_controls

# of a text: lines in all, characters of a line, lines of one message
LINES = 24
WIDTH = 100
MESSAGE = 8
ROWS = 12  # of a run's table
COLUMNS = {  # metric → heading
    "reward/mean": "reward",
    "eval/accuracy": "validation",
    "test/accuracy": "test",
    "kl/ref_k3": "KL",
    "policy/entropy": "entropy",
    "len/mean": "tokens",
}
STYLE = (
    "border:1px solid rgba(128,128,128,.4);border-radius:4px;padding:.4em"
    " .8em;max-width:60em;max-height:34em;overflow:auto"
)
CELL = "text-align:left;vertical-align:top;padding:.1em .8em .1em 0"


# ---------------------------------------------------------------------------------------- a rollout


def format_heading(rollout: Any) -> str:
    """One line: the task, how the episode ended, and its reward."""
    ended = (
        f"truncated by {rollout.truncation}" if rollout.status == "truncated" else rollout.status
    )
    parts = ", ".join(f"{name} {format_figure(score)}" for name, score in rollout.rewards.items())
    worth = f"reward {format_figure(rollout.total_reward)}{f' ({parts})' if parts else ''}"
    replies = len(rollout.steps)
    tokens = rollout.response_length
    size = f"{replies} {'reply' if replies == 1 else 'replies'}, {tokens} tokens"
    return show_controls(
        f"Rollout {rollout.task.id} · sample {rollout.sample} · {ended} · {worth} · {size}"
    )


def split_by_speaker(rollout: Any) -> Iterator[tuple[str, str]]:
    """(speaker, text) of an episode in order; thinking and calls are entries of their own."""
    for message in rollout.conversation or rollout.task.messages:
        thinking = message.get("reasoning_content")
        if thinking:
            yield "thinking", thinking
        content = message.get("content")
        if content:
            yield message.get("role", ""), content
        for call in message.get("tool_calls") or ():
            arguments = ", ".join(
                f"{name}={value!r}" for name, value in call["function"]["arguments"].items()
            )
            name = call["function"]["name"]
            yield "call", f"{name}({arguments})" if name else "(unreadable)"
    if rollout.task.answer:
        yield "expected", rollout.task.answer


def format_rollout(rollout: Any) -> str:
    """Show the rollout in at most a screen of text."""
    lines = [
        f"{who:>9}  {line}"
        for who, text in split_by_speaker(rollout)
        for who, line in _indent_message(who, text)
    ]
    lines = [
        f"{line[: WIDTH - 1]}…" if len(line) > WIDTH else line
        for line in shorten_lines(lines, LINES - 1)
    ]
    return "\n".join([format_heading(rollout), *lines])


def _indent_message(who: str, text: str) -> Iterator[tuple[str, str]]:
    """The lines of a message; only the first one names the speaker."""
    for index, line in enumerate(
        shorten_lines(show_controls(text.strip(), kept="\n").split("\n"), MESSAGE)
    ):
        yield "" if index else who, line


def shorten_lines(lines: Sequence[str], most: int) -> list[str]:
    """Leave out lines in the middle if there are too many."""
    if len(lines) <= most:
        return list(lines)
    head = most // 2
    tail = most - head - 1
    return [*lines[:head], f"… {len(lines) - head - tail} lines …", *lines[len(lines) - tail :]]


def render_rollout(rollout: Any) -> str:
    """Show the whole conversation in a box that scrolls. All text is escaped."""
    rows = ""
    for who, text in split_by_speaker(rollout):
        faint = ";opacity:.7;font-style:italic" if who == "thinking" else ""
        rows += (
            f'<tr><th style="{CELL};opacity:.6;font-weight:normal">{escape(who)}</th>'
            f'<td style="{CELL};white-space:pre-wrap{faint}">'
            f"{escape(show_controls(text.strip(), kept=chr(10)))}</td></tr>"
        )
    return (
        f'<div style="{STYLE}"><b>{escape(format_heading(rollout))}</b><table>{rows}</table></div>'
    )


# -------------------------------------------------------------------------------------------- a run


def format_figure(value: Any) -> str:
    """Write a figure for a table: four digits, or a dash for none."""
    return f"{value:.4g}" if isinstance(value, int | float) and value == value else "–"


def tabulate_steps(metrics: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Heading and rows of a run's figures; rows in the middle are left out if there are many."""
    columns = [name for name in COLUMNS if any(name in row for row in metrics)]
    rows = [
        [format_figure(row.get("step")), *(format_figure(row.get(name)) for name in columns)]
        for row in metrics
    ]
    if len(rows) > ROWS:
        rows = [*rows[: ROWS // 3], ["…"] * (len(columns) + 1), *rows[-(ROWS - ROWS // 3 - 1) :]]
    return [["step", *(COLUMNS[name] for name in columns)], *rows]


def run_heading(run: Any) -> str:
    """Say how a run ended, and where it is."""
    before = run.summary.get("before")
    after = run.summary.get("after")
    accuracy = (
        f" · test accuracy {format_figure(before['accuracy'])} → {format_figure(after['accuracy'])}"
        if before and after
        else ""
    )
    where = f" · {run.folder}" if run.folder else ""
    return show_controls(
        f"Run {run.summary['name']} · {run.summary['ended']} after {run.summary['steps']}"
        f" steps{accuracy}{where}"
    )


def run_text(run: Any) -> str:
    """A line on the whole run, and a table of its steps."""
    return "\n".join(
        [
            run_heading(run),
            *("".join(f"{cell:>12}" for cell in row) for row in tabulate_steps(run.metrics)),
        ]
    )


def run_html(run: Any) -> str:
    """The same as a table."""
    head, *rows = tabulate_steps(run.metrics)
    cells = "".join(
        "<tr>" + "".join(f'<td style="{CELL}">{escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    names = "".join(f'<th style="{CELL}">{escape(name)}</th>' for name in head)
    return (
        f'<div style="{STYLE}"><b>{escape(run_heading(run))}</b>'
        f"<table><tr>{names}</tr>{cells}</table></div>"
    )


# ----------------------------------------------------------------------------------------- a table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def align_columns(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, left: int) -> str:
    """Align columns of text: the first `left` columns to the left, all others (numbers) to the
    right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]

    def put(row: Sequence[str]) -> str:
        return "  ".join(
            t.ljust(w) if i < left else t.rjust(w)
            for i, (t, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()

    return "\n".join([put(columns), "-" * (sum(widths) + 2 * len(widths) - 2), *map(put, cells)])
