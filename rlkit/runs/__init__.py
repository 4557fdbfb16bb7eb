"""What a run leaves behind: its folder, its report, and sweeps over many runs."""
