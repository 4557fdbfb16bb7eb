"""Parts of a user that measure something themselves: a reward, a loss, and a callback that logs in
every hook it can."""

from __future__ import annotations

import lightning as L
import torch


def few_words(rollout):
    words = len(rollout.final_content.split())
    return float(words < 50), {"words": words}


def loss(ratio, advantages):
    return -ratio * advantages, {"above": (ratio > 1).float()}


class Own(L.Callback):
    def on_train_batch_start(self, trainer, module, *_):
        module.log("mine/half", 0.0)
        module.log("mine/half", torch.tensor(1.0))

    def on_train_batch_end(self, trainer, module, *_):
        module.metrics["mine/direct"] = torch.tensor([3.0])
        module.metrics["mine/text"] = "a word"
        module.log_dict({"mine/step": module.rl_step})

    def on_train_end(self, trainer, module):
        module.log("mine/late", 7)


def own(run):
    return Own()
