"""The worlds that rollouts happen in, their rewards, and the pool of CPU processes they run in; never imports jax.

`base` says what an environment is, `rewards` holds scoring functions, `pool` runs environments in worker processes
(`worker` is the program those processes run), and every other file is one environment.
"""
