"""Write one page from the rows: results, missing pieces with their reasons, and what to look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rows import figures_of, is_over, read_rows, states_of

TITLES = {
    "a": "Ceilings, versions, CUDA graphs, tests",
    "b": "Decoding steps",
    "c": "One update by part",
    "d": "Whole RL steps at GSM8K's lengths",
    "e": "The embedded model's curve on the CPU and on the card",
    "f": "Qwen3-0.6B on GSM8K",
}
TABLES = {
    "ceilings": "Shares below refer to the copy. The bfloat16 product is what an update can reach.",
    "CUDA graphs": "Counts since the first call. `refused` has to stay 0, and replays have to grow"
    " in each call. The same call again should capture nothing.",
    "tests": "Tests marked `gpu`; failures by name.",
    "decode": "Rows in groups of eight, medians over the looks. The limit reads all weights once"
    " and the keys and values of every row, at the measured copy rate.",
    "kernels": "A call with adapters, by torch.profiler; milliseconds of the card.",
    "alone": "The draw of all rows, and one layer of attention.",
    "update": "Forward and backward with adapters, seconds. The head is the whole less the trunk;"
    " `linear` is the trunk less attention, which is timed alone.",
    "attention": "One layer, forward and backward.",
    "gaps": "Absolute differences of log-probs in nats.",
    "steps": "Lengths by a limit for each seed. `update` includes scoring. `host_ms_a_look` is the"
    " time in which the card waits for the host.",
    "curve": "Mean reward of each step in float32.",
    "training": "Mean reward of a step's samples.",
}
MOST_ROWS = 90  # most rows of a table on the page; rows.jsonl has all


def write_page(out: Path, header: str) -> Path:
    """Write evidence.md beside the rows and return its path."""
    rows = read_rows(out)
    lines = ["# GPU evidence", "", header, "", *summary(rows), "", *remarks(rows)]
    for part, title in TITLES.items():
        lines += ["", f"## {part}. {title}", ""]
        states = states_of(rows, part)
        if not states:
            lines.append("Not begun.")
        lines += left_out(rows, part)
        for table, own in tables_of(rows, part).items():
            lines += ["", f"**{table}** {TABLES.get(table, '')}".rstrip(), "", *markdown(own)]
    page = out / "evidence.md"
    page.write_text("\n".join(lines) + "\n")
    return page


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table with a line for each part: the number of pieces by status."""
    lines = ["| part | | pieces done | skipped | failed | interrupted | complete |"]
    lines.append("|---|---|---|---|---|---|---|")
    for part, title in TITLES.items():
        states = list(states_of(rows, part).values())
        counts = [states.count(name) for name in ("done", "skipped", "failed", "begun")]
        complete = "yes" if is_over(rows, part) else "no"
        lines.append(f"| {part} | {title} | {' | '.join(map(str, counts))} | {complete} |")
    return lines


def left_out(rows: Sequence[dict[str, Any]], part: str) -> list[str]:
    """List the pieces without a result, each with its reason."""
    reasons = {row.get("piece"): row.get("reason", "") for row in rows if row["part"] == part}
    return [
        f"- {piece}: {'interrupted' if state == 'begun' else state}. {reasons[piece]}".rstrip()
        for piece, state in states_of(rows, part).items()
        if state != "done"
    ]


def tables_of(rows: Sequence[dict[str, Any]], part: str) -> dict[str, list[dict[str, Any]]]:
    """Return a part's tables. A curve or a training has a row per step and a column per piece."""
    tables = figures_of(rows, part)
    for name in ("curve", "training"):
        if name in tables:
            tables[name] = side_by_side(tables[name], "reward")
    return tables


def side_by_side(own: Sequence[dict[str, Any]], figure: str) -> list[dict[str, Any]]:
    """Arrange one figure in a table with a line for each row key and a column for each piece."""
    by_row: dict[str, dict[str, Any]] = {}
    for row in own:
        by_row.setdefault(row["row"], {"row": row["row"]})[row["piece"]] = row.get(figure)
    return list(by_row.values())


def markdown(own: Sequence[dict[str, Any]]) -> list[str]:
    """Return a Markdown table with every column that occurs in a row."""
    columns = list(dict.fromkeys(key for row in own for key in row))
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in own[:MOST_ROWS]:
        cells = (written(row.get(column)) for column in columns)
        lines.append(f"| {' | '.join(cells)} |")
    if len(own) > MOST_ROWS:
        lines.append(f"\n{len(own) - MOST_ROWS} further rows are in rows.jsonl.")
    return lines


def written(value: Any) -> str:
    """Return the text of a cell, "" for None."""
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


# -------------------------------------------------------------------------------- what to look at


def remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """List the figures that break a rule of this page, in the order of the parts."""
    lines = []
    for part in TITLES:
        failed = list(states_of(rows, part).values()).count("failed")
        lines += [f"- {part}: {failed} pieces failed; the reasons are below"] if failed else []
    for part, table, check in CHECKS:
        for row in figures_of(rows, part).get(table, ()):
            said = check(row)
            if said:
                place = ", ".join(str(row[key]) for key in ("piece", "row") if row.get(key))
                lines.append(f"- {part}, {place}: {said}")
    lines += compare_curves(rows)
    return ["## What to look at", "", *(lines or ["Nothing stands out by the page's own rules."])]


def graphs_remark(row: dict[str, Any]) -> str:
    return f"{row['refused']} models cannot be captured. {row['why']}" if row.get("refused") else ""


def tests_remark(row: dict[str, Any]) -> str:
    return "pytest did not pass" if row.get("exit_status") else ""


def decode_remark(row: dict[str, Any]) -> str:
    if row.get("refused"):
        return "the step cannot be captured"
    share = row.get("share_of_limit")
    if str(row.get("row", "")).startswith("replay") and share is not None and share < 0.5:
        return f"{share} of the bandwidth limit, and the goal is 0.5"
    return ""


def update_remark(row: dict[str, Any]) -> str:
    return "does not fit the memory" if row.get("fits") is False else ""


def gaps_remark(row: dict[str, Any]) -> str:
    limit = 0.05 if "bfloat16" in str(row.get("row")) else 1e-3
    return f"{row['mean']} nats on average, above {limit}" if row["mean"] > limit else ""


CHECKS: tuple[tuple[str, str, Callable[[dict[str, Any]], str]], ...] = (
    ("a", "CUDA graphs", graphs_remark),
    ("a", "tests", tests_remark),
    ("b", "decode", decode_remark),
    ("c", "update", update_remark),
    ("c", "gaps", gaps_remark),
    ("d", "steps", decode_remark),
)


def compare_curves(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Say whether the rewards on both devices are equal at every step."""
    sides: dict[str, list[float]] = {}
    for row in figures_of(rows, "e").get("curve", ()):
        sides.setdefault(row["piece"], []).append(row["reward"])
    if len(sides) < 2 or len({len(side) for side in sides.values()}) > 1:
        return []
    first, second = sides.values()
    equal = [a == b for a, b in zip(first, second, strict=True)]
    if all(equal):
        return [f"- e: all {len(equal)} steps have equal rewards on both sides"]
    gap = max(abs(a - b) for a, b in zip(first, second, strict=True))
    where = equal.index(False) + 1
    return [f"- e: rewards differ from step {where} on, by {gap:.4f} at most"]
