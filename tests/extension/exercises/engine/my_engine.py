import rlkit


class Counted:
    """Samples with `inner`, and counts the replies and their tokens so far."""

    def __init__(self, inner):
        self.inner = inner
        self.replies = 0
        self.tokens = 0

    @property
    def busy_s(self):
        return self.inner.busy_s

    async def generate(self, key, prompt_ids, seed, params):
        said = await self.inner.generate(key, prompt_ids, seed, params)
        self.replies += 1
        self.tokens += len(said.token_ids)
        return said

    def release(self, key):
        self.inner.release(key)

    async def load(self, weights, version):
        await self.inner.load(weights, version)

    def metrics(self):
        return {**self.inner.metrics(), "replies": self.replies, "tokens": self.tokens}


def counted(**options):
    """For a config: the options are those of `generation=cached`."""
    return Counted(rlkit.engines.Cached(**options))
