"""Do the work of one RL step on its batch: first the passes without gradient, then the updates.

Each file imports only from the files above it:

    split           choose rows for an update, and split a pass into micro-batches
    micro_batches   the size of micro-batches, and the response when memory runs out
    record          Update: the inputs of a step's passes and updates
    optimizers      the optimizers of policy and critic, and how many steps they skipped
    sampled         turn rollouts into a Batch
    scored          compute log-probs without gradient: Scored
    claims          check whether the engine samples with the weights it claims to use
    signal          whether an update has a gradient
    weighted        advantages, corrections, filters: Weighted
    drift           how far the policy moves in a step and in the run
    loss            the losses of policy and critic on a Minibatch
    streams         training signals other than the reward
    minibatch       one update of policy and critic
    step            the whole RL step: sampled → scored → weighted → updated
    probe           try the largest micro-batch of a run before its first step
"""
