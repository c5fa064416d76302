"""Collecting, keeping and admitting rollouts, and publishing weights to the sampler."""
