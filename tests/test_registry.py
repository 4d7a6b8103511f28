"""Every way to name a component, in every import order."""

import subprocess
import sys

import pytest

NAMES = """
import numpy as np
class Sized:
    length = [3, 1, 2]
    def __len__(self): return 3
kwargs = dict(dataset=Sized(), per_device_batch_size=1, seed=0)
"""


def run(code):
    """Run a program of its own, since registration happens once a process."""
    done = subprocess.run([sys.executable, "-c", NAMES + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("scope", [None, "mmengine", "xlength", "mmdet"])
def test_the_scoped_name_builds_from_any_registry_and_scope_without_custom_imports(scope):
    run(f"""
import mmengine.registry as registries
if {scope!r}:
    registries.init_default_scope({scope!r})
kwargs['type'] = 'xlength.LengthGroupedSampler'
for registry in (registries.DATA_SAMPLERS, registries.DATASETS, registries.HOOKS):
    assert type(registry.build(kwargs)).__module__ == 'xlength.samplers.length_grouped'
assert registries.MODELS.get(kwargs['type']).__name__ == 'LengthGroupedSampler'
""")


@pytest.mark.parametrize(
    "before",
    [
        "",
        "import mmengine",
        "import xlength",
        "import xlength.plan",
        "import xlength.plan, torch, mmengine",
        "from xlength.lengths import get_lengths",
        "import importlib.util; importlib.util.find_spec('xlength.lengths')",
    ],
)
def test_the_plain_name_builds_after_custom_imports_in_any_import_order(before, tmp_path):
    config = tmp_path / "config.py"
    config.write_text(
        "custom_imports = dict(imports=['xlength'])\n"
        "sampler = dict(type='LengthGroupedSampler', per_device_batch_size=1, seed=0)\n"
    )
    run(f"""
{before}
from mmengine.config import Config
config = Config.fromfile({str(config)!r})
from mmengine.registry import DATA_SAMPLERS, init_default_scope
init_default_scope('mmengine')
sampler = DATA_SAMPLERS.build(config.sampler, default_args=dict(dataset=Sized()))
assert type(sampler).__module__ == 'xlength.samplers.length_grouped'
""")


def test_the_class_itself_builds_from_a_lazy_config(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(
        "from xlength import LengthGroupedSampler\n"
        "from mmengine.dataset import DefaultSampler\n"
        "sampler = dict(type=LengthGroupedSampler, per_device_batch_size=1, seed=0)\n"
        "other = dict(type=DefaultSampler)\n"
    )
    run(f"""
from mmengine.config import Config
from mmengine.registry import DATA_SAMPLERS
config = Config.fromfile({str(config)!r}, lazy_import=True)
sampler = DATA_SAMPLERS.build(config.sampler, default_args=dict(dataset=Sized()))
assert type(sampler).__name__ == 'LengthGroupedSampler'
config.dump({str(tmp_path / "dumped.py")!r})
again = Config.fromfile({str(tmp_path / "dumped.py")!r}, lazy_import=False)
assert DATA_SAMPLERS.get(again.sampler.type) is type(sampler)
""")


def test_nothing_that_was_registered_before_is_replaced_and_ours_stays_within_reach():
    run("""
from mmengine.registry import DATA_SAMPLERS
import mmengine.registry as registries
@DATA_SAMPLERS.register_module()
class LengthGroupedSampler:
    pass
before = {
    name: dict(registry.module_dict)
    for name, registry in vars(registries).items()
    if isinstance(registry, registries.Registry)
}
import xlength
for name, components in before.items():
    after = getattr(registries, name).module_dict
    assert all(after[key] is component for key, component in components.items()), name
assert DATA_SAMPLERS.get('LengthGroupedSampler') is LengthGroupedSampler
assert DATA_SAMPLERS.get('xlength.LengthGroupedSampler') is xlength.LengthGroupedSampler
""")


def test_every_public_name_is_found_and_a_wrong_one_is_an_attribute_error():
    import xlength

    for name in xlength.__all__:
        assert getattr(xlength, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LenghtGroupedSampler'"):
        xlength.LenghtGroupedSampler  # noqa: B018
