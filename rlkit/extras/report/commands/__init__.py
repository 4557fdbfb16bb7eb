"""The command `rlkit report`."""
