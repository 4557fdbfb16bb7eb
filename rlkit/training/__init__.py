"""Training: the learner, what it is measured with, and its adapter to Lightning."""
