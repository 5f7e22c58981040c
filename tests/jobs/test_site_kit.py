"""The files of jobs/site/: each is read by its own tool, and asks for what pyproject.toml asks for."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import types
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.launch import ROOT, job_environment, mpiexec

import mpipipe
from mpipipe.train.config import tomllib

SITE = ROOT / "jobs" / "site"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRED = {re.match(r"[\w-]+", line)[0]: re.search(r">=([\d.]+)", line) for line in PROJECT["dependencies"]}
EASYBUILD = """
import json, sys, tempfile
from easybuild.tools.options import set_up_configuration
folder = tempfile.mkdtemp()
set_up_configuration(
    ["--prefix", folder, "--tmpdir", folder, "--fetch", "--allow-use-as-root-and-accept-consequences"], silent=True)
from easybuild.framework.easyconfig.easyconfig import EasyConfig
from easybuild.framework.easyconfig.parser import EasyConfigParser
whole = EasyConfig(sys.argv[1])
facts = EasyConfigParser(sys.argv[1]).get_config_dict()
print(json.dumps([whole.name, whole.version, whole.easyblock, dict(whole.toolchain.as_dict()), facts["dependencies"],
                  [extension[:3] for extension in facts["exts_list"]]], default=str))
"""


@pytest.mark.long
def test_easybuild_reads_the_easyconfig_and_it_has_every_dependency(tmp_path):
    if importlib.util.find_spec("easybuild") is None:
        pytest.skip("needs EasyBuild, of the extras [test] and [site]")
    (path,) = (SITE / "easybuild").glob("*.eb")
    env = {**job_environment(), "PYTHONPATH": "", "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", EASYBUILD, str(path)]
    result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert result.returncode == 0, result
    name, version, easyblock, toolchain, modules, extensions = json.loads(result.stdout.splitlines()[-1])
    assert (name, version, easyblock) == ("mpipipe", mpipipe.__version__, "PythonBundle")
    assert path.name == f"{name}-{version}-{toolchain['name']}-{toolchain['version']}.eb"
    bundles = {"numpy": "SciPy-bundle", "threadpoolctl": "Python-bundle-PyPI"}
    there = {module.lower() for module, _ in modules} | {extension[0].lower() for extension in extensions}
    for package in REQUIRED:
        assert bundles.get(package, package.replace("-", "_")).lower() in there, package
    assert [extension[0] for extension in extensions][-1] == "mpipipe"
    assert all(re.fullmatch(r"[0-9a-f]{64}", each["checksums"][0]) for *_, each in extensions[:-1])


def test_spython_reads_the_definition_and_what_it_copies_is_there():
    parsers = pytest.importorskip("spython.main.parse.parsers", reason="needs spython, of the extras [test] and [site]")
    path = SITE / "apptainer" / "mpipipe.def"
    (layer,) = parsers.get_parser("singularity")(str(path)).recipe.values()
    assert layer.fromHeader.startswith("python:3.") and layer.cmd == 'exec mpipipe "$@"'
    copied = {line.split()[0] for line in layer.files}
    assert {"pyproject.toml", "mpipipe"} <= copied and all((ROOT / name).exists() for name in copied)
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= copied  # without which the build fails
    assert 'pip install --no-cache-dir "/opt/source[mpich]"' in layer.install
    assert set(re.findall(r"\[(\w+)\]", "".join(layer.install))) <= set(PROJECT["optional-dependencies"])
    sections = re.findall(r"^%(\w+)", path.read_text(), re.MULTILINE)
    assert sections == ["files", "post", "environment", "test", "runscript", "labels", "help"]


class Directives:
    """What a package of Spack calls while its class is made. Spack itself is on no package index."""

    def __init__(self):
        self.seen, self.defaults = [], {}

    def note(self, kind):
        return lambda *words, **options: self.seen.append((kind, *words, {**self.defaults, **options}))

    @contextmanager
    def default_args(self, **options):
        self.defaults = options
        yield
        self.defaults = {}


def test_the_package_of_spack_has_every_dependency_with_its_lower_bound(monkeypatch):
    directives, package, builtin = Directives(), types.ModuleType("spack.package"), types.ModuleType("python")
    for kind in ("depends_on", "variant", "version", "license"):
        setattr(package, kind, directives.note(kind))
    package.default_args, builtin.PythonPackage = directives.default_args, type("PythonPackage", (), {})
    for name, module in (("spack.package", package), ("spack_repo.builtin.build_systems.python", builtin)):
        parents = name.split(".")[:-1]
        for length in range(1, len(parents) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parents[:length]), types.ModuleType(name))
        monkeypatch.setitem(sys.modules, name, module)
    repository = SITE / "spack" / "spack_repo" / "mpipipe"
    path = repository / "packages" / "py_mpipipe" / "package.py"
    scope = {"__name__": "package"}
    exec(compile(path.read_text(), path, "exec"), scope)
    assert issubclass(scope["PyMpipipe"], builtin.PythonPackage)
    assert "namespace: mpipipe\n" in (repository / "repo.yaml").read_text()
    wanted = {words[1].split("@")[0]: words for words in directives.seen if words[0] == "depends_on"}
    for name, bound in {**REQUIRED, "setuptools": re.search(r">=([\d.]+)", ">=77")}.items():
        spec = wanted[f"py-{name}"][1]
        assert bound is None or f"@{bound[1].removesuffix('.0')}:" in spec, spec
        assert wanted[f"py-{name}"][-1]["type"] == ("build" if name == "setuptools" else ("build", "run"))
    assert wanted["python"][1] == f"python@{PROJECT['requires-python'].removeprefix('>=')}:"
    variants = {words[1] for words in directives.seen if words[0] == "variant"}
    assert variants - {"cuda"} <= set(PROJECT["optional-dependencies"])


@pytest.mark.jobs
def test_reframe_runs_its_checks_and_finds_tokens_per_second(tmp_path):
    path = os.pathsep.join([str(Path(mpiexec()).parent), os.environ["PATH"]])
    reframe = shutil.which("reframe", path=path)
    if reframe is None:
        pytest.skip("needs ReFrame, of the extra [site]")
    env = {**job_environment(), "PATH": path, "HOME": str(tmp_path)}
    checks = ["-C", SITE / "reframe" / "settings.py", "-c", SITE / "reframe" / "checks.py"]
    choice = ["-n", "TrainingCheck.*ranks=2", "-S", f"python={sys.executable}", "-S", "TrainingCheck.steps=10"]
    options = ["--performance-report", "-r"]
    result = subprocess.run(
        [reframe, *checks, *choice, *options], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result
    assert "Ran 1/1 test case(s)" in result.stdout
    assert re.search(r"P: tokens_per_second: [1-9][\d.]* tokens/s", result.stdout), result.stdout
    assert (tmp_path / "results/reframe/report.json").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"results", ".reframe"}  # HOME is here, too
