from rlkit.functional import group_mean


def halved_losers(rewards, group_ids, *, losers=0.5):
    """The group's advantage; below the mean it is scaled by `losers`. [N] → [N]"""
    advantages = group_mean(rewards, group_ids)
    below = advantages < 0
    return advantages.where(~below, losers * advantages), {"below": below.float()}
