"""Small tasks with a known optimum, and the matrix of runs behind `rlkit bench`.

`tasks` has the tasks, `lists` their rewards, `fresh` the small policy to start from, `over_tasks`
the statistics of many comparisons, `warm` the process that is forked for each run, `matrix` the
runs, their rows and the page, `rates` the choice of learning rates, `prove` the expected updates of
`rlkit prove`. A module is imported only when it is needed.

Each file imports only files before it in this list: fresh, lists, tasks, over_tasks, warm, matrix,
rates, prove, commands.
"""
