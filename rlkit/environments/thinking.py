"""Telling a reply's thinking from its content."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def split_thinking(text: str, *, opened: bool = False) -> tuple[str, str, bool]:
    """Split a reply at its last `</think>`.

    Args:
      text: a reply as decoded.
      opened: the prompt already ended in `<think>`, as some chat templates make it; then a reply without `</think>` is
        all thinking.
    Returns: (thinking, content, closed). The tags are in neither part, and both parts are stripped; without any tag the
      text is the content, unchanged. `closed` is False where a block was opened and never closed: all that follows is
      thinking, and the content is what stood before it.
    """
    if OPEN not in text and CLOSE not in text and not opened:
        return "", text, True
    before, tag, after = text.rpartition(CLOSE)
    if not tag and opened:
        return _without_tags(text), "", False
    content, unclosed, rest = after.partition(OPEN)
    thinking = [part for part in (_without_tags(before), _without_tags(rest)) if part]
    return "\n".join(thinking), content.strip(), not unclosed


def _without_tags(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "").strip()
