"""Checkpoints in, checkpoints out: training and conversion of pairs. Nothing here is needed to run a pair."""
