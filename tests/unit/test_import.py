"""What importing torchrelay does and does not do."""

import subprocess
import sys

import pytest
import torchrelay


def test_importing_does_not_import_torch() -> None:
    code = "import sys, torchrelay; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", torchrelay.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert name in dir(torchrelay)
    assert getattr(torchrelay, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Gpipe'"):
        torchrelay.Gpipe  # noqa: B018
