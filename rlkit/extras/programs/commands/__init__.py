"""Commands that this extra brings: one file a command."""
