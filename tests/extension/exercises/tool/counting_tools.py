import rlkit


class Counting:
    """A calculator that counts its calls."""

    bounded = True

    def __init__(self, *, start=0):
        self.calls = start

    def calculator(self, expression: str) -> str:
        """Evaluates arithmetic.

        Args:
            expression: The expression.
        """
        self.calls += 1
        return rlkit.environments.calculator(expression)

    def state(self):
        return {"calls": self.calls}


def called_once(rollout):
    """1 where the episode's own counter says one call."""
    return float(rollout.state["counting"]["calls"] == 1)
