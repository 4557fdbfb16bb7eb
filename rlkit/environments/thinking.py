"""Separate a reply's thinking from its content."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlkit.types import THINK_TAGS, Thinking


def split_thinking(text: str, *, opened: bool = False) -> tuple[str, str, bool]:
    """Split a reply at its last `</think>`.

    Args:
      text: the decoded reply.
      opened: whether the prompt already ends in `<think>`, as with some chat templates. If so, a
        reply without `</think>` is all thinking.
    Returns: (thinking, content, closed). Neither text contains the tags, and both texts are
      stripped. Without any tag, the whole text is the content, unchanged. `closed` is False if a
      thinking block was opened and never closed. All text after the opening tag is then thinking,
      and the text before it is the content.
    """
    pieces = re.split(f"({'|'.join(THINK_TAGS)})", text)
    return _split(pieces[::2], [tag == THINK_TAGS[1] for tag in pieces[1::2]], opened)


def split_reply(
    thinking: Thinking, ids: Sequence[int], *, opened: bool = False
) -> tuple[str, str, bool]:
    """Split a reply's token ids into thinking and content, as `split_thinking` does with text.

    If each tag is a single token of the vocabulary, only these two ids count as tags. A tag spelled
    with several tokens, for example in a quotation, is then ordinary text. Otherwise the tags are
    searched in the decoded text.

    Args:
      thinking: the Thinking record of the policy's renderer.
      ids: token ids of a reply, without its end-of-sequence id.
      opened: as in `split_thinking`.
    """
    if thinking.ids is None:
        return split_thinking(thinking.decode(ids), opened=opened)
    at = [i for i, token in enumerate(ids) if token in thinking.ids]
    texts = [
        thinking.decode(ids[a:b])
        for a, b in zip([0, *(i + 1 for i in at)], [*at, len(ids)], strict=True)
    ]
    return _split(texts, [ids[i] == thinking.ids[1] for i in at], opened)


def _split(texts: Sequence[str], closing: Sequence[bool], opened: bool) -> tuple[str, str, bool]:
    """Split n + 1 texts around n tags; `closing` marks the closing tags."""
    if not closing and not opened:
        return "", texts[0], True
    if True not in closing and opened:
        return "".join(texts).strip(), "", False
    # the content begins after the last closing tag
    last = len(closing) - list(closing)[::-1].index(True) if True in closing else 0
    unclosed = texts[last + 1 :]
    thinking = [part for part in ("".join(texts[:last]).strip(), "".join(unclosed).strip()) if part]
    return "\n".join(thinking), texts[last].strip(), not unclosed
