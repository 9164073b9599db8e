"""The distribution: what it contains, what it lives beside, and the files that set it up."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from deployments.config import AppArgs, cluster_environment
from engine.environment import refuse_foreign_kernels
from engine.errors import KvtideError

ROOT = Path(__file__).parent.parent
PACKAGES = ("deployments", "engine", "kernels", "kv_tiers", "policies")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Our wheel, built from a copy of the sources (a build leaves files in the tree that it builds from)."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tree)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(tree),
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("kvtide-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder for sys.path that holds the wheel's contents, as an installation would."""
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run_python(code: str, site: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=site,
        timeout=100,
        check=False,
    )


def test_the_wheel_holds_every_source_file_of_every_package(wheel):
    kept = {"*.py", "*.cpp", "*.h"}
    sources = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for pattern in kept
        for path in (ROOT / name).rglob(pattern)
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert sources - names == set()
    assert {name.split("/")[0] for name in names} == {*PACKAGES, f"kvtide-{PROJECT['version']}.dist-info"}


def test_the_wheel_carries_licence_and_notice(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert sum(name.endswith(("/LICENSE", "/NOTICE")) for name in names) == 2
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_transformers_imports_beside_our_kernels_package(installed):
    done = run_python(
        "import importlib.metadata as m\n"
        "from transformers import AutoModelForCausalLM\n"
        "import kernels\n"
        "print(set(m.packages_distributions()['kernels']), m.version('kvtide'), kernels.__file__)",
        installed,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{{'kvtide'}} {PROJECT['version']} {installed / 'kernels' / '__init__.py'}"


def test_importing_kernels_is_light(installed):
    done = run_python(
        "import sys, kernels\nprint(hasattr(kernels, '__version__'), {'transformers', 'triton'} & set(sys.modules))",
        installed,
    )
    assert done.stdout.strip() == "False set()", done.stderr


def test_a_foreign_kernels_distribution_is_refused(tmp_path, monkeypatch):
    refuse_foreign_kernels()
    info = tmp_path / "kernels-0.18.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KvtideError, match=r"'kernels' 0\.18\.2.*pip uninstall -y kernels"):
        refuse_foreign_kernels()


def test_our_version_stays_outside_the_window_that_transformers_takes_for_its_kernels():
    from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION

    assert not Version(KERNELS_MIN_VERSION) <= Version(PROJECT["version"]) < Version(KERNELS_MAX_VERSION)


def test_constraints_pin_every_dependency_inside_its_range():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[name.lower().replace("_", "-")] = version
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["gpu"], *extras["test"], *extras["dev"]]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:  # an extra that takes in another of ours
            continue
        assert requirement.specifier.contains(pins[requirement.name.lower().replace("_", "-")]), text


def test_the_readme_installs_the_pinned_torch_before_anything_that_needs_it():
    pin = next(
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
    )
    commands = [
        line.strip() for line in (ROOT / "README.md").read_text().splitlines() if "pip install" in line
    ]
    assert commands[0].startswith(f"pip install {pin} --index-url https://download.pytorch.org/whl/cpu")
    assert "pip install ." in commands[1]


def test_the_cluster_file_is_what_ray_up_accepts_and_sets_what_kvtide_serve_sets(monkeypatch):
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((ROOT / "cluster.yaml").read_text()))
    validate_config(config)
    types = config["available_node_types"]
    assert types["prefill"]["resources"]["prefill"] == types["decode"]["resources"]["decode"] == 1
    starts = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    for name in cluster_environment():
        monkeypatch.delenv(name, raising=False)
    wanted = [f"{name}={value}" for name, value in cluster_environment().items()]
    assert all(setting in command for command in starts if "ray start" in command for setting in wanted)


def test_the_production_file_is_what_serve_deploys():
    from ray.serve.schema import ServeDeploySchema

    written = yaml.safe_load((ROOT / "serve.yaml").read_text())
    config = ServeDeploySchema.model_validate(written)
    assert set(written) <= set(ServeDeploySchema.model_fields), "Serve itself lets unknown names pass"
    (application,) = config.applications
    options = AppArgs(**application.args)
    assert (
        options.prefill_resources
        and options.decode_resources
        and application.import_path == "deployments:app"
    )
    assert "api_key:" in (ROOT / "serve.yaml").read_text(), "whoever listens on 0.0.0.0 should know"


@pytest.mark.parametrize("script", ["scripts/setup.sh", "scripts/haproxy", ".ci/run"])
def test_shell_scripts_parse_and_are_executable(script):
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True, timeout=10)


def test_settings_on_the_make_command_line_reach_kvtide_serve():
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "serve", "model=demo", "policy=snapkv", "ARGS=--port 9"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        timeout=30,
        check=True,
    )
    words = done.stdout.splitlines()[-1].split()
    assert words[1] == "serve" and words[-2:] == ["--port", "9"]
    assert sorted(words[2:-2]) == ["model='demo'", "policy='snapkv'"]
