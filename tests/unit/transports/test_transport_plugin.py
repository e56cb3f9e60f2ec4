"""What the built-in plugin registers, and that it stays light."""

import subprocess
import sys

import pytest

from pdhub.transports.plugin import pdhub_register_transports

SPECS = list(pdhub_register_transports())


def test_names():
    assert [spec.name for spec in SPECS] == ["shm", "tcp"]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_option_is_described_and_has_a_default(spec):
    for name, field in spec.config.model_fields.items():
        assert field.description, name
    assert spec.config()
    assert spec.factory(spec.config()).name == spec.name


def test_neither_registering_nor_using_them_imports_anything_heavy():
    code = (
        "import sys\n"
        "from pdhub.transports.plugin import pdhub_register_transports\n"
        "assert 'pdhub.transports.shm' not in sys.modules\n"
        "for spec in pdhub_register_transports(): spec.factory(spec.config()).open()\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'aiohttp', 'numpy', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
