"""Several processes that train together: their ranks, the ways to start them, and Lightning's
strategies.

Files in the order of their imports: launch, ranks, strategies.
"""
