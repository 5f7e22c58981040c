"""What the pages say about names: links lead somewhere, tables are complete, pictures are those of the code."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib

import pytest
from support.launch import ROOT, job_environment
from support.svg import content

import mpipipe
from mpipipe import schedules
from mpipipe.schedules import registry

DOCS = ROOT / "docs"
API = sorted((DOCS / "api").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *API]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[\w'-]+)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_to_files_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_of_the_package_that_a_page_names_are_there(page):
    for path in re.findall(r"`((?:mpipipe|tests|docs)/[\w/.-]+)`", page.read_text()):
        assert (ROOT / path).exists() or path.startswith("docs/_build"), path


def test_every_page_is_in_the_table_of_contents():
    contents = (DOCS / "index.md").read_text() + (DOCS / "api.md").read_text()
    listed = set(re.findall(r"^([\w/-]+)$", contents, re.MULTILINE))
    pages = {path.stem for path in (*DOCS.glob("*.md"), *DOCS.glob("*.ipynb"))} - {"index"}
    assert listed == {*pages, "auto_examples/index", *(f"api/{path.stem}" for path in API)}


def test_every_environment_variable_is_in_the_table():
    table = (DOCS / "environment.md").read_text()
    for folder in ("mpipipe", "jobs", "tests"):
        for path in ROOT.glob(f"{folder}/**/*"):
            if path.suffix in (".py", ".sh", ".sbatch"):
                for name in set(re.findall(r"\bMPIPIPE_[A-Z_]+\b", path.read_text())):
                    assert f"`{name}`" in table, f"{name} in {path}"


def test_every_job_is_in_a_page():
    text = "".join(page.read_text() for page in PAGES)
    for job in (ROOT / "jobs").glob("*"):
        if job.name not in ("common.sh",) and job.suffix in (".sh", ".sbatch"):
            assert f"jobs/{job.name}" in text, job.name


def test_the_api_pages_have_every_public_room():
    text = "".join(page.read_text() for page in API)
    rooms = "schedules nn attention optim adapters checkpoint language.models tracing"
    for name in ("mpipipe", *(f"mpipipe.{room}" for room in rooms.split())):
        assert importlib.import_module(name).__all__
        assert f".. automodule:: {name}\n" in text


def test_each_extra_is_in_the_page_of_the_environment():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = (DOCS / "environment.md").read_text().partition("| extra |")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = re.findall(r"`([\w-]+)`", "".join(cells))
    assert sorted(named) == sorted(project["optional-dependencies"])


def test_the_version_is_one_and_addresses_of_the_project_stand_in_one_place():
    assert f"\nversion: {mpipipe.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {mpipipe.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= set(urls)
    for path in (*PAGES, ROOT / "CITATION.cff", ROOT / "SECURITY.md", *(ROOT / ".github").rglob("*.*")):
        assert "mpipipe.invalid" not in path.read_text(), path


def test_every_layer_of_nn_is_in_the_page_of_layers():
    text = (DOCS / "layers.md").read_text()
    kinds = {name: getattr(mpipipe.nn, name) for name in mpipipe.nn.__all__ if name != "Layer"}
    layers = [name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, mpipipe.nn.Layer)]
    assert len(layers) >= 10
    for name in layers:
        assert re.search(rf"\b{name}\b", text), name


def test_the_timeline_is_the_one_that_is_drawn():
    drawn = schedules.timeline(schedules.one_f_one_b(3, 4))
    text = "\n".join(line.rstrip() for line in drawn.splitlines())
    assert text in (DOCS / "schedules.md").read_text()


def test_every_schedule_is_in_the_table():
    table = (DOCS / "schedule-reference.md").read_text()
    for name in {*registry.names(1), *registry.names(2), "forward_only"}:
        assert f"| `{name}(" in table, name


def script(name):
    """A script of the pages, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_names_is_up_to_date():
    assert (DOCS / "names.md").read_text() == script("names").page(), "run python docs/names.py"


def test_every_name_has_one_line_and_there_are_not_too_many():
    rooms = script("names").public_names()
    assert sum(len(lines) for lines in rooms.values()) <= 120
    for room, lines in rooms.items():
        assert all(lines.values()), room


@pytest.mark.long
def test_pictures_are_those_of_the_code(tmp_path):
    figures = script("figures")
    drawn = figures.drawn()
    for name, svg in drawn.items():
        assert (DOCS / "figures" / name).read_text() == svg, f"{name}: run python docs/figures.py"
    figures.draw_schedules(tmp_path)
    again = {path.name for path in tmp_path.iterdir()}
    for name in again:  # another matplotlib writes other bytes, and shows the same
        assert content(DOCS / "figures" / name) == content(tmp_path / name), f"{name}: run python docs/figures.py"
    assert {path.name for path in (DOCS / "figures").glob("*.svg")} == {*drawn, *again}


def test_the_notebook_runs_without_mpi_and_holds_no_results():
    cells = [cell for cell in json.loads((DOCS / "threads.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    program = "\n".join("".join(cell["source"]) for cell in cells)
    assert "inprocess.run(4, train)" in program
    done = run_alone(program)
    assert done.returncode == 0, done.stderr
    assert "activations held at once: [4, 3, 2, 1]" in done.stdout


def run_alone(program):
    """A process in which MPI cannot be imported."""
    program = "import sys\nsys.modules['mpi4py'] = None\n" + program
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=job_environment(), capture_output=True, text=True, timeout=50)
