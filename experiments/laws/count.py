"""Count the rows of .ci/fuzz and .ci/mutants, with intervals.

python experiments/laws/count.py                                    # the rows beside this file
python experiments/laws/count.py --fuzz fuzz.jsonl --mutants mutants.csv  # these first
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from pathlib import Path

from rlkit.statistics import share_interval

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))
import mutating  # noqa: E402

FIELDS = ("seed", "kind", "status", "reached", "faults", "date", "commit")


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def keep_cases(notes: Path) -> None:
    """Write each case's row without the command's output."""
    found = {row["seed"]: row for row in map(json.loads, notes.read_text().splitlines())}
    rows = [{name: found[seed][name] for name in FIELDS} for seed in sorted(found)]
    write_rows(HERE / "fuzz.csv", [{**row, "faults": "; ".join(row["faults"])} for row in rows])


def last_outcomes(trials: list[dict[str, str]]) -> list[dict[str, str]]:
    """The last trial of each mutation of the table that a test can notice."""
    table = {m.key for m in mutating.read_table() if not m.equivalent}
    found = {tuple(row[name] for name in mutating.KEY): row for row in trials}
    return [row for key, row in found.items() if key in table]


def count_share(what: str, found: int, rows: list[dict[str, str]]) -> str:
    low, high = share_interval(found, len(rows))
    days = sorted({row["date"] for row in rows})
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    share = f"{found} of {len(rows)} {what}, {found / len(rows):.1%} ({low:.1%} to {high:.1%})"
    return f"{share}; {' to '.join(dict.fromkeys((days[0], days[-1])))}, commits {commits}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fuzz", type=Path)
    parser.add_argument("--mutants", type=Path)
    given = parser.parse_args()
    if given.fuzz:
        keep_cases(given.fuzz)
    if given.mutants:
        write_rows(HERE / "mutants.csv", read_rows(given.mutants))
    cases = read_rows(HERE / "fuzz.csv")
    missed = sum(row["reached"] == "False" for row in cases)
    statuses = ", ".join(f"{n} × {s}" for s, n in Counter(r["status"] for r in cases).most_common())
    print(count_share("cases with a fault", sum(bool(row["faults"]) for row in cases), cases))
    print(f"exit statuses: {statuses}; {missed} did not reach their fault")
    outcomes = last_outcomes(read_rows(HERE / "mutants.csv"))
    found = Counter(row["outcome"] for row in outcomes)
    print(count_share("mutations survived", found["survived"], outcomes))
    print(", ".join(f"{n} {outcome}" for outcome, n in found.most_common()))


if __name__ == "__main__":
    main()
