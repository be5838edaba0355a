"""If this fails, an image cannot be built of the checkout, or lacks what the workflow needs. No image is built here."""

import re
import shutil
import subprocess
import tomllib

import pytest

from tests.support.script_runs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
DEFINITION = (ROOT / "workflows/linumpy.def").read_text(encoding="utf-8")
ALLOWED = [line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[0] == "!"]
INSTRUCTIONS = {"ARG", "FROM", "RUN", "COPY", "ENV", "VOLUME", "WORKDIR", "CMD"}
KERNELS = "LINUMPY_KERNEL_CACHE=/cache MPLCONFIGDIR=/cache/matplotlib"


def instructions():
    """Return the pairs (instruction, arguments) of the Dockerfile, without comments and continued lines."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", "")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]


def sections():
    """Return the sections of the definition file by name."""
    parts = re.split(r"^%(\w+)\n", DEFINITION, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def of_the_checkout(path):
    """Whether a path is in the checkout and not ignored by git."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return (ROOT / path).exists()
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "--", path], cwd=ROOT, capture_output=True)
    return bool(listed.stdout) and (ROOT / path).exists()


def needed():
    """Return what a wheel is built of: named in pyproject.toml, links of packages included."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["scikit-build"]
    files = {"pyproject.toml", "CMakeLists.txt", PROJECT["readme"], *PROJECT["license-files"]}
    return files | set(build["wheel"]["packages"] if "wheel" in build else build["wheel.packages"])


def test_instructions_are_known_and_stages_are_defined():
    stages, variables = set(), {"EXTRA", "PYTHON"}
    for name, arguments in instructions():
        assert name in INSTRUCTIONS, name
        if name == "FROM":
            assert re.fullmatch(r"python:\$\{PYTHON\}-slim( AS \w+)?", arguments)
            stages.add(arguments.split(" AS ")[-1])
        if name == "COPY" and arguments.startswith("--from="):
            assert arguments.split()[0].removeprefix("--from=") in stages
        if name == "ARG":
            assert arguments.split("=")[0] in variables
    assert ("ENV", KERNELS) in instructions()
    assert ("VOLUME", "/cache") in instructions()


def test_the_builder_gets_what_the_wheel_is_made_of_and_only_what_git_has():
    assert ("COPY", ". /source") in instructions()
    assert needed() <= set(ALLOWED)
    for path in ALLOWED:
        assert of_the_checkout(path), path
    # Links of packages lead to what is there, too.
    for link in (path for path in [*ROOT.iterdir(), *(ROOT / "linumpy").iterdir()] if path.is_symlink()):
        assert link.resolve().relative_to(ROOT).parts[0] in ALLOWED


def test_the_definition_copies_what_the_wheel_is_made_of():
    copied = dict(line.split() for line in sections()["files"].strip().splitlines())
    assert needed() == set(copied)
    for path, target in copied.items():
        assert of_the_checkout(path), path
        assert target == f"/source/{path}"
    assert DEFINITION.startswith("#")
    assert {"files", "post", "environment", "runscript", "test"} <= set(sections())
    assert KERNELS in sections()["environment"]


@pytest.mark.parametrize("text", [DOCKERFILE, DEFINITION, (ROOT / "workflows/README.md").read_text(encoding="utf-8")])
def test_extras_and_commands_exist(text):
    extras = re.findall(r"EXTRA=(\w+)", text)
    assert {"cuda13", "cuda12"} <= set(extras) <= set(PROJECT["optional-dependencies"])
    commands = set(re.findall(r"\blinum(?:-[a-z]+)*(?![-\w])", text)) - {"linum-"}
    assert commands <= set(PROJECT["scripts"])


@pytest.mark.parametrize("name", ["post", "environment", "runscript", "test"])
def test_the_shell_takes_the_sections(name):
    script = sections()[name].replace("{{ EXTRA }}", "cuda13")
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("text", [DOCKERFILE, sections()["post"]])
def test_libraries_of_decoders_and_ps_are_there(text):
    (packages,) = (
        line for line in re.findall(r"install --yes --no-install-recommends (.*)", text) if "libzstd1" in line
    )
    assert {"libzstd1", "liblz4-1", "zlib1g", "procps"} <= set(packages.split())
    assert "LINUMPY_NATIVE=require pip" in text
