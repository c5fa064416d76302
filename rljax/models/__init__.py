"""The policy network: one decoder for all families, and the checkpoint formats it is read from and written to."""
