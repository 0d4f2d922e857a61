from collections.abc import Iterator

import pytest
from conf_files import read_once


@pytest.fixture(scope="package", autouse=True)
def files_of_conf_are_read_once() -> Iterator[None]:
    with read_once():
        yield
