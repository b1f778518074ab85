"""What docs/results.md says, measured and written by one command."""
