"""A run from Python alone, without Hydra and without a run folder: every part is a function, an experiment is a named tuple.

python examples/without_hydra.py, or cell by cell in a notebook.
"""

# %% Parts: shipped ones, and one's own
import functools
import os

import torch

from rlkit import (
    KL,
    Algorithm,
    BatchSize,
    Cached,
    Evaluation,
    Experiment,
    Learner,
    Reward,
    Sampling,
    Term,
    TrainerSettings,
    arithmetic,
    calculator,
    clipped,
    hermes,
    k3,
    keep_all,
    leave_one_out,
    load_policy,
    numeric,
    token_mean,
    token_ratio,
    tool_use,
)
from rlkit.episodes.stream import StreamState
from rlkit.system.device import quiet
from rlkit.training.groups import experience
from rlkit.training.references import frozen

STEPS = int(os.environ.get("EXAMPLE_STEPS", "10"))


def brief(rollout):
    """1 for a final answer of at most 30 characters: a reward of one's own."""
    return float(len(rollout.final_content) <= 30)


# %% The experiment: what conf/ would be composed to
experiment = Experiment(
    name="without_hydra",
    seed=0,
    batch=BatchSize(prompts=8, group_size=4),
    task=functools.partial(arithmetic, seed=0),
    environment=tool_use(tools={"calculator": calculator}, parse_calls=hermes, max_turns=4),
    model=functools.partial(load_policy, path="tiny"),
    generation=Sampling(engine=Cached(), max_new_tokens=64),
    reward=Reward("mine", {"numeric": Term(1.0, numeric), "brief": Term(0.1, brief)}),
    algorithm=Algorithm("mine", leave_one_out, token_ratio, clipped, token_mean, keep_all),
    kl=KL("k3", k3, coef=0.05),
    reference=frozen(),
    optimizer=functools.partial(torch.optim.AdamW, lr=3e-4),
    trainer=TrainerSettings(steps=STEPS, accelerator="cpu"),
    evaluation=Evaluation(Reward("numeric", {"numeric": Term(1.0, numeric)}), n=0),
)

# %% Train, in a loop of one's own: `rlkit train` takes the same steps
quiet()
torch.manual_seed(experiment.seed)
policy, tasks, stream = experiment.model(device="cpu"), experiment.task(split="train"), StreamState()
learner = Learner(experiment, policy)
for _ in range(STEPS):
    x = learner.begin()  # the experiment of this step: its phase, and scheduled numbers as they are now
    sampled, trained, stream = experience(x, policy, tasks, stream, step=learner.rl_step)
    metrics = learner.step(sampled, trained)
    print(f"step {learner.rl_step}: reward {metrics['reward/mean']:.2f}, KL {metrics['kl/ref_k3']:.4f}")

# %% Look at an episode
print(learner.rollouts[0].conversation)
