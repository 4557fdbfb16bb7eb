"""A user's own parts, each a function: a reward, an algorithm, a KL estimator, a reference, a task,
a tool, a parser of calls, an environment and a schedule. Nothing of rlkit is edited, subclassed or
registered; conf/ beside this file names them."""
