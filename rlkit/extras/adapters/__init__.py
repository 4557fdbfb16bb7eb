"""Tasks and rewards of other packages and of servers: verifiers, reasoning-gym, math-verify, a
judge.

Each file imports only files before it in this list: _judge, _math_child, _math_verify,
_reasoning_gym, _verifiers.
"""

from rlkit.extras.adapters._judge import judge
from rlkit.extras.adapters._math_verify import math_verify
from rlkit.extras.adapters._reasoning_gym import reasoning_gym, reasoning_gym_reward
from rlkit.extras.adapters._verifiers import verifiers, verifiers_reward

__all__ = [
    "judge",
    "math_verify",
    "reasoning_gym",
    "reasoning_gym_reward",
    "verifiers",
    "verifiers_reward",
]
