"""Handle the results of runs: run folders, reports, and sweeps over many runs.

Files in the order of their imports: comparing, folder, kernels, card, python, reading, trends,
verdicts, sweeps, tables.
"""
