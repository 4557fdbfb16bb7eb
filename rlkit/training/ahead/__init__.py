"""Sample groups of episodes ahead of training. Each RL step learns from groups. This package
decides which version of the weights samples the groups, and in which process.

The files, in order; each imports only from the files above it:

    flight    the records: a request for a step's groups, the groups, and the list of both in flight
    source    `GroupSource`, the contract for sampling groups; `get_next_groups`, its use in a step
    here      asynchrony=none and lag: sampling in the trainer's process
    weights   asynchrony=overlap: versions of the weights in memory that two processes share
    journal   groups on disk, for engines that could not sample the same groups a second time
    sampler   asynchrony=overlap: the sampling process
    process   asynchrony=overlap: the trainer's side of the sampling process
    modes     chooses the implementation by asynchrony.mode
"""
