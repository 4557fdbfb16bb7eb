"""End replies at the stop texts of a request. A reply ends with the last token of its first stop
text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from rlkit.environments import split_reply
from rlkit.types import Generation, Policy


def end_at(
    policy: Policy, context: Sequence[int], reply: Generation, stops: Sequence[str]
) -> Generation:
    """Cut a reply after the last token of the first stop text in its content. Stop texts in the
    thinking do not count.

    The decision to stop at a token does not depend on later tokens. So the shortened reply has the
    same distribution and the same log-probs as a reply of an engine that stops at this text.

    Args:
      context: token ids before the reply.
    """
    tags = policy.renderer.thinking
    opened = tags.opened(context)
    whole = len(reply.token_ids) - (reply.token_ids[-1] in policy.eos_token_ids)

    def is_stopped(length: int) -> bool:
        _, content, _ = split_reply(tags, reply.token_ids[:length], opened=opened)
        text = tags.decode(reply.token_ids[:length])
        # the content has lost the white space at its end if there was thinking
        said = content and content.rstrip() + text[len(text.rstrip()) :]
        return any(stop in said for stop in stops)

    if not stops or not is_stopped(whole):
        return reply
    length = bisect_left(range(whole), True, key=is_stopped)
    return reply._replace(
        token_ids=reply.token_ids[:length],
        logprobs=reply.logprobs[:length],
        finish_reason="stop",
        forced=tuple(i for i in reply.forced if i < length),
        versions=tuple(span for span in reply.versions if span[0] < length),
    )


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first stop text, and this stop text. Without a stop text, return
    the whole text and ""."""
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, ""
    at, stop = min(found)
    return text[:at], stop
