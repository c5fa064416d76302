"""Advantages, losses and log-probabilities: arrays in, arrays out."""
