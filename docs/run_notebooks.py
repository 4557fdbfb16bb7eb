"""Runs the notebooks of examples/ and keeps what they show in them: `python docs/run_notebooks.py`,
after a change of one or of what one prints.

No Jupyter is needed: a cell is a piece of Python, and a notebook shows what it prints, the value of
its last line and its figures. One thread, so that numbers repeat.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
DPI = 60  # of a figure: about 20 kB
# What depends on the machine, and numbers so small that they are rounding alone.
MACHINE = re.compile(
    r"^(?:activations|kernels): .*$| with \d+ thread.*core\(s\)|0x[0-9a-f]+|-?\d\.\d+e-\d+", re.M
)
# The line of a step, whose seconds leave more or less room for the change of its reward.
STEP = re.compile(r"^(step +\d+/\d+ \w+ \S+)(?: \([+-]\S+\))?(.*) \| .*$", re.M)
BUSY = "other processes take this machine's cores"  # in a warning of a busy machine


def run_notebook(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its cells, run in the order of the file in the current
    folder. Figures that are open before are closed and not shown. Raises: what a cell raises."""
    import matplotlib.pyplot as plt
    import torch

    torch.set_num_threads(1)
    plt.close("all")
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            outputs = run_cell("".join(cell["source"]), names, count)
            cell = cell | {"execution_count": count, "outputs": outputs}
        cells.append(cell)
    return notebook | {"cells": cells}


def run_cell(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """What a cell shows, as the file of a notebook holds it."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    lines = printed.getvalue().splitlines(keepends=True)
    text = [line for line in lines if BUSY not in line]
    if text:
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        outputs.append(
            {
                "data": data,
                "execution_count": count,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return outputs + draw_figures()


def draw_figures() -> list[dict[str, Any]]:
    """The figures that are open, as pictures; they are closed."""
    import matplotlib.pyplot as plt

    outputs = []
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=DPI, metadata={"Software": None})
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    return outputs


def shown_texts(notebook: dict[str, Any]) -> list[str]:
    """The text of each code cell's outputs, without what differs from run to run."""
    texts = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            found = [
                own.get("text") or own["data"].get("text/plain", []) for own in cell["outputs"]
            ]
            text = MACHINE.sub("…", "".join("".join(lines) for lines in found))
            texts.append(STEP.sub(r"\1\2", text))
    return texts


def main() -> None:
    os.environ["MPLBACKEND"] = "Agg"
    for file in sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            whole = run_notebook(json.loads(file.read_text()))
        file.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
        print(file.name, flush=True)


if __name__ == "__main__":
    main()
