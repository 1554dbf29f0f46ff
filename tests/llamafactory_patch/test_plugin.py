import os
import subprocess
import sys

import pytest

pytest.importorskip("llamafactory")


def python(code, *, path=None):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, *sys.path]))}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


def test_another_version_of_llamafactory_is_refused(tmp_path):
    metadata = tmp_path / "llamafactory-0.9.4.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: llamafactory\nVersion: 0.9.4\n", encoding="utf-8")
    result = python("import llamafactory_patch as p; p.install()", path=str(tmp_path))
    assert result.returncode == 1
    assert "EngineError: llamafactory 0.9.4 is installed" in result.stderr
    assert "pip install llamafactory==0.9.5" in result.stderr


def test_importing_the_package_imports_no_engine():
    code = (
        "import sys, llamafactory_patch as p; p.run_sft; print({'torch', 'llamafactory'} & set(sys.modules))"
    )
    assert python(code).stdout == "set()\n"


def test_torchaudio_stays_unavailable_after_its_absence_was_bridged():
    code = (
        "import importlib.util, sys\n"
        "if importlib.util.find_spec('torchaudio'): sys.exit(77)\n"
        "import llamafactory_patch as p; p.install()\n"
        "from transformers.utils import is_torchaudio_available\n"
        "import llamafactory.data.mm_plugin\n"
        "print('torchaudio' in sys.modules, is_torchaudio_available())"
    )
    result = python(code)
    if result.returncode == 77:
        pytest.skip("torchaudio is installed")
    assert result.stdout.splitlines()[-1] == "False False", result.stderr


def test_installing_twice_changes_nothing():
    code = (
        "import llamafactory_patch as p; p.install()\n"
        "from llamafactory.data import loader; from llamafactory.hparams import parser\n"
        "state = lambda: (loader._get_dataset_processor, loader._load_single_dataset, tuple(parser._TRAIN_ARGS))\n"
        "before = state(); p.install(); print(before == state())"
    )
    assert python(code).stdout.splitlines()[-1] == "True"
