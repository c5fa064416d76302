"""The parts of `rljax.convert`: opening any model, a target that is whole or not there, writing it, and proving it."""
