"""The command line: one file per command.

Files in the order of their imports: config_file, arguments, check, help, cli, compare, config_dump,
doctor, metrics, replay, rollout, runs, trust, evaluate, plan, show, train, agent, export.
"""
