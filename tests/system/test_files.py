"""Files that rlkit writes replace nothing that they should not."""

from __future__ import annotations

from rlkit.system.files import put_aside


def test_what_is_put_aside_replaces_nothing(tmp_path):
    for text in ("first", "second", "third"):
        (tmp_path / "run.json").write_text(text)
        put_aside(tmp_path / "run.json", ".earlier")
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {
        "run.json.earlier": "first",
        "run.json.earlier_2": "second",
        "run.json.earlier_3": "third",
    }
