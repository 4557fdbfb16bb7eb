"""Handle the results of runs: run folders, reports, and sweeps over many runs.

Each file imports only files before it in this list: comparing, folder, kernels, card, python,
reading, trends, verdicts, sweeps.
"""
