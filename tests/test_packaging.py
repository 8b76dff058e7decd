"""The project as a package: what is built, what importing costs, who may import whom."""

import ast
import configparser
import email
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
NAMES = {Path(package).name for package in PACKAGES}

SOURCES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
EVERYTHING = [
    *SOURCES,
    *sorted(p for top in ("tests", "scripts") for p in (ROOT / top).rglob("*.py")),
]
LAYOUT_NAMES = {"layer_first", "page_first", "page_first_direct", "page_head", "page_unified"}
KERNEL = {f"kvconnect.{name}" for name in ("layout", "cover", "placement", "reshard")}
BACKENDS_NEVER = KERNEL | {
    *("kvconnect.pool", "kvconnect.hostpool", "kvconnect.foreign", "kvconnect.descriptors"),
    *("kvconnect.objects", "kvconnect.connector", "kvconnect.engines", "kvconnect.cli"),
}


def relative(path):
    return path.relative_to(ROOT).as_posix()


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path):
    """Absolute names of all modules a file imports, `from a import b` counting as a and a.b."""
    package = relative(path).removeprefix("backends/").split("/")[:-1]
    out = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            out |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return out


def run(code, *path, cwd=None):
    """Run code in a fresh interpreter that sees `path` first and nothing of the checkout."""
    lines = [f"import sys; sys.path[:0] = {[str(p) for p in path]!r}", code]
    command = [sys.executable, "-P", "-W", "error", "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def wheel_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_top_level_names(built):
    tops = {name.split("/")[0] for name in wheel_files(built[1])}
    version = PROJECT["project"]["version"]
    assert tops == NAMES | {f"kvconnect-{version}.dist-info"}


def test_every_backend_is_packaged():
    assert {p.parent.name for p in (ROOT / "backends").glob("*/__init__.py")} == NAMES - {
        "kvconnect"
    }
    assert not (ROOT / "backends" / "__init__.py").exists()


def test_every_source_file_is_in_the_wheel(built):
    files = wheel_files(built[1])
    assert {relative(p).removeprefix("backends/") for p in SOURCES} <= files
    assert {f"{name}/py.typed" for name in NAMES} <= files


def test_scenarios_of_clusters_are_in_the_wheel(built):
    there = {p.name for p in (ROOT / "tests" / "cluster" / "scenarios").glob("*.toml")}
    folder = "kvconnect/testing/cluster/scenarios/"
    files = {name for name in wheel_files(built[1]) if name.startswith(folder)}
    assert files == {folder + name for name in there} != set()


def test_sdist_holds_what_a_packager_needs(built):
    with tarfile.open(built[0]) as archive:
        files = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "scripts/test"}
    assert wanted <= files
    assert "tests/test_packaging.py" in files


def test_metadata_and_entry_points(built):
    with zipfile.ZipFile(built[1]) as archive:
        info = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        folder = info.rsplit("/", 1)[0]
        meta = email.message_from_bytes(archive.read(info))
        entries = configparser.ConfigParser()
        entries.read_string(archive.read(f"{folder}/entry_points.txt").decode())
        assert f"{folder}/licenses/LICENSE" in archive.namelist()
    assert meta["License-Expression"] == "Apache-2.0"
    assert {"mooncake", "mooncake-cpu", "nixl", "dev"} <= set(meta.get_all("Provides-Extra"))
    assert (
        dict(entries["kvconnect.backends"])
        == PROJECT["project"]["entry-points"]["kvconnect.backends"]
    )
    assert entries["console_scripts"]["kvconnect"] == "kvconnect.cli.main:main"


def test_entry_points_resolve_inside_the_wheel(built, tmp_path):
    points = PROJECT["project"]["entry-points"]["kvconnect.backends"]
    targets = [*points.values(), *PROJECT["project"]["scripts"].values()]
    code = f"""
import importlib
for target in {targets!r}:
    module, _, name = target.partition(":")
    found = importlib.import_module(module)
    assert callable(getattr(found, name)), target
    assert found.__file__.startswith({str(built[1])!r}), found.__file__
"""
    run(code, built[1], cwd=tmp_path)


def test_built_in_table_matches_entry_points():
    from kvconnect import registry

    assert PROJECT["project"]["entry-points"][registry.GROUP].items() >= registry.BUILT_IN.items()


def test_import_is_quick_and_light(tmp_path):
    code = """
import time
start = time.perf_counter()
import kvconnect
print(time.perf_counter() - start)
heavy = {"torch", "lmdb", "typer", "rich", "mooncake", "nixl", "nixl_cu12"} & set(sys.modules)
assert not heavy, heavy
backends = [m for m in sys.modules if m.startswith(("kvconnect_", "kvconnect.memory"))]
assert not backends, backends
"""
    seconds = min(float(run(code, ROOT, ROOT / "backends", cwd=tmp_path)) for _ in range(5))
    assert seconds < 0.3


def test_command_line_help_is_light(tmp_path):
    code = """
import kvconnect.cli.main, kvconnect.cli.demo_run
assert "torch" not in sys.modules
"""
    run(code, ROOT, ROOT / "backends", cwd=tmp_path)


def test_bare_checkout_opens_backends(tmp_path):
    """With nothing installed (no entry points), the built-in table serves."""
    code = f"""
import importlib.metadata, kvconnect
importlib.metadata.entry_points = lambda **_: ()
assert kvconnect.__file__.startswith({str(ROOT)!r})
URL = "nvme://{tmp_path}/store?capacity=16MiB"
with kvconnect.open("memory://") as memory, kvconnect.open(URL) as nvme:
    print(memory.name, nvme.name)
"""
    assert run(code, ROOT, ROOT / "backends", cwd=tmp_path) == "memory nvme"


@pytest.mark.parametrize("name", sorted(KERNEL))
def test_kernel_imports_numpy_and_itself_only(name):
    path = ROOT / f"{name.replace('.', '/')}.py"
    inside = KERNEL | {"kvconnect.errors"}
    for module in imports(path):
        if module.split(".")[0] == "kvconnect":
            assert module in inside or module.rsplit(".", 1)[0] in inside, module
        else:
            assert module.split(".")[0] in sys.stdlib_module_names | {"numpy"}, module


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_import_directions(path):
    """Backends see descriptors, never layouts; the core never names a backend package."""
    used = imports(path)
    if path.is_relative_to(ROOT / "backends"):
        assert not used & BACKENDS_NEVER
    else:
        assert not {m for m in used if m.split(".")[0].startswith("kvconnect_")}


@pytest.mark.parametrize("path", EVERYTHING, ids=relative)
def test_file_is_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("path", EVERYTHING, ids=relative)
def test_no_pickle(path):
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    assert not {m.split(".")[0] for m in imports(path)} & banned
    calls = {ast.unparse(n.func) for n in ast.walk(tree(path)) if isinstance(n, ast.Call)}
    assert not calls & {"torch.load", "torch.save", "eval", "exec"}
    words = {k.arg for n in ast.walk(tree(path)) if isinstance(n, ast.Call) for k in n.keywords}
    assert "allow_pickle" not in words


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_branch_on_a_layout_name(path):
    """A layout's name is looked up in one table; what it can do is computed, never compared."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Compare | ast.match_case):
            found = {n.value for n in ast.walk(compared(node)) if isinstance(n, ast.Constant)}
            assert not found & LAYOUT_NAMES, f"line {compared(node).lineno}"


def compared(node):
    return node if isinstance(node, ast.Compare) else node.pattern


def test_scripts_are_executable():
    for name in ("setup", "demo", "test", "check", "setup-sglang"):
        assert (ROOT / "scripts" / name).stat().st_mode & 0o111, name
    if (ROOT / ".ci").exists():
        assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
