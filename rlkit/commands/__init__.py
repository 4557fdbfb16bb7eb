"""The command line: one file per command.

Each file imports only files before it in this list: config_file, arguments, check, help, cli,
compare, config_dump, doctor, metrics, replay, rollout, runs, trust, evaluate, plan, show, train,
agent, export.
"""
