"""One RL step's work on its batch: passes without gradient, then the updates.

Each file imports only from the files above it:

    split           rows of an update, and micro-batches of a pass
    micro_batches   how large micro-batches are, and what happens if memory runs out
    record          Update: what passes and updates compute with
    optimizers      critic and optimizers, and how many steps they skipped
    sampled         rollouts as a Batch
    scored          log-probs without gradient: Scored
    claims          whether the engine samples with the versions claimed by it
    signal          whether an update has a gradient
    weighted        advantages, corrections, filters: Weighted
    drift           how far the policy moves
    loss            the losses of policy and critic on a Minibatch
    streams         training signals other than the reward
    minibatch       one update of policy and critic
    step            the whole RL step: sampled → scored → weighted → updated
    probe           the largest micro-batch of a run, tried before its first step
"""
