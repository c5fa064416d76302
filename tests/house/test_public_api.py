"""The verbs of the command line are functions of the package, whatever else has been imported."""

from importlib import import_module

import pytest

import rljax


@pytest.mark.parametrize("name", sorted(set(rljax.__all__) - {"__version__"}))
def test_verb_is_a_function(name: str) -> None:
    verb = getattr(rljax, name)
    assert callable(verb)
    import_module(verb.__module__)
    assert getattr(rljax, name) is verb, f"the module {verb.__module__} hides the function"


def test_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'trian'.*train"):
        _ = rljax.trian
