"""If this fails, a command is missing from `linum`, has no version or help, or its help imports what it need not."""

import importlib
import re
import subprocess
import sys
import tomllib

import pytest

import linumpy
from linumpy.resample.target_images import LABELS
from linumpy.voxel.mesh_image import UNITS
from linumpy.write.new_image import ZARR_FORMATS
from tests.support.script_runs import ROOT, environment, load

COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
#: What takes longest to import; a help needs none of it. Benchmarks need zarr for what they can be asked for.
HEAVY = {
    "zarr", "numcodecs", "asyncio", "scipy.ndimage", "scipy.sparse", "dask", "matplotlib", "PIL", "skimage", "trimesh",
    "vtk", "tqdm",
}  # fmt: skip


def linum(capsys, *words):
    """Run `linum` in this process; returns exit code, standard output and standard error."""
    try:
        code = load("linum").main([str(word) for word in words])
    except SystemExit as stop:
        code = stop.code
    told = capsys.readouterr()
    return code, told.out, told.err


def test_each_command_is_a_subcommand_and_the_other_way_round(capsys):
    code, out, _ = linum(capsys, "--help")
    listed = dict(re.findall(r"^  ([a-z0-9-]+)  +(\S.*\.)$", out.partition("commands:\n")[2], re.MULTILINE))
    assert code == 0
    assert {f"linum-{name}" for name in listed} == COMMANDS.keys() - {"linum"}
    for name, line in listed.items():
        module = COMMANDS[f"linum-{name}"].removesuffix(":main")
        assert line == importlib.import_module(module).__doc__.partition("\n")[0]


def test_a_description_names_options_that_exist(capsys):
    """As they are spelled, of the command itself or of another one."""
    known = set(re.findall(r"--[\w-]+", linum(capsys, "--completion")[1])) | {"--editable"}  # of pip
    for module in COMMANDS.values():
        named = re.findall(r"--[a-z][\w-]*", importlib.import_module(module.removesuffix(":main")).__doc__)
        assert set(named) <= known, module


@pytest.mark.parametrize("name", COMMANDS)
def test_the_version_of_every_command(capsys, name):
    words = name.split("-", 1)[1:]
    assert linum(capsys, *words, "--version") == (0, f"{name} {linumpy.__version__}\n", "")


def test_completion_in_bash(capsys):
    """Commands and options are completed, of `linum resample` as of `linum-resample`; bash completes other words."""
    code, script, _ = linum(capsys, "--completion")
    asked = {
        "linum res": ["resample", "resample-mosaic-grid"],
        "linum resample --coord": ["--coordinate-system"],
        "/usr/bin/linum-resample --coord": ["--coordinate-system"],
        "linum-resample br": [],
        "linum clean --q": ["--quiet"],
        "linum-benchmark --": [],
    }
    for line, wanted in asked.items():
        words = line.split(" ")
        call = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _linum; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", script + call], capture_output=True, text=True, check=True)
        assert code == 0
        assert set(wanted) <= set(done.stdout.split()), line
        assert wanted or not done.stdout.split(), line
    programs = script.splitlines()[-1].split()
    assert set(programs) >= COMMANDS.keys()


def test_a_subcommand_gets_its_arguments_and_gives_its_exit_code(capsys, tmp_path):
    words = [tmp_path / "no.zarr", tmp_path / "out.zarr", "--resolution", 5]
    with pytest.raises(SystemExit) as stop:
        load("linum_resample").main(["--resolution", "x"])
    refused = capsys.readouterr().err
    assert linum(capsys, "resample", "--resolution", "x") == (stop.value.code, "", refused)
    assert load("linum_resample").main([str(word) for word in words]) == 2
    missing = capsys.readouterr().err
    assert "no.zarr" in missing
    assert linum(capsys, "resample", *words) == (2, "", missing)


@pytest.mark.parametrize("words", [[], ["resampel"], ["--"], ["-v", "resample"], ["aip_png"]])
def test_what_is_no_command_is_refused_in_one_line(capsys, words):
    code, out, err = linum(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("linum: error: ")


def test_choices_of_the_parsers_are_those_of_the_library():
    """They are written out there, so that the help does not import the library."""

    def choices(script, option):
        parser = load(script).main.parser()
        return next(tuple(action.choices) for action in parser._actions if option in action.option_strings)

    assert choices("linum_resample", "--labels") == LABELS
    assert choices("linum_resample", "--ngff-version") == tuple(ZARR_FORMATS)
    assert choices("linum_voxelize", "--unit") == tuple(UNITS)


def imported(*commands):
    """Return which of the heavy packages these commands import, run with ``--help`` in one new process."""
    code = (
        "import contextlib, io, sys\n"
        "from linumpy_scripts.linum import main\n"
        f"for words in {[[*words, '--help'] for words in commands]!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):\n"
        "        main(words)\n"
        "    assert 'usage: linum' in out.getvalue(), words\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_help_imports_what_only_the_work_needs():
    light = [name.split("-", 1)[1:] for name in COMMANDS if "benchmark" not in name]
    assert imported(*light) == "[]"
    loaded = imported(["benchmark-kvikio-zarr"], ["benchmark", "read"])
    assert set(re.findall(r"[a-z.]+", loaded)) <= {"asyncio", "numcodecs", "zarr"}


def test_the_installed_benchmark_reads_and_the_others_need_a_checkout(capsys, monkeypatch, tmp_path):
    script = load("linum_benchmark")
    called = []
    monkeypatch.setattr("benchmarks.__main__.main", called.append)
    script.main(["tissue", "--runs", "2"])
    assert called == [["tissue", "--runs", "2"]]
    monkeypatch.setattr(script, "__file__", str(tmp_path / "linumpy_scripts/linum_benchmark.py"))
    for words, code in ((["read", "--help"], 0), (["tissue"], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as stop:
            script.main(words)
        assert stop.value.code == code
    assert "invalid choice: 'tissue'" in capsys.readouterr().err


def test_version_and_requirements_are_alike_in_every_file():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert linumpy.__version__ == project["version"] == recipe["context"]["version"] == citation["version"]
    python, *others = recipe["requirements"]["run"]
    needs = {other.replace(" ", "").replace("matplotlib-base", "matplotlib") for other in others}
    loaded = {"lz4-c>=1.8.3", "zlib>=1.2.11", "zstd>=1.4.0"}  # by the native core
    assert loaded < needs
    assert needs - loaded == set(project["dependencies"])
    assert python.replace(" ", "") == f"python{project['requires-python']}"
    # Extras for users are limits in conda, where packages for any CUDA have one name.
    extras = project["optional-dependencies"]
    of_users = [one for name in extras.keys() - {"test", "lint", "docs", "notebooks"} for one in extras[name]]
    extras = {re.sub(r"-(cuda|cu)\d+x?", "", one).replace("dask[array]", "dask-core") for one in of_users}
    assert {limit.replace(" ", "") for limit in recipe["requirements"]["run_constraints"]} == extras
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tools = {need.replace(" ", "") for need in recipe["requirements"]["build"] + recipe["requirements"]["host"]}
    assert set(build["build-system"]["requires"]) <= tools
    for tool in ("cmake", "ninja"):
        assert tool + build["tool"]["scikit-build"][tool]["version"] in tools


def test_the_conda_recipe_renders():
    rattler_build = pytest.importorskip("rattler_build", reason="pip install py-rattler-build")
    recipe = rattler_build.Stage0Recipe.from_file(ROOT / "conda/recipe.yaml")
    (rendered,) = recipe.render(rattler_build.VariantConfig.from_file(ROOT / "conda/variants.yaml"))
    names = {str(need).partition("_")[0] for need in rendered.recipe.requirements.build}
    assert {"gxx", "sysroot"} < names


@pytest.mark.parametrize("job", ["wheels", "sdist"])
def test_a_release_has_the_urls_of_its_repository(tmp_path, job):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"][job]["steps"]
    (step,) = [step for step in steps if "project.urls" in step.get("run", "")]
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    subprocess.run(["bash", "-ec", step["run"]], cwd=tmp_path, env={"REPOSITORY": "https://host/a/b"}, check=True)
    written = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert written["urls"]["Source"] == "https://host/a/b"
    assert {url.removeprefix("https://host/a/b") for url in written["urls"].values()} == {"", "/issues", "/releases"}
