"""Mix docstrings of rlkit and of well-known packages for a blind reader.

The reader does not know the origin of a docstring and marks the sentences that must be read twice.

    python experiments/prose/blind.py sample SEED FOLDER   # writes units.md and key.csv
    python experiments/prose/blind.py pages SEED FOLDER --peers CLONE/docs…  # paragraphs of pages
    python experiments/prose/blind.py count FOLDER         # of the marks in FOLDER/*.csv

A unit is a docstring of 15 to 110 words with the head of its function or class, or a paragraph of
18 to 90 words. A reader gets only units.md, and writes a CSV with the columns unit, sentence and
why.
"""

from __future__ import annotations

import argparse
import ast
import csv
import importlib.util
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("engines", "training", "episodes", "rewards")
PEERS = (
    *("lightning.pytorch", "torch.distributed", "torch.optim", "transformers.generation"),
    *("peft.tuners", "datasets", "optuna", "joblib"),
)
PAGES = (
    *("first_task", "own_parts", "no_rise", "programs", "comparing", "machines", "asynchrony"),
    *("security", "sizing", "run_folder", "choosing", "curves"),
)
MOST = 40  # most docstrings taken from one peer


def read_docstrings(folder: Path) -> Iterator[str]:
    """Yield the docstrings of a package, each below the head of its function or class."""
    for file in sorted(folder.rglob("*.py")):
        if "test" in str(file):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            doc = ast.get_docstring(node)
            if doc is None or not 15 <= len(doc.split()) <= 110:
                continue
            is_class = isinstance(node, ast.ClassDef)
            head = (
                f"class {node.name}" if is_class else f"def {node.name}({ast.unparse(node.args)})"
            )
            yield f"{head[:220]}\n\n{doc}"


def read_paragraphs(files: Iterable[Path]) -> Iterator[str]:
    """Yield the paragraphs of pages, without code, tables, headings and links."""
    for file in files:
        text = re.sub(r"^---.*?---|```.*?```|<[^>\n]*>", "", file.read_text(), flags=re.DOTALL)
        for raw in re.split(r"\n\s*\n", text):
            paragraph = re.sub(
                r"\s*\n\s*", " ", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", raw.strip())
            )
            if raw.startswith(("    ", "import ")) or paragraph[:1] in "#|<>!:$":
                continue
            if 18 <= len(paragraph.split()) <= 90:
                yield paragraph


def pick(parts: Iterable[Iterable[str]]) -> list[str]:
    """Pick at most MOST units of each part. Every call picks the same units."""
    picked: list[str] = []
    for part in parts:
        units = list(part)
        random.Random(1).shuffle(units)
        picked += units[:MOST]
    return picked


def write_sample(own: Sequence[str], peers: Sequence[str], count: int, seed: int, to: Path) -> None:
    """Write `count` units of each side in random order, and a key with the side of each unit."""
    rng = random.Random(seed)
    units = [("rlkit", unit) for unit in rng.sample(own, count)]
    units += [("peers", unit) for unit in rng.sample(peers, count)]
    rng.shuffle(units)
    to.mkdir(parents=True, exist_ok=True)
    texts = [f"### {i}\n\n{unit}\n" for i, (_, unit) in enumerate(units, 1)]
    (to / "units.md").write_text("\n".join(texts))
    with (to / "key.csv").open("w", newline="") as file:
        rows = [(i, side, len(unit.split())) for i, (side, unit) in enumerate(units, 1)]
        csv.writer(file, lineterminator="\n").writerows([("unit", "side", "words"), *rows])


def count_marks(folder: Path) -> None:
    """Print for each reader and side the number of marked units and of marked sentences."""
    with (folder / "key.csv").open(newline="") as file:
        key = {row["unit"]: row for row in csv.DictReader(file)}
    for marks in sorted(folder.glob("*.csv")):
        if marks.name == "key.csv":
            continue
        with marks.open(newline="") as file:
            marked = [row["unit"] for row in csv.DictReader(file)]
        for side in ("rlkit", "peers"):
            own = [unit for unit in marked if key[unit]["side"] == side]
            units = [row for row in key.values() if row["side"] == side]
            words = sum(int(row["words"]) for row in units)
            rate = 1000 * len(own) / words
            print(
                f"{marks.stem:8} {side}: {len(set(own))} of {len(units)} units,"
                f" {len(own)} sentences, {rate:.1f} per 1,000 words"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("sample", "pages", "count"))
    parser.add_argument("words", nargs="+", help="SEED FOLDER, or FOLDER")
    parser.add_argument("--peers", nargs="*", type=Path, default=[])
    given = parser.parse_args()
    folder = Path(given.words[-1])
    if given.what == "count":
        count_marks(folder)
        return
    seed = int(given.words[0])
    if given.what == "sample":
        places = [importlib.util.find_spec(name).submodule_search_locations[0] for name in PEERS]
        peers = pick(read_docstrings(Path(place)) for place in places)
        own = [unit for name in FOLDERS for unit in read_docstrings(ROOT / "rlkit" / name)]
        write_sample(own, peers, 150, seed, folder)
    else:
        peers = pick(read_paragraphs(sorted(place.rglob("*.md"))) for place in given.peers)
        own = list(read_paragraphs(ROOT / f"docs/{name}.md" for name in PAGES))
        write_sample(own, peers, 110, seed, folder)


if __name__ == "__main__":
    main()
