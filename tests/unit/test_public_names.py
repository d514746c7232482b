"""The names that a package offers, which are imported when they are used."""

import pytest

import raycore
import raycore.server


@pytest.mark.parametrize("package", [raycore, raycore.server], ids=lambda package: package.__name__)
def test_names_that_are_imported_lazily_are_listed(package):
    assert set(package.__all__) <= set(dir(package))
    assert [getattr(package, name).__name__ for name in package.__all__] == package.__all__


def test_the_older_name_of_an_engine_for_asyncio_is_there():
    assert raycore.AsyncLLMEngine is raycore.AsyncLLM
