"""Sampling ahead of training. Each RL step learns from groups of episodes; this package decides
which weights sample them, and where.

The files, in order; each imports only from those above it:

    flight    the records: a request for a step's groups, the groups, and what is in flight
    source    `GroupSource`, the contract for sampling groups; `get_next_groups`, its use in a step
    here      asynchrony=none and lag: sampling in the trainer's process
    weights   asynchrony=overlap: versions of the weights in memory that two processes share
    journal   groups on disk, for engines that would not sample the same ones again
    sampler   asynchrony=overlap: the sampling process
    process   asynchrony=overlap: the trainer's side of the sampling process
    modes     chooses the implementation by asynchrony.mode
"""
