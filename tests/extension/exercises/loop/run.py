"""A loop of one's own that leaves out the group with the lowest mean reward."""

from statistics import mean

import rlkit

x = rlkit.experiment("trainer.steps=2", "evaluation.n=0", "batch.prompts=4")


def without_worst(rollouts):
    groups = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout.reward)
    worst = min(groups, key=lambda group: mean(groups[group]))
    return [rollout for rollout in rollouts if rollout.group != worst]


def train(choose):
    tasks = rlkit.load_tasks(x)
    policy, device, exact = rlkit.ready(x, tasks)
    learner, stream = rlkit.Learner(x, policy, exact=exact), rlkit.StreamState()
    counts = []
    for step in range(x.trainer.steps):
        with rlkit.autocast(x, device, updates=True):
            now = learner.begin()
            sampled, trained, stream = rlkit.experience(now, policy, tasks.train, stream, step=step)
            learner.step(sampled, choose(trained))
        counts.append((len(sampled), len(learner.trained)))
    return policy, counts


mine, counts = train(without_worst)
plain, _ = train(lambda rollouts: rollouts)
usual = rlkit.train(x)
